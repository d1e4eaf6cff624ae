"""Chunks on their way to a socket: one at a time while the listener needs them, several together where there is time.

A write costs the event loop about the same whatever it holds, and the network a packet; a listener who has half a
second to play hears no difference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from mktts import audio
from mktts.spec import FRAME_RATE_HZ
from mktts.speech.options import Chunk, Timings

KEPT_LEAD_S = 0.5  # that a listener has while something is held back
MOST_FRAMES = round(FRAME_RATE_HZ)  # held back, a second


class Takes(Protocol):
    """As `mktts.speech.stream.Stream.take`."""

    async def __call__(self, within_s: float | None = None) -> Chunk | None: ...


async def gathered(take: Takes, lead_s: Callable[[], float]) -> AsyncGenerator[Chunk]:
    """The chunks of a stream, fewer and larger ones where there is time. lead_s: seconds that the listener has to play,
    of what went out. What `take` raises comes behind what was held back."""
    held: list[Chunk] = []
    while True:
        try:
            chunk = await take(max(0.0, lead_s() - KEPT_LEAD_S) if held else None)
        except TimeoutError:
            if not held:
                raise
            yield joined(held)
            held = []
            continue
        except Exception:
            if held:
                yield joined(held)
            raise
        if chunk is not None:
            held.append(chunk)
        if held and (chunk is None or lead_s() <= KEPT_LEAD_S or _frames(held) >= MOST_FRAMES):
            yield joined(held)
            held = []
        if chunk is None:
            return


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
    ready = [chunk.ready_pcm16 for chunk in chunks]
    pcm16 = None if None in ready else b"".join(ready)
    return Chunk(audio.joined([chunk.pcm for chunk in chunks]), chunks[0].start_s, _frames(chunks), timings, pcm16)


def _frames(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.frames for chunk in chunks)
