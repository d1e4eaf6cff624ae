"""The worker outlives whatever an executor does: no stream is left hanging, the next one is served."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
from fakes import FAKE_ENGINES, ONE, WAIT_S, FakeBackend, fake_synthesizer, in_thread, joined, settle, speak

from mktts.errors import EngineError
from mktts.synth.engine import Engine


@pytest.fixture(params=FAKE_ENGINES)
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


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
