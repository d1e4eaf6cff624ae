"""Pauses and changes of speaker, against the parts of a text that are said by themselves, with zeros between. And when
words are said: against sounds whose times are known, parts said alone, an aligner, and the text fed in pieces."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk, chunks_of, fed
from fakes import FAKE_ENGINES, OFF, FakeBackend, fake_synthesizer
from hypothesis import given
from hypothesis import strategies as st

from mktts.audio import to_pcm16
from mktts.checkpoint import open_checkpoint
from mktts.engine.options import StreamOptions, WordTime
from mktts.engine.scheduler import FRAME_S
from mktts.engine.script import Script, cut
from mktts.engine.words import WordTimes
from mktts.errors import TextError
from mktts.model.prompt import Request
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer
from mktts.text.parts import Pause, TextFeed
from mktts.text.words import split_words

ANNA = SimpleNamespace(codes=torch.arange(5 * NUM_CODEBOOKS).reshape(5, NUM_CODEBOOKS) % 97)
SEED = 11
Parts = list[tuple[str, dict[str, Any]] | float]


def parts_alone(synthesizer: Synthesizer, parts: Parts, **more: Any) -> np.ndarray:
    """Each text as an utterance of its own, with the seed of its place, and each number as so many seconds of zeros."""
    pcm, seeds = [], count(SEED)
    for part in parts:
        if isinstance(part, float):
            pcm.append(np.zeros(round(part * SAMPLE_RATE_HZ), np.float32))
        else:
            pcm.append(synthesizer.say(part[0], seed=next(seeds), **part[1], **more))
    return np.concatenate(pcm)


CASES: dict[str, tuple[str, Parts]] = {
    "between": ("Hello. [pause 0.5s] There.", [("Hello.", {}), 0.5, ("There.", {})]),
    "odd samples": ("Hello. [pause 33ms]There.", [("Hello.", {}), 0.033, ("There.", {})]),
    "the default": ("Hello.[pause]There.", [("Hello.", {}), 0.5, ("There.", {})]),
    "ssml's": ('Hello. <break time="1.25s"/> There.', [("Hello.", {}), 1.25, ("There.", {})]),
    "two in a row": ("Hello. [pause 1s] <break/> There.", [("Hello.", {}), 1.5, ("There.", {})]),
    "first and last": ("[pause 1s] Hello. [PAUSE 2 s]", [1.0, ("Hello.", {}), 2.0]),
    "silence alone": ("[pause 1.7s]", [1.7]),
    "a cut": ("<speak><s>Hello.</s><s>There.</s></speak>", [("Hello.", {}), ("There.", {})]),
    "nothing but marks between": ("Hello [pause 1s]. [pause 1s] There.", [("Hello", {}), 2.0, ("There.", {})]),
    "other voices": (
        "Hello. [Anna] Hi. [nobody] there. [Vivian] [pause 1s] Well.",
        [("Hello.", {}), ("Hi. [nobody] there.", {"voice": ANNA}), 1.0, ("Well.", {"speaker": "vivian"})],
    ),
}


@pytest.fixture(params=FAKE_ENGINES, scope="module")
def synthesizer(request) -> Iterator[Synthesizer]:
    with fake_synthesizer(FakeBackend(eos_after=5), engine=request.param) as made:
        yield made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_text_with_pauses_is_its_parts_with_zeros_between(synthesizer, case):
    text, parts = case
    expected = parts_alone(synthesizer, parts, options=OFF)
    with synthesizer.stream(text, seed=SEED, options=OFF, voices={"Anna": ANNA}) as stream:
        chunks = list(stream)
    assert np.array_equal(np.concatenate([chunk.pcm for chunk in chunks]), expected)
    assert stream.finish_reason == "eos"
    starts = np.cumsum([0, *(len(chunk.pcm) for chunk in chunks[:-1])]) / SAMPLE_RATE_HZ
    assert np.allclose([chunk.start_s for chunk in chunks], starts)
    assert sum(chunk.frames for chunk in chunks) == len(stream.codes)
    assert max(len(chunk.pcm) for chunk in chunks) <= 8 * SAMPLES_PER_FRAME
    assert all(chunk.pcm16 == to_pcm16(chunk.pcm) for chunk in chunks)
    with synthesizer.open(seed=SEED, options=OFF, voices={"Anna": ANNA}) as session:
        assert len(fed(session, text)) == len(expected)  # tests/text: pieces give what the whole gives


def test_a_fed_pause_is_heard_before_more_text_comes(synthesizer):
    with synthesizer.open(seed=SEED, options=OFF) as session:
        session.feed("Hello. [pause 0.25s] ")
        heard = 0
        while heard < 5 * SAMPLES_PER_FRAME + SAMPLE_RATE_HZ // 4:
            heard += len(next(session).pcm)
        assert len(fed(session, ["There."])) == 5 * SAMPLES_PER_FRAME


def test_pauses_that_are_too_long_together_are_refused_and_a_piece_that_is_refused_is_not_taken(synthesizer):
    with synthesizer.open(seed=SEED, options=OFF) as session:
        for use in (synthesizer.stream, session.feed):
            with pytest.raises(TextError, match="300 s together"):
                use("a [pause 10s] " * 31)
        session.feed("Hello. [pause 1")
        with pytest.raises(TextError, match="got 11 s"):
            session.feed("1s]")
        assert len(fed(session, ["s] There."])) == 10 * SAMPLES_PER_FRAME + SAMPLE_RATE_HZ


@pytest.mark.parametrize("engine", ["lone", "batch"])
def test_nothing_is_late_because_of_a_pause_and_what_follows_is_made_ahead(monkeypatch, engine):
    desk = Desk(monkeypatch, FakeBackend(eos_after=5), overlaps=engine == "batch")
    parts = cut(Request(""), ["Hello.", Pause(2 * SAMPLE_RATE_HZ), "There."], 100)
    script = Script(parts, desk.batch, desk.now_s)
    desk.say("Beside.")
    job = desk.begin(script)
    heard_s, chunks = 0.0, []
    while not job.over:
        desk.turn()
        for chunk in chunks_of(job):
            assert desk.now_s <= chunk.start_s + FRAME_S  # in time
            chunks.append(chunk)
            heard_s += chunk.duration_s
        desk.now_s += 0.02
    assert heard_s == pytest.approx(10 * FRAME_S + 2.0) and job.late_s == 0
    assert [chunk.frames for chunk in chunks].count(0) == 4  # silence, in chunks no longer than those of speech


DIALOGUE = "[Michael] Yes. [pause 0.4s] Well. [HEART] No."
MICHAEL, HEART = {"speaker": "michael"}, {"speaker": "heart"}
OF_DIALOGUE: Parts = [("Yes.", MICHAEL), 0.4, ("Well.", MICHAEL), ("No.", HEART)]
REAL = {"single": {"engine": "single"}, "batch": {"engine": "batch", "deterministic": True}}
REAL |= {"upstream": {"backend": "upstream"}, "own process": {"engine": "single"}}


@pytest.mark.parametrize("kind", REAL)
def test_a_dialogue_of_the_voice_in_the_box_is_its_parts(kind):
    small, how = open_checkpoint("small"), {"device": "cpu", **REAL[kind]}
    apart = partial(Synthesizer.load_apart, small, "small", None, how)
    load = apart if kind == "own process" else partial(Synthesizer.load, small, **how)
    with load() as synthesizer:
        pcm = synthesizer.say(DIALOGUE, seed=SEED)
        assert np.allclose(pcm, parts_alone(synthesizer, OF_DIALOGUE), atol=2e-5)
        at_once = synthesizer.say(DIALOGUE, seed=SEED, layout="streaming")
        with synthesizer.open(seed=SEED) as session:
            assert len(fed(session, re.findall(".{1,5}", DIALOGUE))) == len(at_once)
        silence = synthesizer.say("<speak><break time='40ms'/></speak>")
        assert len(silence) == 960 and not silence.any()


def test_a_guarded_end_within_a_part_is_the_end_and_a_pause_that_is_cancelled_is_not_heard(synthesizer):
    with synthesizer.stream("Hello. [pause 1s] There.", seed=SEED, max_frames=3, options=OFF) as stream:
        assert len(stream.read()) == 3 * SAMPLES_PER_FRAME and stream.finish_reason == "max_frames"
    stream = synthesizer.stream("[pause 5s]")
    assert len(next(stream).pcm) and stream.finish_reason in (None, "eos")
    stream.cancel()
    assert list(stream) == [] and stream.finish_reason == "cancelled"


ASKED = StreamOptions(word_times=True)
RANDOM = np.random.default_rng(0)


def new_times() -> WordTimes:
    return WordTimes(TextFeed(lambda name: None), str)


def found_in(sound: np.ndarray, text: str, complete: bool = True) -> list[WordTime]:
    times = new_times()
    times.feed(text)
    times.finish()
    return times.add(sound) + times.end(complete)


def vowel(seconds: float) -> np.ndarray:
    at_s = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    tones = [0.3 / n**1.2 * np.sin(2 * np.pi * 120 * n * at_s) for n in range(1, 60)]
    return np.sum(tones, axis=0).astype(np.float32)


def hiss(seconds: float) -> np.ndarray:
    noise = RANDOM.standard_normal(round(seconds * SAMPLE_RATE_HZ))
    return (0.05 * np.diff(noise, prepend=0.0)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * SAMPLE_RATE_HZ), np.float32)


def spoken(*sounds: tuple[str, float]) -> np.ndarray:
    made = {"v": vowel, "s": hiss, "_": silence}
    return np.concatenate([made[kind](seconds) for kind, seconds in sounds])


def near(times: Sequence[WordTime], starts_s: list[float], within_s: float = 0.03) -> bool:
    return [time.start_s for time in times] == pytest.approx(starts_s, abs=within_s, rel=0)


# "sa" 0.30 s long, then "so, sees see" with a pause that the marks say, one that they do not, and other lengths.
SOUND = spoken(("_", 0.1), ("s", 0.12), ("v", 0.18), ("s", 0.1), ("v", 0.3), ("_", 0.3), ("s", 0.15), ("v", 0.1),
               ("s", 0.1), ("_", 0.15), ("s", 0.2), ("v", 0.15), ("_", 0.1))  # fmt: skip
TEXT, STARTS_S = "Sa so, sees see", [0.1, 0.4, 1.1, 1.6]


@given(st.lists(st.integers(0, len(TEXT)), max_size=6), st.lists(st.integers(0, len(SOUND)), max_size=12))
def test_words_are_found_where_their_sounds_are_each_once_however_text_and_sound_are_cut(text_cuts, sound_cuts):
    times, found = new_times(), []
    for start, stop in pairwise(sorted({0, *text_cuts, len(TEXT)})):
        times.feed(TEXT[start:stop])
    times.finish()
    for start, stop in pairwise(sorted({0, *sound_cuts, len(SOUND)})):
        found += times.add(SOUND[start:stop])
    found += times.end()
    assert [time.word for time in found] == TEXT.split() and near(found, STARTS_S)
    assert [time.end_s for time in found] == pytest.approx([0.4, 0.8, 1.45, 1.95], abs=0.03)
    assert found == times.settled and all(time.estimated for time in found)


def test_text_that_comes_late_is_not_in_the_sound_made_before_it():
    times = new_times()
    sound = spoken(("s", 0.12), ("v", 0.2), ("s", 0.12), ("v", 0.2))
    times.feed("Sa ")
    found = times.add(np.concatenate((sound, silence(0.8))))
    times.feed("so.")
    times.finish()
    found += times.add(sound) + times.end()
    assert [time.word for time in found] == ["Sa", "so."]
    assert found[1].start_s >= len(sound) / SAMPLE_RATE_HZ + 0.8 - 0.011


def test_a_pause_of_the_text_is_where_its_zeros_are_not_where_others_are():
    word = [("s", 0.12), ("v", 0.2)]
    found = found_in(spoken(*word, ("_", 0.6), *word, ("_", 0.2), *word), "Sa [pause 0.6s] so see")
    assert near(found, [0.0, 0.92, 1.44]) and [time.word for time in found] == ["Sa", "so", "see"]
    assert found[0].end_s <= 0.33


@pytest.mark.parametrize("sound", [silence(2.0), np.full(48_000, 0.3, np.float32)], ids=["silence", "no speech"])
def test_words_of_what_is_no_speech_are_spread_over_it(sound):
    found = found_in(sound, "One two three four five six.")
    assert len(found) == 6 and found[-1].end_s == pytest.approx(2.0, abs=0.3)
    assert all(0 <= time.start_s <= time.end_s <= other.start_s <= 2 for time, other in pairwise(found))


def test_words_that_the_sound_does_not_reach_are_left_out():
    text = f"{TEXT} and many more words that were never made"
    found = found_in(SOUND[: SAMPLE_RATE_HZ * 8 // 10], text, complete=False)
    assert [time.word for time in found][:2] == ["Sa", "so,"] and len(found) <= 3


def words_of(speaking: Synthesizer, text: str, **settings) -> tuple[WordTime, ...]:
    stream = speaking.stream(text, **{"seed": 5, "options": ASKED, **settings})
    stream.read()
    return stream.words


def in_order(words: list[str], text: str) -> bool:
    """Whether each is in the text, behind the one before."""
    return re.search(".*?".join(map(re.escape, words)), text, re.DOTALL) is not None


def test_where_asked_for_chunks_have_the_words_that_were_said_before_and_the_stream_all(speaking):
    unasked = speaking.stream("Hello there.", seed=1)
    assert {chunk.words for chunk in unasked} == {()} and unasked.words == ()
    text = "The door was open, and there was a light in the hall. Nobody came out to meet us."
    stream = speaking.stream(text, seed=5, options=ASKED)
    of_chunks = []
    for chunk in stream:
        assert all(word.end_s <= chunk.start_s + chunk.duration_s for word in chunk.words)
        of_chunks += chunk.words
    assert tuple(of_chunks) == stream.words[: len(of_chunks)] and len(of_chunks) > 10
    assert [word.word for word in stream.words] == text.split()
    with speaking.open(seed=5, options=ASKED) as session:
        fed(session, re.findall(r".{1,7}", text))
    assert [word.word for word in session.words] == text.split()


def test_parts_of_a_text_have_the_times_of_their_parts_said_alone(speaking):
    first, second = "Look both ways first.", "Then cross the street."
    whole = words_of(speaking, f"{first} [pause 0.7s] [heart] {second}", speaker="michael")
    stream = speaking.stream(first, seed=5, options=ASKED, speaker="michael")
    begin_s = len(stream.read()) / SAMPLE_RATE_HZ + 0.7
    alone = words_of(speaking, second, seed=6, speaker="heart")
    assert [word.word for word in whole] == [*first.split(), *second.split()]
    assert near(whole[:4], [word.start_s for word in stream.words], 0.04)
    assert near(whole[4:], [begin_s + word.start_s for word in alone], 0.04)


SAID = 'Dr. Smith paid $5 for **two** [books](https://a.example/b). [pause] Then, "he" left: 50 % — on May 5th…'


@pytest.mark.parametrize("markup", ["speak", "strip"])
def test_words_are_substrings_of_the_text_in_order_and_tags_are_none(markup):
    options = StreamOptions(word_times=True, markup=markup)
    with fake_synthesizer() as synthesizer:
        words = [time.word for time in words_of(synthesizer, SAID, options=options)]
    assert in_order(words, SAID) and not any("pause" in word for word in words)
    assert len(words) >= 12


@given(st.text(alphabet="ab. ,—“”(你。\n7[]*", max_size=40))
def test_the_words_of_any_text_are_its_words_in_order(text):
    words = [time.word for time in found_in(silence(1.0), text)]
    assert in_order(words, text)
    if re.search(r"\w", text) and "[" not in text:
        assert words == split_words(text)
