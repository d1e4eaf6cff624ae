"""Turns, cancelling, backpressure and failure, on a fake model whose every step is counted. No clocks, no sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import WAIT_S, FakeBackend, fake_synthesizer

from mktts.errors import EngineError, TextError
from mktts.options import Guard, StreamOptions
from mktts.synth import Session, Stream, Synthesizer

OFF = StreamOptions(guard=Guard.off())
ONE = replace(OFF, schedule=(1,))


@pytest.fixture
def held():
    """A synthesizer whose every step waits for a permit."""
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend) as synth:
        yield synth, backend
        backend.release()


def speak(synth: Synthesizer, seed: int, frames: int | None = 6, options: StreamOptions = ONE) -> Stream:
    return synth.stream("Hello.", seed=seed, max_frames=frames, options=options)


def settle(synth: Synthesizer) -> None:
    """Returns once the worker has dealt with everything before: a stream of one frame is taken last."""
    stream = synth.stream("Settle.", seed=999, max_frames=1, options=ONE)
    assert len(list(stream)) == 1


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(WAIT_S)
    assert not thread.is_alive()


# ---- turns


def test_open_streams_take_turns_frame_by_frame(held):
    synth, backend = held
    streams = [speak(synth, seed=1)]
    backend.wait_entered(1)  # the worker is inside the first frame of stream 1
    streams += [speak(synth, seed=2), speak(synth, seed=3)]
    backend.let(18)
    for stream in streams:
        assert len(list(stream)) == 6
    assert backend.order[1:3] == [2, 3]  # the first frame of a new stream comes next
    assert [backend.order.count(seed) for seed in (1, 2, 3)] == [6, 6, 6]
    assert all(len(set(backend.order[i : i + 3])) == 3 for i in range(0, 18, 3)), backend.order


def test_the_first_frame_of_a_new_stream_does_not_wait_for_a_sentence(held):
    synth, backend = held
    long = speak(synth, seed=1, frames=1_000)
    backend.let(5)
    backend.wait_entered(6)  # in the middle of the sentence, inside a frame
    new = speak(synth, seed=2)
    backend.let(2)  # that frame, and one more
    assert next(new).frames == 1
    assert backend.order == [1] * 6 + [2]
    long.cancel()


def test_streams_that_take_turns_give_what_each_gives_alone():
    def pcm_and_codes(stream: Stream) -> tuple[np.ndarray, list]:
        return stream.read(), stream.codes.tolist()

    with fake_synthesizer() as synth:
        alone = [pcm_and_codes(speak(synth, seed, frames=25, options=OFF)) for seed in (1, 2, 3)]
        together = [speak(synth, seed, frames=25, options=OFF) for seed in (1, 2, 3)]
        for (pcm, codes), stream in zip(alone, together, strict=True):
            assert np.array_equal(pcm, stream.read()) and codes == stream.codes.tolist()


def test_streams_may_be_opened_and_read_from_many_threads():
    results: dict[int, list[int]] = {}
    with fake_synthesizer() as synth:

        def read(seed: int) -> None:
            results[seed] = [chunk.frames for chunk in speak(synth, seed, frames=20, options=OFF)]

        threads = [in_thread(lambda seed=seed: read(seed)) for seed in range(12)]
        for thread in threads:
            joined(thread)
    assert results == {seed: [1, 1, 2, 4, 8, 4] for seed in range(12)}


# ---- cancelling


def test_cancel_from_another_thread_takes_effect_within_one_frame(held):
    synth, backend = held
    stream = speak(synth, seed=1, frames=1_000)
    backend.let(3)
    backend.wait_entered(4)
    assert next(stream).frames == 1
    joined(in_thread(stream.cancel))
    assert next(stream, None) is None  # chunks 2 and 3 are ready, and stale
    assert stream.finish_reason == "cancelled"
    backend.release()
    settle(synth)
    assert backend.order.count(1) == 4  # the frame that was being made, and no other


def test_cancel_wakes_a_consumer_that_waits(held):
    synth, backend = held
    stream = speak(synth, seed=1)
    got: list[object] = []
    reader = in_thread(lambda: got.extend(stream))
    backend.wait_entered(1)
    stream.cancel()
    joined(reader)
    assert got == [] and stream.finish_reason == "cancelled"


async def test_cancel_from_another_task_takes_effect_within_one_frame(held):
    synth, backend = held
    stream = speak(synth, seed=1, frames=1_000)
    chunks = []
    first = asyncio.Event()

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk)
            first.set()

    reader = asyncio.create_task(read())
    backend.let(1)
    await asyncio.wait_for(first.wait(), WAIT_S)
    stream.cancel()
    await asyncio.wait_for(reader, WAIT_S)
    backend.release()
    await asyncio.to_thread(settle, synth)
    assert (len(chunks), stream.finish_reason) == (1, "cancelled")
    assert backend.order.count(1) <= 2


async def test_cancelling_the_task_that_waits_cancels_the_generation(held):
    synth, backend = held
    stream = speak(synth, seed=1, frames=1_000)

    async def read() -> None:
        async with contextlib.aclosing(stream):
            async for _ in stream:
                raise AssertionError("no frame was permitted")

    reader = asyncio.create_task(read())
    await asyncio.to_thread(backend.wait_entered, 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert stream.finish_reason == "cancelled"
    backend.release()
    await asyncio.to_thread(settle, synth)
    assert backend.order.count(1) == 1


@pytest.mark.parametrize("leave", ["close", "with", "aclose", "aclosing", "async with"])
async def test_leaving_a_stream_cancels_it(leave):
    with fake_synthesizer() as synth:
        stream = speak(synth, seed=1, frames=None)
        if leave == "close":
            stream.close()
        elif leave == "with":
            with stream:
                next(stream)
        elif leave == "aclose":
            await stream.aclose()
        elif leave == "aclosing":
            async with contextlib.aclosing(stream):
                await anext(stream)
        else:
            async with stream:
                await anext(stream)
        assert stream.finish_reason == "cancelled"
        assert [chunk async for chunk in stream] == [] == list(stream)


def test_cancelling_what_has_been_read_to_its_end_changes_nothing():
    with fake_synthesizer() as synth, speak(synth, seed=1) as stream:
        assert len(list(stream)) == 6
        stream.cancel()
    assert stream.finish_reason == "max_frames"
    assert len(stream.codes) == 6


def test_taking_the_last_chunk_and_leaving_is_no_cancelling():
    with fake_synthesizer(FakeBackend(eos_after=2)) as synth, speak(synth, seed=1) as stream:
        next(stream), next(stream)
        settle(synth)
    assert stream.finish_reason == "eos"


# ---- backpressure


@pytest.mark.parametrize(("schedule", "bound"), [((1,), 5), ((1, 1, 2, 4, 8), 8), ((3,), 7)])
def test_no_more_is_made_ahead_than_the_buffer_holds(schedule, bound):
    backend = FakeBackend()
    with fake_synthesizer(backend) as synth:
        stream = speak(synth, seed=1, frames=200, options=replace(OFF, schedule=schedule, buffer_frames=bound))
        taken, most = 0, 0
        settle(synth)
        for chunk in stream:
            taken += chunk.frames
            settle(synth)  # until the worker passes this stream over
            most = max(most, backend.order.count(1) - taken)
    assert backend.order.count(1) == 200 == taken
    assert 0 < most <= bound


def test_a_slow_consumer_does_not_hold_up_another_stream():
    with fake_synthesizer() as synth:
        slow = speak(synth, seed=1, frames=None, options=replace(ONE, buffer_frames=2))
        assert len(list(speak(synth, seed=2, frames=50))) == 50
        slow.cancel()


def test_waiting_streams_cost_no_turns():
    """The worker sleeps while the only streams wait for text or for their consumer: it asks no stream again."""
    asked: list[str] = []
    with fake_synthesizer() as synth:
        session = synth.open(seed=1, options=ONE)
        settle(synth)
        work = session._job._work
        ready = work.ready
        work.ready = lambda: asked.append("") or ready()
        settle(synth)
        before = len(asked)
        idle = threading.Event()
        assert not idle.wait(0.05)  # not a synchronisation: a spinning worker would ask thousands of times meanwhile
        assert len(asked) <= before + 2
        session.cancel()


# ---- what a stream leaves behind


def states(backend: FakeBackend) -> list[weakref.ref]:
    return [weakref.ref(backend.states.pop()) for _ in range(len(backend.states))]


def freed(references: list[weakref.ref]) -> bool:
    gc.collect()
    return bool(references) and all(reference() is None for reference in references)


@pytest.mark.parametrize("end", ["dropped", "cancelled", "finished", "failed", "generator closed"])
def test_an_ended_stream_frees_its_state(end):
    backend = FakeBackend(fail_at=3 if end == "failed" else None)
    with fake_synthesizer(backend) as synth:
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
            with pytest.raises(RuntimeError):
                list(stream)
        gc.collect()
        settle(synth)
        assert freed(states(backend))


def test_an_exception_in_the_consumer_frees_the_state():
    backend = FakeBackend()
    with fake_synthesizer(backend) as synth:
        with pytest.raises(ZeroDivisionError):
            for chunk in speak(synth, seed=1, frames=None):
                chunk.frames / 0
        settle(synth)
        assert freed(states(backend))


def test_dropping_many_streams_leaves_no_jobs():
    with fake_synthesizer() as synth:
        for seed in range(50):
            next(speak(synth, seed, frames=None))
        gc.collect()
        settle(synth)
        gc.collect()
        assert len(synth._engine._jobs) <= 1  # the worker may still hold the last one it looked at


# ---- failure


def test_a_failing_stream_raises_at_its_consumer_and_leaves_the_others_running():
    backend = FakeBackend(fail_at=4, failing_seed=2)
    with fake_synthesizer(backend) as synth:
        good, bad = speak(synth, seed=1, frames=30), speak(synth, seed=2, frames=30)
        assert [next(bad).frames for _ in range(4)] == [1, 1, 1, 1]  # what was made before comes first
        with pytest.raises(RuntimeError, match="made to fail at frame 4"):
            next(bad)
        assert (bad.finish_reason, len(bad.codes)) == (None, 4)
        assert len(list(good)) == 30
        assert len(list(speak(synth, seed=3))) == 6


async def test_a_failure_reaches_an_async_consumer():
    with fake_synthesizer(FakeBackend(fail_at=0)) as synth:
        with pytest.raises(RuntimeError, match="made to fail"):
            await anext(speak(synth, seed=1))


def test_what_fails_before_the_first_frame_is_raised_too():
    class NoStart(FakeBackend):
        def start(self, prompt, sampling, seed, max_frames):
            raise MemoryError("no room for a cache")

    with fake_synthesizer(NoStart()) as synth, pytest.raises(MemoryError, match="no room"):
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


def test_a_closed_synthesizer_says_so():
    synth = fake_synthesizer()
    synth.close()
    for use in (lambda: synth.stream("Hello."), synth.open, lambda: synth.say("Hello."), synth.warm_up):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_a_stream_outlives_a_synthesizer_that_was_dropped():
    stream = speak(fake_synthesizer(), seed=1, frames=20)
    gc.collect()
    assert len(list(stream)) == 20


def test_a_dropped_synthesizer_ends_its_thread():
    synth = fake_synthesizer()
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
def test_after_a_fork_the_child_is_told_to_load_its_own():
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with fake_synthesizer() as synth:
        child = context.Process(target=_use_in_child, args=(synth, there))
        child.start()
        assert here.poll(WAIT_S) and "fork" in here.recv()
        child.join(WAIT_S)
        assert len(list(speak(synth, seed=1))) == 6


# ---- event loops


async def test_two_async_streams_and_a_heartbeat_share_a_loop():
    """Between two chunks of either stream the loop gets round to the heartbeat: nothing in it waits for a frame."""
    backend = FakeBackend(held=True)
    events: list[str] = []
    done = asyncio.Event()

    async def read(name: str, seed: int) -> int:
        frames = 0
        async for chunk in synth.astream("Hello.", seed=seed, max_frames=10, options=ONE):
            events.append(name)
            frames += chunk.frames
        return frames

    async def heartbeat() -> None:
        while not done.is_set():
            events.append("beat")
            backend.let(1)  # one more frame: without the heartbeat nothing is ever made
            await asyncio.sleep(0)

    with fake_synthesizer(backend) as synth:
        beating = asyncio.create_task(heartbeat())
        frames = await asyncio.wait_for(asyncio.gather(read("a", 1), read("b", 2)), WAIT_S)
        done.set()
        await beating
        backend.release()
    assert frames == [10, 10]
    for name in ("a", "b"):
        at = [i for i, event in enumerate(events) if event == name]
        assert len(at) == 10
        assert all("beat" in events[i:j] for i, j in itertools.pairwise(at)), "the heartbeat was starved"


async def test_streams_of_one_synthesizer_serve_two_event_loops():
    with fake_synthesizer() as synth:

        async def read(seed: int) -> int:
            return len([chunk async for chunk in synth.astream("Hi.", seed=seed, max_frames=30, options=ONE)])

        results: list[int] = []
        other = in_thread(lambda: results.append(asyncio.run(read(1))))
        assert await read(2) == 30
        await asyncio.to_thread(joined, other)
    assert results == [30]


async def test_a_loop_that_closed_while_it_waited_harms_nobody(held):
    synth, backend = held
    stream = speak(synth, seed=1)

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(stream._job.take_async())
        loop.run_until_complete(asyncio.sleep(0))
        waiting._log_destroy_pending = False
        loop.close()

    await asyncio.to_thread(abandon)
    backend.release()
    await asyncio.to_thread(settle, synth)


# ---- fed text


def test_a_session_waits_for_text_without_stepping_and_lets_others_go_on():
    backend = FakeBackend(eos_after=9)
    with fake_synthesizer(backend) as synth:
        session = synth.open(seed=1, options=ONE)
        assert isinstance(session, Session)
        assert len(list(speak(synth, seed=2))) == 6
        assert 1 not in backend.order
        session.feed("abc")
        assert [next(session).frames for _ in range(3)] == [1, 1, 1]
        assert len(list(speak(synth, seed=3))) == 6
        assert backend.order.count(1) == 3
        session.finish()
        assert len(list(session)) == 6 and session.finish_reason == "eos"


def test_text_may_be_fed_from_another_thread_while_chunks_are_taken():
    text = "One two three four five."
    with fake_synthesizer(FakeBackend(eos_after=len(text))) as synth:
        session = synth.open(seed=1, options=ONE)

        def write() -> None:
            for word in text.split(" "):
                session.feed(word + " ")
            session.finish()

        writer = in_thread(write)
        assert len(list(session)) == len(text)
        joined(writer)
        assert session.finish_reason == "eos"


def test_finish_without_text_is_refused_and_ends_the_stream():
    with fake_synthesizer() as synth:
        for pieces in ([], [""], [" ", "\x00\n"]):
            session = synth.open()
            for piece in pieces:
                session.feed(piece)
            with pytest.raises(TextError, match="got none"):
                session.finish()
            assert list(session) == [] and session.finish_reason == "cancelled"
            session.finish()


def test_feeding_after_the_end_is_dropped_and_after_finish_refused():
    with fake_synthesizer() as synth:
        session = synth.open()
        session.cancel()
        session.feed("late")  # the writer may not know yet that the listener has interrupted
        session.finish()
        other = synth.open()
        other.feed("one")
        other.finish()
        with pytest.raises(EngineError, match="feed after finish"):
            other.feed("two")
        with pytest.raises(TextError, match="must be a str, got int"):
            synth.open().feed(3)
