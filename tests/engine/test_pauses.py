"""Pauses and changes of speaker in a text: against its parts, each said by itself, with zeros between."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk, chunks_of, fed
from fakes import FAKE_ENGINES, OFF, FakeBackend, fake_synthesizer

from mktts.audio import to_pcm16
from mktts.checkpoint import open_checkpoint
from mktts.engine.scheduler import FRAME_S
from mktts.engine.script import Script, cut
from mktts.errors import TextError
from mktts.model.prompt import Request
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer
from mktts.text.parts import Pause

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
REAL = {
    "single": {"engine": "single"},
    "batch": {"engine": "batch", "deterministic": True},
    "upstream": {"backend": "upstream"},
    "own process": {"engine": "single"},
}


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
