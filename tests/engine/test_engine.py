"""Turns, cancelling, event loops, fed text, and what is left behind, on a fake model whose every step is counted."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from desk import open_streams
from fakes import OFF, ONE, WAIT_S, FakeBackend, fake_synthesizer, launched_ahead, settle, speak
from served import until

from mktts.engine import stream as streams
from mktts.engine.engine import FEW, MANY, SWITCH_S, YOUNG_OBJECTS, ManyStreams
from mktts.engine.runner import Runner
from mktts.errors import EngineError, TextError

in_thread = ThreadPoolExecutor().submit
RESTS = {"frames": None, "options": replace(ONE, buffer_frames=2)}  # a stream that soon waits for its reader


def test_the_first_frame_of_a_new_stream_does_not_wait_for_a_sentence(held):
    synth, backend = held
    long = speak(synth, seed=1, frames=1_000)
    backend.let(5)
    backend.wait_entered(6)  # in the middle of the sentence, inside a frame
    new = speak(synth, seed=2)
    backend.let(10)  # that frame, and ticks with both streams
    assert next(new).frames == 1
    assert backend.order[:6] == [1] * 6
    assert backend.order.index(2) <= 6 + 1 + launched_ahead(synth)
    long.cancel()


def test_streams_may_be_opened_and_read_from_many_threads(make):
    with make() as synth, ThreadPoolExecutor(12) as threads:
        streams = threads.map(lambda seed: list(speak(synth, seed, frames=20, options=OFF)), range(12), timeout=WAIT_S)
        assert [[chunk.frames for chunk in chunks] for chunks in streams] == [[1, 1, 2, 4, 8, 4]] * 12


def test_cancel_from_another_thread_takes_effect_within_one_frame(held):
    synth, backend = held
    stream = speak(synth, seed=1, frames=1_000)
    backend.let(3)
    backend.wait_entered(4)
    assert next(stream).frames == 1
    in_thread(stream.cancel).result(WAIT_S)
    assert next(stream, None) is None  # chunks 2 and 3 are ready, and stale
    assert stream.finish_reason == "cancelled"
    backend.release()
    settle(synth)
    assert 4 <= backend.order.count(1) <= 4 + launched_ahead(synth)  # the frame that was being made, and no other


@pytest.mark.parametrize("waits", ["a thread", "a task", "a task that is cancelled"])
async def test_cancel_wakes_a_consumer_that_waits_whose_own_end_cancels_the_generation(held, waits):
    synth, backend = held
    stream = speak(synth, seed=1, frames=1_000)

    async def read() -> np.ndarray:
        async with stream:
            return await stream.aread()

    reader = asyncio.create_task(asyncio.to_thread(stream.read) if waits == "a thread" else read())
    await asyncio.to_thread(backend.wait_entered, 1)
    if waits == "a task that is cancelled":
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    else:
        stream.cancel()
        assert len(await asyncio.wait_for(reader, WAIT_S)) == 0
    assert stream.finish_reason == "cancelled"
    backend.release()
    await asyncio.to_thread(settle, synth)
    assert backend.order.count(1) <= 1 + launched_ahead(synth)


async def test_leaving_a_stream_cancels_it(make):
    with make() as synth:
        closed, left, aclosed, aleft = streams = [speak(synth, seed, frames=None) for seed in range(4)]
        closed.close()
        with left:
            next(left)
        await aclosed.aclose()
        async with aleft:
            await anext(aleft)
        for stream in streams:
            assert stream.finish_reason == "cancelled"
            assert [chunk async for chunk in stream] == [] == list(stream)


def test_cancelling_what_has_been_read_or_taken_to_its_end_changes_nothing(make):
    with make(FakeBackend(eos_after=2)) as synth:
        with speak(synth, seed=1) as read, speak(synth, seed=2) as taken:
            assert len(list(read)) == 2
            next(taken), next(taken)
            settle(synth)
        assert (read.finish_reason, taken.finish_reason, len(read.codes)) == ("eos", "eos", 2)


async def test_a_chunk_that_arrives_just_before_the_wait_is_not_missed(held, monkeypatch):
    synth, backend = held
    stream = speak(synth, seed=1)
    loop, arrived = asyncio.get_running_loop(), threading.Event()
    put = stream._utterance.deliver
    monkeypatch.setattr(stream._utterance, "deliver", lambda *item, **how: (put(*item, **how), arrived.set()))

    def meanwhile() -> asyncio.Future:  # while the consumer prepares to wait
        backend.let(1)
        assert arrived.wait(WAIT_S)
        return loop.create_future()

    late = SimpleNamespace(create_future=meanwhile, call_soon_threadsafe=loop.call_soon_threadsafe)
    monkeypatch.setattr(streams.asyncio, "get_running_loop", lambda: late)
    chunk = await asyncio.wait_for(anext(stream), WAIT_S / 2)  # before the held backend gives up and wakes it
    assert chunk.frames == 1


def test_a_loop_that_closed_while_it_waited_harms_nobody(held):
    synth, backend = held
    stream, loop = speak(synth, seed=1), asyncio.new_event_loop()
    waiting = loop.create_task(stream._utterance.take_async())
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False
    loop.close()
    backend.release()
    settle(synth)


def test_a_stream_begins_with_its_first_visible_text_and_takes_none_after_its_end_or_of_another_type(make):
    with make() as synth:
        session = synth.open(seed=1, options=ONE, max_frames=2)
        reader = in_thread(list, session)
        session.feed(" \n")
        settle(synth)
        assert session.engine is None and open_streams(synth) == 0 and not session._utterance.over
        with pytest.raises(TextError, match="must be a str, got int"):
            session.feed(3)
        session.feed("abc")
        assert session.engine in ("single", "batch")
        session.finish()
        with pytest.raises(EngineError, match="feed after finish"):
            session.feed("two")
        assert [chunk.frames for chunk in reader.result(WAIT_S)] == [1, 1]


def test_a_stream_that_has_not_begun_ends_in_every_way(make):
    with make() as synth:
        cancelled, ended, closed, *silent = (synth.open() for _ in range(6))
        cancelled.cancel()
        with ended:
            pass
        for session, pieces in zip(silent, ([], [""], [" ", "\x00\n"]), strict=True):
            for piece in pieces:
                session.feed(piece)
            with pytest.raises(TextError, match="got none"):
                session.finish()
    for session in (cancelled, ended, closed, *silent):
        assert list(session) == [] and session.finish_reason == "cancelled"
        assert session.engine is None and len(session.codes) == 0
    for session in (cancelled, ended, closed):
        session.feed("dropped")  # the writer may not know yet that the listener has interrupted
        session.finish()


@pytest.mark.parametrize("how", ["dropped", "cancelled", "finished", "failed"])
def test_an_ended_stream_frees_its_state(make, how):
    backend = FakeBackend(fail_at=3, failing=[7])
    with make(backend) as synth:
        for _ in range(10):
            stream = speak(synth, seed=7 if how == "failed" else 1, frames=3 if how == "finished" else None)
            next(stream)
            if how == "cancelled":
                stream.cancel()
            elif how != "dropped":
                with pytest.raises((RuntimeError, EngineError)) if how == "failed" else contextlib.nullcontext():
                    list(stream)
        del stream
        gc.collect()
        settle(synth)
        states = [weakref.ref(backend.states.pop()) for _ in range(len(backend.states))]
        gc.collect()
        assert len(states) > 10 and not any(state() for state in states)
        assert len(synth.engine._utterances) <= 1  # the worker may still hold the last one it looked at


def test_close_ends_open_streams_and_the_thread_frees_the_models_and_what_comes_then_is_told_so(held):
    synth, backend = held
    model = weakref.ref(next(iter(synth.engine.runners.values())))
    stream, session = speak(synth, seed=1, frames=None), synth.open(seed=2)
    backend.wait_entered(1)
    closing = in_thread(synth.close)
    assert list(stream) == []
    backend.release()
    closing.result(WAIT_S)
    assert (stream.finish_reason, session.finish_reason) == ("cancelled", "cancelled")
    assert not synth.engine._thread.is_alive()
    synth.close()
    for use in (lambda: synth.stream("Hello."), synth.open, lambda: synth.say("Hello."), synth.warm_up):
        with pytest.raises(EngineError, match="closed"):
            use()
    del stream, session
    gc.collect()
    assert model() is None


def test_a_dropped_synthesizer_ends_its_thread_once_its_streams_are_read(make):
    synth = make()
    thread = synth.engine._thread
    stream = speak(synth, seed=1, frames=20)
    del synth
    gc.collect()
    assert len(list(stream)) == 20
    del stream
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_an_interpreter_exits_with_a_stream_still_running():
    code = "from fakes import fake_synthesizer as f; s = f(); st = s.stream('Hello.'); print(next(st).frames)"
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=here)
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


@pytest.mark.parametrize("engine", ["single", "batch"])
def test_the_process_is_set_for_many_streams_while_the_batch_engine_has_them(is_set, engine):
    with fake_synthesizer(engine=engine) as synth:
        streams = [speak(synth, seed, **RESTS) for seed in range(MANY - 1)]
        settle(synth)  # by one stream more
        is_set(False)
        streams += [speak(synth, seed, **RESTS) for seed in range(MANY - 1, MANY + 3)]
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
    streams = [speak(synth, seed, **RESTS) for synth in (first, second) for seed in range(MANY + 1)]
    settle(first), settle(second)
    is_set(True)
    first.close()
    is_set(True)
    assert {stream.finish_reason for stream in streams[: MANY + 1]} == {"cancelled"}
    monkeypatch.setattr(Runner, "_update_readers", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        streams[-1].read()
    is_set(False)
    second.close()


def test_what_others_froze_stays_frozen_and_larger_thresholds_stay():
    gc.freeze()
    frozen, many = gc.get_freeze_count(), ManyStreams()
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(sys.setswitchinterval, sys.getswitchinterval())
        afterwards.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(2 * YOUNG_OBJECTS, 11, 12)
        sys.setswitchinterval(SWITCH_S / 2)
        for _ in range(2):
            many.count(MANY + 1)
            assert gc.get_threshold() == (2 * YOUNG_OBJECTS, 11, 12)
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S / 2)
            many.count(FEW)
        assert gc.get_freeze_count() > 0.9 * frozen


@pytest.mark.parametrize("error", [KeyError("a wrong book"), MemoryError("no memory"), SystemExit(1)], ids=repr)
def test_turns_that_raise_end_their_streams_without_spinning_and_the_next_are_served(make, error, caplog):
    backend, turns = FakeBackend(held=True), []
    with make(backend) as synth:
        streams = [synth.open(), *(speak(synth, seed, frames=1_000) for seed in range(3))]
        streams[0].feed("abc")
        backend.wait_entered(1)
        (executor,) = synth.engine._worker.runners.values()
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
        assert open_streams(synth) == 0 and not executor.open_streams


def test_the_streams_of_another_engine_go_on_and_one_that_cannot_be_closed_keeps_none_open(caplog):
    backend = FakeBackend(held=True)
    synth = fake_synthesizer(backend, engine="auto")
    single = [speak(synth, seed, frames=30) for seed in (1, 2)]
    together = speak(synth, seed=3, frames=30)
    synth.engine._worker.runners["batch"]._update_readers = lambda now_s: 1 / 0
    backend.release()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        together.read()
    assert [len(list(stream)) for stream in single] == [30, 30]
    streams = [synth.open(options=ONE) for _ in range(3)]
    synth.engine._worker.runners["single"].close = lambda: 1 / 0
    synth.close()
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 3
    assert "could not be closed" in caplog.text and not synth.engine._thread.is_alive()
