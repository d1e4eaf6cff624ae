"""What an ended, failed, dropped or forked engine or stream leaves behind, on a fake model."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
from fakes import FAKE_ENGINES, WAIT_S, FakeBackend, fake_synthesizer, in_thread, joined, settle, speak

from mktts.errors import EngineError
from mktts.synth import Synthesizer

FAILURE = (RuntimeError, EngineError)  # of the backend's step, or of a lane that gave no number


@pytest.fixture(params=FAKE_ENGINES)
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


@pytest.fixture
def held(make):
    """A synthesizer whose every step waits for a permit."""
    backend = FakeBackend(held=True)
    with make(backend) as synth:
        yield synth, backend
        backend.release()


# ---- what a stream leaves behind


def states(backend: FakeBackend) -> list[weakref.ref]:
    return [weakref.ref(backend.states.pop()) for _ in range(len(backend.states))]


def freed(references: list[weakref.ref]) -> bool:
    gc.collect()
    return bool(references) and all(reference() is None for reference in references)


@pytest.mark.parametrize("end", ["dropped", "cancelled", "finished", "failed", "generator closed"])
def test_an_ended_stream_frees_its_state(make, end):
    backend = FakeBackend(fail_at=3 if end == "failed" else None)
    with make(backend) as synth:
        stream = speak(synth, seed=1, frames=3 if end == "finished" else None)
        if end == "generator closed":
            chunks = (chunk.pcm for chunk in stream)
            next(chunks)
            del stream
            chunks.close()
            del chunks
        elif end == "dropped":
            next(stream)
            del stream
        elif end == "cancelled":
            next(stream)
            stream.cancel()
        elif end == "finished":
            list(stream)
        else:
            with pytest.raises(FAILURE):
                list(stream)
        gc.collect()
        settle(synth)
        assert freed(states(backend))


def test_an_exception_in_the_consumer_frees_the_state(make):
    backend = FakeBackend()
    with make(backend) as synth:
        with pytest.raises(ZeroDivisionError):
            for chunk in speak(synth, seed=1, frames=None):
                chunk.frames / 0
        settle(synth)
        assert freed(states(backend))


def test_dropping_many_streams_leaves_no_jobs(make):
    with make() as synth:
        for seed in range(50):
            next(speak(synth, seed, frames=None))
        gc.collect()
        settle(synth)
        gc.collect()
        assert len(synth._engine._jobs) <= 1  # the worker may still hold the last one it looked at


# ---- failure


def test_a_failing_stream_raises_at_its_consumer_and_leaves_the_others_running(make):
    backend = FakeBackend(fail_at=4, failing_seed=2)
    with make(backend) as synth:
        good, bad = speak(synth, seed=1, frames=30), speak(synth, seed=2, frames=30)
        assert [next(bad).frames for _ in range(4)] == [1, 1, 1, 1]  # what was made before comes first
        with pytest.raises(FAILURE, match="made to fail at frame 4|gave no number"):
            next(bad)
        assert (bad.finish_reason, len(bad.codes)) == (None, 4)
        assert len(list(good)) == 30
        assert len(list(speak(synth, seed=3))) == 6


async def test_a_failure_reaches_an_async_consumer(make):
    with make(FakeBackend(fail_at=0)) as synth:
        with pytest.raises(FAILURE, match="made to fail|gave no number"):
            await anext(speak(synth, seed=1))


def test_what_fails_before_the_first_frame_is_raised_too(make):
    class NoStart(FakeBackend):
        def start(self, prompt, sampling, seed, max_frames, **_prefix):
            raise MemoryError("no room for a cache")

    with make(NoStart()) as synth, pytest.raises((MemoryError, EngineError), match="no room"):
        speak(synth, seed=1).read()


# ---- closing


def test_close_ends_open_streams_and_the_thread(held):
    synth, backend = held
    stream, session = speak(synth, seed=1, frames=None), synth.open(seed=2)
    backend.wait_entered(1)
    closing = in_thread(synth.close)
    assert list(stream) == []
    backend.release()
    joined(closing)
    assert (stream.finish_reason, session.finish_reason) == ("cancelled", "cancelled")
    assert not synth._engine._thread.is_alive()
    synth.close()


def test_a_closed_synthesizer_says_so(make):
    synth = make()
    synth.close()
    for use in (lambda: synth.stream("Hello."), synth.open, lambda: synth.say("Hello."), synth.warm_up):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_a_stream_outlives_a_synthesizer_that_was_dropped(make):
    stream = speak(make(), seed=1, frames=20)
    gc.collect()
    assert len(list(stream)) == 20


def test_a_dropped_synthesizer_ends_its_thread(make):
    synth = make()
    thread = synth._engine._thread
    del synth
    gc.collect()
    joined(thread)


def test_an_interpreter_exits_with_a_stream_still_running():
    code = "from fakes import fake_synthesizer as f; s = f(); st = s.stream('Hello.'); print(next(st).frames)"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def _use_in_child(synth: Synthesizer, pipe) -> None:
    try:
        synth.stream("Hello.")
    except EngineError as error:
        pipe.send(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_is_told_to_load_its_own(make):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with make() as synth:
        child = context.Process(target=_use_in_child, args=(synth, there))
        child.start()
        assert here.poll(WAIT_S) and "fork" in here.recv()
        child.join(WAIT_S)
        assert len(list(speak(synth, seed=1))) == 6
