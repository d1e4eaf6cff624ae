"""What an ended, failed, dropped or forked engine, executor or stream leaves behind, on a fake model."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes import ONE, WAIT_S, FakeBackend, fake_synthesizer, in_thread, joined, settle, speak

from mktts.batch.executor import Together
from mktts.errors import EngineError
from mktts.speech.serving import FEW, MANY, SWITCH_S, YOUNG_OBJECTS, many_streams
from mktts.speech.stream import Stream
from mktts.synth import Synthesizer
from mktts.synth.engine import Engine

FAILURE = (RuntimeError, EngineError)  # of the backend's step, or of a lane that gave no number


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


# ---- what the process is set to


@pytest.fixture
def is_set():
    """Waits until the process is set for many streams, or is not. Afterwards, all is as it was before the test."""

    def now() -> tuple[float, tuple[int, int, int], bool]:
        return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count() > 0

    gc.unfreeze()  # conftest.py froze what was imported
    before = now()
    many = SWITCH_S, (YOUNG_OBJECTS, *before[1][1:]), True

    def wait(expected: bool) -> None:
        until_s = time.monotonic() + WAIT_S
        while now() != (many if expected else before):
            assert time.monotonic() < until_s, f"expected {many if expected else before}, found {now()}"
            time.sleep(1e-3)

    yield wait
    assert now() == before
    gc.freeze()


def opened(synth: Synthesizer, seed: int) -> Stream:
    """A stream that soon waits for its reader."""
    return speak(synth, seed, frames=None, options=replace(ONE, buffer_frames=2))


@pytest.mark.parametrize("engine", ["batch", "batch-ahead"])
def test_the_process_is_set_for_many_streams_while_the_batch_engine_has_them(is_set, engine):
    with fake_synthesizer(engine=engine) as synth:
        streams = [opened(synth, seed) for seed in range(MANY - 1)]
        settle(synth)  # by one stream more
        is_set(False)
        streams += [opened(synth, seed) for seed in range(MANY - 1, MANY + 3)]
        is_set(True)
        while len(streams) > FEW + 2:
            streams.pop().cancel()
        settle(synth)
        is_set(True)
        for stream in streams[:2]:
            stream.cancel()
        is_set(False)


def test_the_process_is_not_set_for_streams_of_the_single_engine(is_set):
    with fake_synthesizer(engine="single") as synth:
        streams = [opened(synth, seed) for seed in range(MANY + 3)]
        settle(synth)
        is_set(False)
        assert all(next(stream).frames for stream in streams)


def test_of_several_engines_the_last_crowd_puts_back_what_was(is_set):
    first, second = (fake_synthesizer(engine="batch") for _ in range(2))
    with many_streams():
        streams = [opened(synth, seed) for synth in (first, second) for seed in range(MANY + 1)]
        for synth in (first, second):
            settle(synth)
    is_set(True)
    first.close()
    is_set(True)
    second.close()
    is_set(False)
    assert {stream.finish_reason for stream in streams} == {"cancelled"}


def test_a_crowd_that_a_failing_turn_ends_leaves_nothing_set(is_set, monkeypatch):
    with fake_synthesizer(engine="batch") as synth:
        streams = [opened(synth, seed) for seed in range(MANY + 1)]
        is_set(True)
        monkeypatch.setattr(Together, "_look_round", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            streams[0].read()
        is_set(False)


def test_what_others_froze_stays_frozen_and_larger_thresholds_stay():
    before = sys.getswitchinterval(), gc.get_threshold()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.set_threshold(2 * YOUNG_OBJECTS, 11, 12)
    sys.setswitchinterval(SWITCH_S / 2)
    try:
        for _ in range(2):
            with many_streams():
                assert gc.get_threshold() == (2 * YOUNG_OBJECTS, 11, 12)
                assert sys.getswitchinterval() == pytest.approx(SWITCH_S / 2)
        assert gc.get_freeze_count() > 0.9 * frozen
    finally:
        sys.setswitchinterval(before[0])
        gc.set_threshold(*before[1])


def test_contexts_of_many_threads_that_end_in_any_order_put_back_what_was(is_set):
    seen, turns = [], threading.Barrier(8, timeout=WAIT_S)

    def take_part(number: int) -> None:
        for turn in range(50):
            with many_streams(collect=False):
                turns.wait()  # all are inside
                seen.append(sys.getswitchinterval())
                time.sleep(1e-4 * ((number + turn) % 8))
            turns.wait()

    threads = [in_thread(partial(take_part, number)) for number in range(8)]
    for thread in threads:
        joined(thread)
    assert len(seen) == 400 and set(seen) == {SWITCH_S}
    is_set(False)


def executor_of(synth):
    return synth._engine._worker.executors[0]


@pytest.mark.parametrize("error", [KeyError("a wrong book"), MemoryError("no memory"), SystemExit(1)], ids=repr)
def test_a_turn_that_raises_ends_its_streams_and_the_next_are_served(make, error, caplog):
    backend = FakeBackend(held=True)
    with make(backend) as synth:
        streams = [speak(synth, seed, frames=1_000) for seed in range(3)]
        session = synth.open()
        session.feed("abc")
        readers, told = [], []

        def read(stream) -> None:
            try:
                stream.read()
            except EngineError as told_of:
                told.append(str(told_of))

        readers = [in_thread(partial(read, stream)) for stream in (*streams, session)]
        backend.wait_entered(1)
        executor = executor_of(synth)
        turn = executor.turn

        def broken(now_s: float, alone: bool) -> float:
            executor.turn = turn
            turn(now_s, alone)
            raise error

        executor.turn = broken
        backend.release()
        for reader in readers:
            joined(reader)
        assert len(told) == 4 and all(type(error).__name__ in message for message in told)
        assert "a turn failed" in caplog.text
        assert len(list(speak(synth, seed=9))) == 6
        settle(synth)
        assert synth._engine.open_streams == 0 and executor.open_jobs == 0


def test_the_streams_of_another_engine_go_on():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend, engine="auto") as synth:
        single = [speak(synth, seed, frames=30) for seed in (1, 2)]
        together = speak(synth, seed=3, frames=30)
        broken = synth._engine._worker.executors[1]
        broken._look_round = lambda now_s: 1 / 0
        backend.release()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            together.read()
        assert [len(list(stream)) for stream in single] == [30, 30]
        del broken._look_round
        holding = [speak(synth, seed, frames=None) for seed in (4, 5)]
        third = speak(synth, seed=6)
        assert (third.engine, len(list(third))) == ("batch", 6)
        for stream in holding:
            stream.cancel()


def test_a_turn_that_always_raises_does_not_spin(make):
    turns = []
    with make() as synth:
        executor = executor_of(synth)

        def broken(now_s: float, alone: bool) -> float:
            turns.append(now_s)
            raise RuntimeError("never again")

        executor.turn = broken
        for seed in range(3):
            with pytest.raises(EngineError, match="never again"):
                speak(synth, seed).read()
        until_s = time.monotonic() + WAIT_S
        while not (synth._engine._worker.sleeps and synth._engine._inbox.empty()):
            assert time.monotonic() < until_s
        assert len(turns) <= 3 * 3


def test_an_engine_that_nobody_serves_is_named(make):
    with make() as synth:
        job = synth._engine.open(_Work(), 8, "nothing")
        with pytest.raises(EngineError, match="nothing here makes streams of the engine 'nothing'"):
            job.take()
        assert len(list(speak(synth, seed=2))) == 6


class _Work:
    codes, finish_reason, cancelled, pending_frames = [], None, False, 0

    def ready(self) -> bool:
        return False

    def close(self) -> None:
        pass


def test_an_executor_that_cannot_be_closed_does_not_keep_the_others_open(caplog):
    synth = fake_synthesizer(engine="auto")
    streams = [synth.open(options=ONE) for _ in range(3)]
    synth._engine._worker.executors[0].close = lambda: 1 / 0
    synth.close()
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 3
    assert "could not be closed" in caplog.text and not synth._engine._thread.is_alive()


def test_a_closed_synthesizer_lets_go_of_its_models(make):
    synth = make()
    model = weakref.ref(synth._models.any())
    assert len(list(speak(synth, seed=1))) == 6
    synth.close()
    gc.collect()
    assert model() is None and isinstance(synth._engine, Engine)


def test_the_worker_sleeps_when_nothing_is_to_be_done(make):
    backend = FakeBackend(eos_after=50)
    with make(backend) as synth:
        waiting = synth.open(options=ONE)
        waiting.feed("abc")
        slow = speak(synth, seed=2, frames=None, options=replace(ONE, buffer_frames=3))
        settle(synth)
        made = backend.entered
        time.sleep(0.02)  # not a synchronisation: a worker that goes on would make frames meanwhile
        assert backend.entered == made and synth._engine._worker.sleeps
        slow.cancel(), waiting.cancel()
