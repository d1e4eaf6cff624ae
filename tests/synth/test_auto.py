"""Which engine a stream begins on where both are there, and what each then does beside the other. On fake models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import FAKE_ENGINES, OFF, ONE, FakeBackend, fake_synthesizer, in_thread, joined, settle, speak

from mktts.errors import EngineError, TextError
from mktts.speech.stream import Session
from mktts.synth import Synthesizer
from mktts.synth.loading import OPEN_SINGLY, SINGLE_STREAMS
from mktts.synth.one_by_one import MAX_FRAMES_AHEAD

SLOW = replace(ONE, buffer_frames=2)


class Launches(FakeBackend):
    """Notes how many frames each launch of the single engine makes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.launched: list[int] = []

    def frames(self, state: Any, rows: Sequence[torch.Tensor | None]) -> Iterator[Any]:
        self.launched.append(len(rows))
        return super().frames(state, rows)


@pytest.fixture
def synth() -> Iterator[Synthesizer]:
    with fake_synthesizer(engine="auto") as made:
        yield made


def waiting(synth: Synthesizer, seed: int = 1) -> Session:
    """A stream that has spoken what it has, and waits for more text."""
    session = synth.open(seed=seed, options=ONE)
    session.feed("abc")
    assert [next(session).frames for _ in range(3)] == [1, 1, 1]
    settle(synth)
    return session


def test_streams_without_text_count_for_nothing(synth):
    idle = [synth.open() for _ in range(100)]
    streams = [speak(synth, seed, frames=400, options=replace(ONE, buffer_frames=10_000)) for seed in range(3)]
    assert [stream.engine for stream in streams][:2] == ["single", "single"]
    assert {session.engine for session in idle} == {None}
    assert synth._engine.open_streams <= 3


def test_streams_that_wait_for_text_or_for_their_reader_leave_the_single_engine_to_others(synth):
    resting = [waiting(synth), speak(synth, seed=2, frames=None, options=SLOW)]
    settle(synth)
    assert [stream.engine for stream in resting] == ["single", "single"]
    assert (synth._engine.open_streams, synth._engine.due_streams) == (2, 0)
    assert speak(synth, seed=3).engine == "single"


def test_resting_streams_pile_up_on_the_single_engine_only_so_far(synth):
    streams = []
    for seed in range(OPEN_SINGLY + 3):
        streams.append(speak(synth, seed, frames=None, options=SLOW))
        while synth._engine.due_streams:
            pass  # until its buffer is full
    assert [stream.engine for stream in streams] == ["single"] * OPEN_SINGLY + ["batch"] * 3


def test_a_stream_that_goes_on_counts_again_and_stays_where_it_began():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend, engine="auto") as synth:
        sessions = [synth.open(seed=seed, options=ONE) for seed in range(4)]
        for session in sessions:
            session.feed("abcdef")
        wanted = ["single"] * SINGLE_STREAMS + ["batch"] * 2
        assert [session.engine for session in sessions] == wanted
        backend.release()
        for session in sessions:
            assert [next(session).frames for _ in range(6)] == [1] * 6
        settle(synth)
        assert synth._engine.due_streams == 0
        backend.hold()
        begun = backend.entered
        for session in sessions:
            session.feed("ghi")
        backend.wait_entered(begun + 1)
        backend.let(1)  # the worker may have gone on before it heard of all four
        backend.wait_entered(begun + 2)
        assert synth._engine.due_streams == 4 and speak(synth, seed=9).engine == "batch"
        assert [session.engine for session in sessions] == wanted
        backend.release()
        for session in sessions:
            assert [next(session).frames for _ in range(3)] == [1] * 3
            session.cancel()


@pytest.mark.parametrize("batched", ["none", "speaking", "waiting"])
def test_while_batched_streams_are_open_a_launch_of_the_megakernel_makes_one_frame(batched):
    backend = Launches()
    with fake_synthesizer(backend, engine="auto") as synth:
        holding = [waiting(synth, seed) for seed in range(2 * OPEN_SINGLY)] if batched == "waiting" else []
        for session in holding:
            if session.engine == "single":
                session.cancel()
        settle(synth)
        backend.launched.clear()
        if batched == "speaking":
            backend.held = True
            singles = [speak(synth, seed, frames=40) for seed in range(SINGLE_STREAMS)]
            holding = [speak(synth, 5, frames=4_000, options=replace(ONE, buffer_frames=10_000))]
            for stream in singles:
                stream.cancel()
            backend.release()
        beside = [stream for stream in holding if not stream._job.over]
        assert all(stream.engine == "batch" for stream in beside) and bool(beside) == (batched != "none")
        model, _ = synth._models.each()[0]
        stream = synth._stream("Hello.", {"seed": 3, "max_frames": 40, "options": OFF}, 0.0, True, (model, "single"))
        assert sum(chunk.frames for chunk in stream) == 40
        assert max(backend.launched, default=1) == (MAX_FRAMES_AHEAD if batched == "none" else 1)
        for other in beside:
            other.cancel()


# ---- streams that have not begun, on every engine


@pytest.fixture(params=FAKE_ENGINES)
def made(request) -> Iterator[Synthesizer]:
    with fake_synthesizer(engine=request.param) as synth:
        yield synth


def test_a_stream_begins_with_its_first_visible_text(made):
    session = made.open(seed=1, options=ONE)
    session.feed(" \n")
    settle(made)
    assert session.engine is None and made._engine.open_streams == 0 and not session._job.over
    session.feed("ab")
    assert session.engine in ("single", "batch")
    assert next(session).frames == 1
    session.cancel()


def test_a_stream_that_has_not_begun_ends_in_every_way(made):
    cancelled, ended, silent, closed = (made.open() for _ in range(4))
    cancelled.cancel()
    with ended:
        pass
    for session in (cancelled, ended):
        assert list(session) == [] and session.finish_reason == "cancelled"
        session.feed("dropped"), session.finish()
        assert session.engine is None and len(session.codes) == 0
    with pytest.raises(TextError, match="expected text"):
        silent.finish()
    made.close()
    assert closed.finish_reason == "cancelled" and list(closed) == []
    closed.feed("dropped"), closed.finish()
    with pytest.raises(EngineError, match="closed"):
        made.open()


def test_whoever_waits_for_a_stream_that_has_not_begun_gets_what_it_then_makes(made):
    session = made.open(seed=1, options=ONE, max_frames=2)
    heard: list[int] = []
    reader = in_thread(lambda: heard.extend(chunk.frames for chunk in session))
    session.feed("abc")
    joined(reader)
    assert heard == [1, 1]
