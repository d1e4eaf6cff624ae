"""Chunks on their way to a socket: one at a time while the listener needs them, several together where there is time.

A write costs the event loop about the same whatever it holds, and the network a packet; a listener who has half a
second to play hears no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from mktts.spec import FRAME_RATE_HZ
from mktts.speech.options import Chunk, Timings

KEPT_LEAD_S = 0.5  # that a listener has while something is held back
MOST_FRAMES = round(FRAME_RATE_HZ)  # held back, a second


async def gathered(chunks: AsyncGenerator[Chunk], lead_s: Callable[[], float]) -> AsyncGenerator[Chunk]:
    """The same speech in fewer chunks. lead_s: seconds that the listener has to play, of what went out."""
    held: list[Chunk] = []
    coming: asyncio.Task[Chunk | None] | None = None
    try:
        while True:
            if coming is None and not held:
                chunk = await anext(chunks, None)
            else:
                coming = coming or asyncio.ensure_future(_next(chunks))
                wait_s = lead_s() - KEPT_LEAD_S if held else None
                if wait_s is None or wait_s > 0:
                    await asyncio.wait((coming,), timeout=wait_s)
                if not coming.done():
                    yield joined(held)
                    held = []
                    continue
                done, coming = coming, None
                if held and done.exception() is not None:
                    yield joined(held)
                chunk = done.result()
            if chunk is not None:
                held.append(chunk)
            if held and (chunk is None or lead_s() <= KEPT_LEAD_S or _frames(held) >= MOST_FRAMES):
                yield joined(held)
                held = []
            if chunk is None:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
            if not coming.cancelled():
                coming.exception()  # nobody wants to know
        await chunks.aclose()


async def _next(chunks: AsyncGenerator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of several that follow each other; it was ready when the last one was."""
    if len(chunks) == 1:
        return chunks[0]
    times = [chunk.timings for chunk in chunks]
    timings = Timings(
        times[-1].ready_ms,
        sum(one.prefill_ms for one in times),
        sum(one.talker_ms for one in times),
        sum(one.predictor_ms for one in times),
        sum(one.codec_ms for one in times),
    )
    return Chunk(np.concatenate([chunk.pcm for chunk in chunks]), chunks[0].start_s, _frames(chunks), timings)


def _frames(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.frames for chunk in chunks)
