"""What an ended, failed, dropped or forked engine, executor or stream leaves behind, on a fake model."""

import gc
import multiprocessing
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from desk import open_streams
from fakes import ONE, WAIT_S, FakeBackend, fake_synthesizer, in_thread, joined, settle, speak
from served import until

from mktts.engine.engine import FEW, MANY, SWITCH_S, YOUNG_OBJECTS, Engine, many_streams
from mktts.engine.runner import Runner
from mktts.engine.stream import Stream
from mktts.errors import EngineError
from mktts.synth import Synthesizer

FAILURE = (RuntimeError, EngineError)  # of the backend's step, or of a lane that gave no number


# ---- what a stream leaves behind


def end(synth: Synthesizer, how: str) -> None:
    """Opens a stream and leaves it in that way."""
    stream = speak(synth, seed=7 if how == "failed" else 1, frames=3 if how == "finished" else None)
    if how == "finished":
        list(stream)
    elif how == "failed":
        with pytest.raises(FAILURE):
            list(stream)
    else:
        next(stream)
        if how == "cancelled":
            stream.cancel()


@pytest.mark.parametrize("how", ["dropped", "cancelled", "finished", "failed"])
def test_an_ended_stream_frees_its_state(make, how):
    backend = FakeBackend(fail_at=3, failing_seed=7)
    with make(backend) as synth:
        for _ in range(10):
            end(synth, how)
        gc.collect()
        settle(synth)
        states = [weakref.ref(backend.states.pop()) for _ in range(len(backend.states))]
        gc.collect()
        assert len(states) > 10 and not any(state() for state in states)
        assert len(synth.engine._utterances) <= 1  # the worker may still hold the last one it looked at


# ---- closing


def test_close_ends_open_streams_and_the_thread_and_what_comes_then_is_told_so(held):
    synth, backend = held
    stream, session = speak(synth, seed=1, frames=None), synth.open(seed=2)
    backend.wait_entered(1)
    closing = in_thread(synth.close)
    assert list(stream) == []
    backend.release()
    joined(closing)
    assert (stream.finish_reason, session.finish_reason) == ("cancelled", "cancelled")
    assert not synth.engine._thread.is_alive()
    synth.close()
    for use in (lambda: synth.stream("Hello."), synth.open, lambda: synth.say("Hello."), synth.warm_up):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_a_dropped_synthesizer_ends_its_thread_once_its_streams_are_read(make):
    synth = make()
    thread = synth.engine._thread
    stream = speak(synth, seed=1, frames=20)
    del synth
    gc.collect()
    assert len(list(stream)) == 20
    del stream
    gc.collect()
    joined(thread)


def test_an_interpreter_exits_with_a_stream_still_running():
    code = "from fakes import fake_synthesizer as f; s = f(); st = s.stream('Hello.'); print(next(st).frames)"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_is_told_to_load_its_own(make):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def use_it() -> None:
        for use in (lambda: synth.stream("Hello."), session.read):
            try:
                use()
            except EngineError as error:
                there.send(str(error))

    with make() as synth:
        session = synth.open()
        session.feed("Hello, ")
        child = context.Process(target=use_it)
        child.start()
        assert all(here.poll(WAIT_S) and "fork" in here.recv() for _ in range(2))
        child.join(WAIT_S)
        session.cancel()
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

    yield lambda expected: until(lambda: now() == (many if expected else before), f"{expected}, found {now()}")
    assert now() == before
    gc.freeze()


def opened(synth: Synthesizer, seed: int) -> Stream:
    """A stream that soon waits for its reader."""
    return speak(synth, seed, frames=None, options=replace(ONE, buffer_frames=2))


@pytest.mark.parametrize("engine", ["single", "batch"])
def test_the_process_is_set_for_many_streams_while_the_batch_engine_has_them(is_set, engine):
    with fake_synthesizer(engine=engine) as synth:
        streams = [opened(synth, seed) for seed in range(MANY - 1)]
        settle(synth)  # by one stream more
        is_set(False)
        streams += [opened(synth, seed) for seed in range(MANY - 1, MANY + 3)]
        settle(synth)
        is_set(engine == "batch")
        while len(streams) > FEW + 2:
            streams.pop().cancel()
        settle(synth)
        is_set(engine == "batch")
        for stream in streams[:2]:
            stream.cancel()
        is_set(False)


def test_the_last_of_several_crowds_puts_back_what_was_though_a_failed_turn_ended_it(is_set, monkeypatch):
    first, second = (fake_synthesizer(engine="batch") for _ in range(2))
    with many_streams():
        streams = [opened(synth, seed) for synth in (first, second) for seed in range(MANY + 1)]
        settle(first), settle(second)
    is_set(True)
    first.close()
    is_set(True)
    assert {stream.finish_reason for stream in streams[: MANY + 1]} == {"cancelled"}
    monkeypatch.setattr(Runner, "_update_streams", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        streams[-1].read()
    is_set(False)
    second.close()


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


def executor_of(synth):
    return next(iter(synth.engine._worker.runners.values()))


@pytest.mark.parametrize("error", [KeyError("a wrong book"), MemoryError("no memory"), SystemExit(1)], ids=repr)
def test_turns_that_raise_end_their_streams_without_spinning_and_the_next_are_served(make, error, caplog):
    backend, turns = FakeBackend(held=True), []
    with make(backend) as synth:
        streams = [synth.open(), *(speak(synth, seed, frames=1_000) for seed in range(3))]
        streams[0].feed("abc")
        backend.wait_entered(1)
        executor = executor_of(synth)
        turn = executor.turn

        def broken(now_s: float) -> float:
            turns.append(turn(now_s))
            raise error

        executor.turn = broken
        backend.release()
        for stream in streams:
            with pytest.raises(EngineError, match=type(error).__name__):
                stream.read()
        until(lambda: synth.engine._worker.sleeps and synth.engine._inbox.empty(), "the worker to sleep")
        assert "a turn failed" in caplog.text and len(turns) <= 3 * len(streams)
        executor.turn = turn
        assert len(list(speak(synth, seed=9))) == 6
        settle(synth)
        assert open_streams(synth) == 0 and executor.open_streams == 0


def test_the_streams_of_another_engine_go_on():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend, engine="auto") as synth:
        single = [speak(synth, seed, frames=30) for seed in (1, 2)]
        together = speak(synth, seed=3, frames=30)
        broken = synth.engine._worker.runners["batch"]
        broken._update_streams = lambda now_s: 1 / 0
        backend.release()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            together.read()
        assert [len(list(stream)) for stream in single] == [30, 30]


def test_an_executor_that_cannot_be_closed_does_not_keep_the_others_open(caplog):
    synth = fake_synthesizer(engine="auto")
    streams = [synth.open(options=ONE) for _ in range(3)]
    executor_of(synth).close = lambda: 1 / 0
    synth.close()
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 3
    assert "could not be closed" in caplog.text and not synth.engine._thread.is_alive()


def test_a_closed_synthesizer_lets_go_of_its_models(make):
    synth = make()
    model = weakref.ref(next(iter(synth.engine.runners.values())))
    assert len(list(speak(synth, seed=1))) == 6
    synth.close()
    gc.collect()
    assert model() is None and isinstance(synth.engine, Engine)
