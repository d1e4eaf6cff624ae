"""One served stream: what is late at a socket, and what is written together."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from mktts.engine.options import Chunk, Timings
from mktts.errors import EngineError
from mktts.server import service
from mktts.server.access import ApiError
from mktts.server.service import KEPT_LEAD_S, MAX_HELD_FRAMES, ServedStream
from mktts.server.settings import Limits
from mktts.spec import FRAME_RATE_HZ, SAMPLES_PER_FRAME

FRAME_S = 1 / FRAME_RATE_HZ


def chunk(frames: int = 1, start: int = 0) -> Chunk:
    pcm = np.full(frames * SAMPLES_PER_FRAME, start, np.float32)
    return Chunk(pcm, start * FRAME_S, frames, Timings(10.0 * start, 1.0, 1.0, 1.0, 1.0))


class Source:
    """A stream whose chunks come at given times, seconds from the beginning of the clock."""

    seed, rests, finish_reason = 1, False, "eos"

    def __init__(self, clock: SimpleNamespace, *arrivals: tuple[float, Chunk | None | Exception]) -> None:
        self._clock, self._arrivals = clock, [(100.0 + at_s, what) for at_s, what in arrivals]
        self.cancel = self.feed = MagicMock()

    async def take(self, within_s: float | None = None) -> Chunk | None:
        at_s, what = self._arrivals[0]
        if within_s is not None and at_s > self._clock.now_s + within_s:
            self._clock.now_s += within_s
            raise TimeoutError
        self._clock.now_s = max(self._clock.now_s, at_s)
        del self._arrivals[0]
        if isinstance(what, Exception):
            raise what
        return what


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its `now_s` passes where something is waited for."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(service, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def served_stream_of(source: Source) -> tuple[ServedStream, list[float]]:
    late: list[float] = []
    around = MagicMock(limits=Limits())
    around.meters.late_s.inc = late.append
    return ServedStream(around, "tts_stream", source, 0), late


async def written(source: Source, clock: Any) -> tuple[list[tuple[float, Chunk]], list[float], ServedStream]:
    """(seconds, what) of every write, and by how much which were late."""
    made, late = served_stream_of(source)
    writes = []
    try:
        async for one in made.chunks():
            async with made.sending(one.duration_s):
                writes.append((round(clock.now_s - 100.0, 6), one))
    except ApiError:
        pass
    return writes, late, made


def frames_of(writes: list[tuple[float, Chunk]]) -> list[tuple[float, int]]:
    return [(at_s, one.frames) for at_s, one in writes]


async def test_a_write_later_than_the_listeners_place_is_an_underrun(clock):
    source = Source(clock, (0.0, chunk()), (0.05, chunk()), (0.2, chunk()), (0.25, chunk()), (0.3, None))
    writes, late, _ = await written(source, clock)
    assert frames_of(writes) == [(0.0, 1), (0.05, 1), (0.2, 1), (0.25, 1)]
    assert late == pytest.approx([0.2 - 2 * FRAME_S])


async def test_what_the_text_or_the_client_held_up_is_no_underrun(clock):
    source = Source(clock, (0.0, chunk()), (1.0, chunk()), (5.0, chunk()), (5.0, None))
    made, late = served_stream_of(source)
    chunks = made.chunks()
    async with made.sending((await anext(chunks)).duration_s):
        pass
    clock.now_s, source.idle = 100.97, True
    made.feed("And more. ")
    source.idle = False
    async with made.sending((await anext(chunks)).duration_s):
        clock.now_s = 105.0  # the client took nothing for four seconds
    async with made.sending((await anext(chunks)).duration_s):
        assert not late
    assert await anext(chunks, None) is None


async def test_a_stream_that_is_ahead_gathers_and_one_that_is_not_writes_at_once(clock):
    fast = [(0.01 * n, chunk(4, 4 * n)) for n in range(12)]
    writes, late, _ = await written(Source(clock, *fast, (0.2, None)), clock)
    frames = [one.frames for _, one in writes]
    assert sum(frames) == 48 and not late
    lead_s = [sum(frames[:n]) * FRAME_S - at_s for n, (at_s, _) in enumerate(writes)]
    assert all(size == 4 for size, lead in zip(frames, lead_s, strict=True) if lead <= KEPT_LEAD_S)
    assert max(frames) >= 2 * 4 and max(frames) <= MAX_HELD_FRAMES + 3
    assert len(frames) < 12
    for n, (_, one) in enumerate(writes):  # the same speech
        first = sum(frames[:n])
        assert one.start_s == first * FRAME_S and one.timings.codec_ms == one.frames / 4
        assert one.timings.ready_ms == 10.0 * (first + one.frames - 4)
        assert np.array_equal(one.pcm[::SAMPLES_PER_FRAME], np.repeat(range(first, first + one.frames, 4), 4))

    slow = [(4 * FRAME_S * n, chunk(4, n)) for n in range(6)]
    writes, late, _ = await written(Source(clock, *slow, (2.0, None)), clock)
    assert [one.frames for _, one in writes] == [4] * 6


async def test_what_is_held_back_goes_out_before_the_listener_needs_it_and_before_an_error(clock):
    ahead = [(0.0, chunk(12)), (0.1, chunk(4))]
    writes, late, _ = await written(Source(clock, *ahead, (9.0, None)), clock)
    assert frames_of(writes) == [(0.0, 12), (round(12 * FRAME_S - KEPT_LEAD_S, 6), 4)] and not late
    clock.now_s = 100.0
    writes, _, made = await written(Source(clock, *ahead, (0.2, EngineError("broken"))), clock)
    assert [one.frames for _, one in writes] == [12, 4] and made.error.code == "engine_error"
