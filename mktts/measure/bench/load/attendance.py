"""What a crowd of listeners met: the record of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.visits import Visit

LAG_BUCKETS = 1_000  # of 1 ms: the last takes all that is above


@dataclass
class Mark:
    """Sums up to a moment. process_s, loop_s: CPU time of the process, and of the crowd's own thread in it."""

    at_s: float
    frames: int
    chunks: int
    process_s: float
    loop_s: float


@dataclass
class Attendance:
    """What a crowd met. Times are of time.perf_counter.

    listeners: in the order of the visits. begin, end: the held time; None where the run did not come so far. closed_s:
    when all that was open was cancelled. lag_ms:
    chunks by whole ms from their PCM on the host to the listener. beat_late_s: of each beat of the loop's pulse.
    gc_s: pauses by the garbage collector. hung: streams that did not end when they were cancelled. kept: (visit,
    codes (T, 16), finish reason).
    """

    listeners: list[Listener] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    begin: Mark | None = None
    end: Mark | None = None
    closed_s: float = 0.0
    lag_ms: list[int] = field(default_factory=lambda: [0] * LAG_BUCKETS)
    beat_late_s: list[float] = field(default_factory=list)
    gc_s: list[float] = field(default_factory=list)
    hung: int = 0
    kept: list[tuple[Visit, Tensor, str | None]] = field(default_factory=list)
