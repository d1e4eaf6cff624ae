"""Sentences through a synthesizer: what is tried again, what is kept, how much is open at once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeBackend, fake_synthesizer

from mktts.errors import EngineError, VoiceError
from mktts.spec import SAMPLES_PER_FRAME
from mktts.synth.speak_all.sentences import Sentence
from mktts.synth.speak_all.takes import Attempt, Manner, takes

MANNER = Manner(seed=5, beside=Path("."))
SENTENCES = [Sentence(number, f"s{number}", f"Text number {number}.") for number in range(9)]
FRAMES = 50  # more than those that may be alike


class Wayward(FakeBackend):
    """Segments of these seeds stay on one code 0, or fail."""

    runs_away: frozenset[int] = frozenset()
    fails: frozenset[int] = frozenset()

    def step(self, state, row):
        if state.seed in self.fails and state.frames == 2:
            raise RuntimeError("made to fail")
        frame = super().step(state, row)
        if frame.codes is not None and state.seed in self.runs_away:
            frame.codes[0] = 7
        return frame


def backend(**seeds: set[int]) -> Wayward:
    made = Wayward(eos_after=FRAMES)
    for name, value in seeds.items():
        setattr(made, name, frozenset(value))
    return made


def seeds(sentence: Sentence) -> list[int]:
    return [MANNER.seed_of(sentence, attempt) for attempt in range(4)]


@pytest.fixture(params=["single", "batch-ahead"])
def engine(request):
    return request.param


def test_every_sentence_sounds_as_if_it_were_said_alone_with_its_seed(engine):
    asked = [*SENTENCES, Sentence(20, "own", "Seed of its own.", seed=77), Sentence(21, "short", "Cut.", max_frames=3)]
    with fake_synthesizer(backend(), engine=engine) as synth:
        found = {take.sentence.id: take for take in takes(synth, iter(asked), MANNER)}
        assert len({take.seed for take in found.values()}) == len(found) == len(asked)
        assert found["own"].seed == 77
        for take in found.values():
            sentence = take.sentence
            alone = synth.say(sentence.text, seed=take.seed, max_frames=sentence.max_frames)
            assert np.array_equal(take.pcm, alone)
            assert (take.status, take.reason, take.earlier) == (
                "ok", "max_frames" if sentence.max_frames else "eos", ()
            )  # fmt: skip
        assert len(found["short"].pcm) == 3 * SAMPLES_PER_FRAME


def test_seeds_follow_from_the_id_and_differ_by_attempt_and_folder():
    assert seeds(SENTENCES[0]) == seeds(Sentence(99, "s0", "Another text."))
    drawn = {seed for sentence in SENTENCES for seed in seeds(sentence)}
    assert len(drawn) == 4 * len(SENTENCES)
    other = Manner(seed=6, beside=Path("."))
    assert other.seed_of(SENTENCES[0]) != MANNER.seed_of(SENTENCES[0])


@pytest.mark.parametrize("kind", ["runs_away", "fails"])
@pytest.mark.parametrize("bad_attempts", [1, 3, 4])
def test_what_runs_away_or_fails_is_tried_again_with_another_seed_three_times_at_most(engine, kind, bad_attempts):
    unlucky = SENTENCES[4]
    four = seeds(unlucky)
    with fake_synthesizer(backend(**{kind: set(four[:bad_attempts])}), engine=engine) as synth:
        found = {take.sentence.id: take for take in takes(synth, SENTENCES, MANNER)}
        assert len(found) == len(SENTENCES)
        assert all(take.status == "ok" and not take.earlier for name, take in found.items() if name != unlucky.id)
        take = found[unlucky.id]
        assert [attempt.seed for attempt in take.earlier] == four[: min(bad_attempts, 3)]
        assert all(kind == "fails" or attempt.reason == "runaway" for attempt in take.earlier)
        assert take.seed == four[min(bad_attempts, 3)]
        if bad_attempts < 4:
            assert (take.status, take.reason, take.error) == ("ok", "eos", None)
            assert np.array_equal(take.pcm, synth.say(unlucky.text, seed=take.seed))
        elif kind == "fails":
            assert take.status == "failed" and take.error and not len(take.pcm)
        else:
            assert (take.status, take.reason) == ("unfinished", "runaway") and len(take.pcm)


def test_an_end_that_was_not_asked_for_is_missing():
    with fake_synthesizer(FakeBackend()) as synth:  # never says end-of-speech: the guard counts
        (take,) = takes(synth, SENTENCES[:1], Manner(seed=5, beside=Path("."), retries=1))
        assert (take.status, take.reason) == ("unfinished", "runaway") and len(take.earlier) == 1
        (take,) = takes(synth, SENTENCES[:1], Manner(seed=5, beside=Path("."), max_frames=4))
        assert (take.status, take.reason, take.earlier) == ("ok", "max_frames", ())


def test_nothing_spoken_is_tried_again():
    with fake_synthesizer(FakeBackend(eos_after=0)) as synth:
        (take,) = takes(synth, SENTENCES[:1], MANNER)
    assert take.status == "unfinished"
    assert take.earlier[0] == Attempt(MANNER.seed_of(SENTENCES[0]), "nothing was spoken") and len(take.earlier) == 3


def test_bad_input_is_not_tried_again_and_the_others_go_on(tmp_path):
    bad = [
        Sentence(1, "speaker", "Hello.", speaker="nobody"),
        Sentence(2, "text", "\x00"),
        Sentence(3, "voice", "Hello.", voice="missing.voice"),
        Sentence(4, "last", "Hello.", voice="missing.voice"),
    ]
    with fake_synthesizer(backend()) as synth:
        found = {take.sentence.id: take for take in takes(synth, [*bad[:3], *SENTENCES, bad[3]], MANNER)}
    assert [found[one.id].status for one in bad] == ["bad"] * 4
    assert all(found[one.id].error and not found[one.id].earlier for one in bad)
    assert all(found[one.id].status == "ok" for one in SENTENCES)
    with pytest.raises(VoiceError):
        MANNER.digest(bad[2])


def test_an_engine_that_fails_every_time_ends_the_work():
    endless = (Sentence(number, f"n{number}", "Text.") for number in range(10**6))
    with fake_synthesizer(FakeBackend(fail_at=0), engine="batch", slots=4) as synth:
        with pytest.raises(EngineError, match="failed one after the other.*made to fail|gave no number"):
            for take in takes(synth, endless, MANNER):
                assert take.status == "failed"


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_than_asked_for_is_open_or_taken_from_the_table(engine, at_once):
    taken = []
    sentences = (taken.append(one) or one for one in SENTENCES)
    with fake_synthesizer(backend(), engine=engine) as synth:
        for done, _ in enumerate(takes(synth, sentences, MANNER, at_once), 1):
            assert len(taken) <= done + at_once


class Lasting(FakeBackend):
    """The segment of one seed goes on until it is told to end: each frame waits FRAME_S for that."""

    FRAME_S = 0.005  # the other lanes of a tick wait along

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.told = seed, threading.Event()

    def step(self, state, row):
        if state.seed == self.seed and self.told.wait(self.FRAME_S):
            self.eos_after = state.frames
        return super().step(state, row)


def test_the_short_ones_do_not_wait_for_the_long_one():
    # Nobody tells the long one to end before all short ones are there. If they wait for it, it ends after 10 s.
    long = Sentence(0, "long", "Long. " * 30, max_frames=2_000)
    short = [Sentence(number, f"short{number}", "Short.", max_frames=2) for number in range(1, 9)]
    lasting, order = Lasting(MANNER.seed_of(long)), []
    with fake_synthesizer(lasting, engine="batch", slots=2) as synth:
        for take in takes(synth, [long, *short], MANNER, at_once=2):
            order.append((take.sentence.id, take.reason))
            if len(order) == len(short):
                lasting.told.set()
    assert order == [*((one.id, "max_frames") for one in short), ("long", "eos")]
