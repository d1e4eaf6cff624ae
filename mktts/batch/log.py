"""The ticks that were run last, for those who want to see what the scheduler did."""

from __future__ import annotations

from collections import deque

import numpy as np

from mktts.batch.tick import Tick

TICKS = np.dtype(
    [
        ("ended_s", float),
        ("took_s", float),
        ("lanes", int),
        ("new", int),
        ("rows", int),
        ("open", int),
        ("bucket_lanes", int),
        ("bucket_rows", int),
        ("late_s", float),
    ]
)


class TickLog:
    """Keeps the newest ticks. Written by the worker, read from any thread."""

    def __init__(self, ticks: int = 100_000) -> None:
        self._ticks: deque[tuple] = deque(maxlen=ticks)

    def add(self, tick: Tick, took_s: float, ended_s: float, open_streams: int, late_s: float) -> None:
        """took_s: on the device; ended_s: when its PCM was on the host (perf_counter); late_s: of its latest frame."""
        self._ticks.append(
            (ended_s, took_s, len(tick.lanes), tick.new_lanes, tick.rows, open_streams, *tick.bucket, late_s)
        )

    def table(self) -> np.ndarray:
        """One record a tick, of dtype TICKS, oldest first."""
        return np.array(list(self._ticks), TICKS)
