"""Event loops and fed text on the engine, with a fake model."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest
from fakes import ONE, WAIT_S, FakeBackend, in_thread, joined, settle, speak

from mktts.errors import EngineError, TextError
from mktts.speech import job
from mktts.speech.stream import Session

# ---- event loops


async def test_two_async_streams_and_a_heartbeat_share_a_loop(make):
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

    with make(backend) as synth:
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


async def test_streams_of_one_synthesizer_serve_two_event_loops(make):
    with make() as synth:

        async def read(seed: int) -> int:
            return len([chunk async for chunk in synth.astream("Hi.", seed=seed, max_frames=30, options=ONE)])

        results: list[int] = []
        other = in_thread(lambda: results.append(asyncio.run(read(1))))
        assert await read(2) == 30
        await asyncio.to_thread(joined, other)
    assert results == [30]


async def test_a_chunk_that_arrives_just_before_the_wait_is_not_missed(held, monkeypatch):
    synth, backend = held
    stream = speak(synth, seed=1)
    loop, arrived = asyncio.get_running_loop(), threading.Event()
    put = stream._job._put
    monkeypatch.setattr(stream._job, "_put", lambda *item, **how: (put(*item, **how), arrived.set()))

    def while_the_consumer_prepares_to_wait() -> asyncio.Future:
        backend.let(1)
        assert arrived.wait(WAIT_S)
        return loop.create_future()

    late = SimpleNamespace(
        create_future=while_the_consumer_prepares_to_wait, call_soon_threadsafe=loop.call_soon_threadsafe
    )
    monkeypatch.setattr(job.asyncio, "get_running_loop", lambda: late)
    chunk = await asyncio.wait_for(anext(stream), WAIT_S / 2)  # before the held backend gives up and wakes it
    assert chunk.frames == 1


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


def test_a_session_waits_for_text_without_stepping_and_lets_others_go_on(make):
    backend = FakeBackend(eos_after=9)
    with make(backend) as synth:
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


def test_text_may_be_fed_from_another_thread_while_chunks_are_taken(make):
    text = "One two three four five."
    with make(FakeBackend(eos_after=len(text))) as synth:
        session = synth.open(seed=1, options=ONE)

        def write() -> None:
            for word in text.split(" "):
                session.feed(word + " ")
            session.finish()

        writer = in_thread(write)
        assert len(list(session)) == len(text)
        joined(writer)
        assert session.finish_reason == "eos"


def test_finish_without_text_is_refused_and_ends_the_stream(make):
    with make() as synth:
        for pieces in ([], [""], [" ", "\x00\n"]):
            session = synth.open()
            for piece in pieces:
                session.feed(piece)
            with pytest.raises(TextError, match="got none"):
                session.finish()
            assert list(session) == [] and session.finish_reason == "cancelled"
            session.finish()


def test_feeding_after_the_end_is_dropped_and_after_finish_refused(make):
    with make() as synth:
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
