"""Turns, cancelling, event loops and fed text, on a fake model whose every step is counted. No clocks."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from desk import open_streams
from fakes import OFF, ONE, WAIT_S, FakeBackend, in_thread, joined, launched_ahead, settle, speak

from mktts.engine import stream as streams
from mktts.errors import EngineError, TextError

# ---- turns


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
    results: dict[int, list[int]] = {}
    with make() as synth:

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


@pytest.mark.parametrize("leave", ["close", "with", "aclose", "async with"])
async def test_leaving_a_stream_cancels_it(make, leave):
    with make() as synth:
        stream = speak(synth, seed=1, frames=None)
        if leave == "close":
            stream.close()
        elif leave == "with":
            with stream:
                next(stream)
        elif leave == "aclose":
            await stream.aclose()
        else:
            async with stream:
                await anext(stream)
        assert stream.finish_reason == "cancelled"
        assert [chunk async for chunk in stream] == [] == list(stream)


def test_cancelling_what_has_been_read_or_taken_to_its_end_changes_nothing(make):
    with make(FakeBackend(eos_after=2)) as synth:
        with speak(synth, seed=1) as read, speak(synth, seed=2) as taken:
            assert len(list(read)) == 2
            next(taken), next(taken)
            settle(synth)
        assert (read.finish_reason, taken.finish_reason, len(read.codes)) == ("eos", "eos", 2)


# ---- event loops


async def test_a_chunk_that_arrives_just_before_the_wait_is_not_missed(held, monkeypatch):
    synth, backend = held
    stream = speak(synth, seed=1)
    loop, arrived = asyncio.get_running_loop(), threading.Event()
    put = stream._utterance.deliver
    monkeypatch.setattr(stream._utterance, "deliver", lambda *item, **how: (put(*item, **how), arrived.set()))

    def while_the_consumer_prepares_to_wait() -> asyncio.Future:
        backend.let(1)
        assert arrived.wait(WAIT_S)
        return loop.create_future()

    late = SimpleNamespace(
        create_future=while_the_consumer_prepares_to_wait, call_soon_threadsafe=loop.call_soon_threadsafe
    )
    monkeypatch.setattr(streams.asyncio, "get_running_loop", lambda: late)
    chunk = await asyncio.wait_for(anext(stream), WAIT_S / 2)  # before the held backend gives up and wakes it
    assert chunk.frames == 1


async def test_a_loop_that_closed_while_it_waited_harms_nobody(held):
    synth, backend = held
    stream = speak(synth, seed=1)

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(stream._utterance.take_async())
        loop.run_until_complete(asyncio.sleep(0))
        waiting._log_destroy_pending = False
        loop.close()

    await asyncio.to_thread(abandon)
    backend.release()
    await asyncio.to_thread(settle, synth)


# ---- fed text


def test_a_stream_begins_with_its_first_visible_text_and_takes_none_after_its_end_or_of_another_type(make):
    with make() as synth:
        session = synth.open(seed=1, options=ONE, max_frames=2)
        heard: list[int] = []
        reader = in_thread(lambda: heard.extend(chunk.frames for chunk in session))
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
        joined(reader)
        assert heard == [1, 1]


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
