"""Turns, cancelling and backpressure, on a fake model whose every step is counted. No clocks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import (
    OFF,
    ONE,
    WAIT_S,
    FakeBackend,
    in_thread,
    joined,
    launched_ahead,
    settle,
    speak,
)

from mktts.speech.stream import Stream

# ---- turns


@pytest.mark.parametrize("make", ["single"], indirect=True)  # its turns are the subject
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
    backend.let(10)  # that frame, and ticks with both streams
    assert next(new).frames == 1
    assert backend.order[:6] == [1] * 6
    assert backend.order.index(2) <= 6 + 1 + launched_ahead(synth)
    long.cancel()


def test_streams_that_take_turns_give_what_each_gives_alone(make):
    def pcm_and_codes(stream: Stream) -> tuple[np.ndarray, list]:
        return stream.read(), stream.codes.tolist()

    with make() as synth:
        alone = [pcm_and_codes(speak(synth, seed, frames=25, options=OFF)) for seed in (1, 2, 3)]
        together = [speak(synth, seed, frames=25, options=OFF) for seed in (1, 2, 3)]
        for (pcm, codes), stream in zip(alone, together, strict=True):
            assert np.array_equal(pcm, stream.read()) and codes == stream.codes.tolist()


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
    assert backend.order.count(1) <= 2 + launched_ahead(synth)


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
    assert 1 <= backend.order.count(1) <= 1 + launched_ahead(synth)


@pytest.mark.parametrize("leave", ["close", "with", "aclose", "aclosing", "async with"])
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
        elif leave == "aclosing":
            async with contextlib.aclosing(stream):
                await anext(stream)
        else:
            async with stream:
                await anext(stream)
        assert stream.finish_reason == "cancelled"
        assert [chunk async for chunk in stream] == [] == list(stream)


def test_cancelling_what_has_been_read_to_its_end_changes_nothing(make):
    with make() as synth, speak(synth, seed=1) as stream:
        assert len(list(stream)) == 6
        stream.cancel()
    assert stream.finish_reason == "max_frames"
    assert len(stream.codes) == 6


def test_taking_the_last_chunk_and_leaving_is_no_cancelling(make):
    with make(FakeBackend(eos_after=2)) as synth, speak(synth, seed=1) as stream:
        next(stream), next(stream)
        settle(synth)
    assert stream.finish_reason == "eos"


# ---- backpressure


@pytest.mark.parametrize(("schedule", "bound"), [((1,), 5), ((1, 1, 2, 4, 8), 8), ((3,), 7)])
def test_no_more_is_made_ahead_than_the_buffer_holds(make, schedule, bound):
    backend = FakeBackend()
    with make(backend) as synth:
        stream = speak(synth, seed=1, frames=200, options=replace(OFF, schedule=schedule, buffer_frames=bound))
        taken, most = 0, 0
        settle(synth)
        for chunk in stream:
            taken += chunk.frames
            settle(synth)  # until the worker passes this stream over
            most = max(most, backend.order.count(1) - taken)
    assert backend.order.count(1) == 200 == taken
    assert 0 < most <= bound


def test_a_slow_consumer_does_not_hold_up_another_stream(make):
    with make() as synth:
        slow = speak(synth, seed=1, frames=None, options=replace(ONE, buffer_frames=2))
        assert len(list(speak(synth, seed=2, frames=50))) == 50
        slow.cancel()


def test_waiting_streams_cost_no_turns(make):
    """A stream that waits for text is asked nothing while others speak, nor while all wait."""
    asked: list[str] = []
    with make() as synth:
        session = synth.open(seed=1, options=ONE)
        session.feed("abc")
        assert [next(session).frames for _ in range(3)] == [1, 1, 1]
        settle(synth)
        work = session._job._work
        for name in ("ready", "input_known"):
            plain = getattr(work, name)
            setattr(work, name, partial(lambda plain: asked.append("") or plain(), plain))
        assert len(list(speak(synth, seed=2, frames=50))) == 50
        settle(synth)
        assert asked == []
        session.feed("d")
        assert next(session).frames == 1 and asked
        session.cancel()
