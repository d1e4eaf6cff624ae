"""Admission: decides which streams may begin now, which wait, and which are refused, each for a named reason. Nothing
here reads a clock or a device.

An engine serves as many listeners at once as its capacity, and admits prompts while the first PCM of each stays within
a bound. The capacity is measured (`mktts.engine.capacity`), lowered when frames are late and ticks take longer than
measured, and raised again when they no longer do. No wait is unlimited: a listener's stream is refused after
`max_wait_s`, and any stream after `HELD_S` without a tick."""

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mktts.common import counted
from mktts.engine.pages import Pages
from mktts.engine.scheduler import FRAME_S, StreamTable, TickModel, TickSettings
from mktts.errors import BusyError, OptionsError

Reason = Literal["", "slots", "memory", "capacity", "max_streams", "first_pcm", "queue", "waited", "held"]

PROMPT_WAIT_S = 0.5  # longest wait behind the prompts of streams that arrived at the same time
HELD_S = 10.0  # a fed text may pause for some seconds while other streams wait for its slot
_MOST_WAITING = 1_024
_WINDOW_S = 5.0  # over which tick times are compared with the measured ones
_LATE_SHARE = 0.001  # of a window's frames, one late in twelve utterances: above it, the engine does not keep up
_MEAN_ROWS, _MEAN_S = 32.0, 7.0  # mean prompt rows and mean seconds of an utterance in the load benchmark
_SLOWER, _FASTER = 1.15, 1.1  # ticks slower by the first factor lower the capacity, faster by the second raise it


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits that the operator sets. max_streams: listeners at once, however large the capacity; None: the capacity
    alone. min_streams: listeners admitted even if the capacity is smaller. max_waiting: listeners' streams that may
    wait for admission; None: as many as are served at once, up to 1,024. max_wait_s: how long they may wait; None:
    `TickSettings.place_wait_s`, and `PROMPT_WAIT_S` behind prompts. Raises OptionsError for values out of range."""

    max_streams: int | None = None
    min_streams: int = 1
    max_waiting: int | None = None
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        none_at_all = self.max_streams is not None and self.max_streams < 1
        if none_at_all or self.min_streams < 1 or (self.max_waiting or 0) < 0 or not (self.max_wait_s or 0) >= 0:
            least = "max_streams and min_streams of at least 1, the others at least 0"
            raise OptionsError(f"expected {least}, or None where that is the default, got {self}")


class Capacity(NamedTuple):
    """Listeners that can be served in time at once, below 1 on a machine slower than real time. basis: its source."""

    streams: float
    basis: str


class Arrival(NamedTuple):
    """A stream that asks for admission. prompt_rows: rows to compute. max_rows: most rows of prompt and frames
    together. paced: a listener plays it in real time. key: of the prompt's prefix. name: the caller's."""

    arrived_s: float
    prompt_rows: int
    max_rows: int
    paced: bool = True
    key: Hashable | None = None
    name: Any = None


class Admission:
    """Limits and capacity of one engine. listeners: `StreamTable.listening` of each set of lanes, by perf_counter."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self.limits = limits or AdmissionLimits()
        self.measured: Capacity | None = None
        self.slowdown = 1.0  # tick time over measured tick time; 1 while frames are in time
        self.listeners: list[Callable[[float], int]] = []
        self._window: deque[tuple[float, float, float, int, int]] = deque()

    @property
    def most(self) -> float:
        """Most listeners at once, inf for no limit. A machine slower than real time even for one stream refuses none
        for that reason: it makes its streams together, as fast as it can, and they are late."""
        most, measured = self.limits.max_streams or math.inf, self.measured
        if measured is not None and measured.streams >= 1:
            most = min(most, max(self.limits.min_streams, int(measured.streams / self.slowdown)))
        return most

    @property
    def capacity(self) -> Capacity:
        """The number of listeners that are admitted at once now, inf for no limit, and its basis."""
        most, limits, measured = self.most, self.limits, self.measured
        if measured is None:
            return Capacity(most, "not measured" if math.isinf(most) else "max_streams")
        why = ""
        if measured.streams < 1:
            why = f"slower than real time: {measured.streams:.2g} streams; "
        elif most == limits.max_streams:
            why = "max_streams; "
        elif most == limits.min_streams and int(measured.streams / self.slowdown) < most:
            why = "min_streams; "
        elif self.slowdown > 1:
            why = f"lowered: ticks take {self.slowdown:.1f} times what was measured; "
        return Capacity(most, why + measured.basis)

    def tick(self, ended_s: float, took_s: float, expected_s: float, late: int, frames: int) -> None:
        """Records a tick of `frames` frames, `late` of them late. expected_s: its duration by the measured model."""
        window = self._window
        window.append((ended_s, took_s, expected_s, late, frames))
        if ended_s - window[0][0] < _WINDOW_S:
            return
        slower = sum(one[1] for one in window) / max(sum(one[2] for one in window), 1e-9)
        late_share = sum(one[3] for one in window) / max(sum(one[4] for one in window), 1)
        window.clear()  # each window is judged once
        if late_share > _LATE_SHARE and slower > _SLOWER * self.slowdown:
            self.slowdown = slower
        elif slower < self.slowdown / _FASTER:
            self.slowdown = max(1.0, slower)


class AdmissionQueue:
    """The streams of one set of lanes that wait for admission: listeners' streams first, then the others, each in order
    of arrival. reserved_pages: pages that open streams wait for between two segments. idle_since_s: since when no tick
    has run; inf while one runs."""

    def __init__(self, admission: Admission, table: StreamTable, pages: Pages | None, ticks: TickSettings) -> None:
        self._admission, self._table, self._pages, self._ticks = admission, table, pages, ticks
        self.reserved_pages = 0
        self._paced: deque[Arrival] = deque()
        self._unpaced: deque[Arrival] = deque()
        self.idle_since_s = math.inf

    @property
    def _most_waiting(self) -> float:
        most = self._admission.limits.max_waiting
        return min(_MOST_WAITING, self._admission.most) if most is None else most

    def refused(self, arrived_s: float, now_s: float) -> Reason:
        """Why to refuse a listener's stream that arrived at `arrived_s` and has no prompt yet; "" to keep it. If the
        machine is slower than real time, its turn may come late, and only a full queue refuses it."""
        if self._paced and len(self._paced) >= self._most_waiting:
            return "queue"
        most_s = max(PROMPT_WAIT_S, self._admission.limits.max_wait_s or 0.0)
        return "" if math.isinf(self._admission.most) or now_s < arrived_s + most_s else "waited"

    def held(self, now_s: float, arrived_s: float = -math.inf) -> bool:
        """Whether no tick has run for HELD_S since `arrived_s`, so that what open streams hold is not freed."""
        return now_s >= max(self.idle_since_s, arrived_s) + HELD_S

    def submit(self, arrival: Arrival, model: TickModel, now_s: float) -> Reason | None:
        """Decides about a stream that arrives: "" admits it, "queue" refuses it, None makes it wait."""
        before = self._paced or (self._unpaced if not arrival.paced else ())
        if not before and not self.obstacle(arrival, model, now_s):
            return ""
        if arrival.paced and len(self._paced) >= self._most_waiting:
            return "queue"
        (self._paced if arrival.paced else self._unpaced).append(arrival)
        return None

    def pop(self, now_s: float, model: TickModel) -> tuple[Arrival, Reason] | None:
        """Takes one stream off the queue: admitted (""), or refused for a reason. None: all of them go on waiting."""
        waiting = self._paced or self._unpaced
        reason: Reason = self.obstacle(waiting[0], model, now_s) if waiting else "queue"
        if not reason:
            return waiting.popleft(), ""
        if self._paced and now_s >= self._paced[0].arrived_s + self._max_wait_s(reason):
            return self._paced.popleft(), "waited"
        for waiting in (self._paced, self._unpaced):
            if waiting and self.held(now_s, waiting[0].arrived_s):
                return waiting.popleft(), "held"
        return None

    def cancel(self, names: Collection[Any]) -> None:
        self._paced = deque(arrival for arrival in self._paced if arrival.name not in names)
        self._unpaced = deque(arrival for arrival in self._unpaced if arrival.name not in names)

    def _max_wait_s(self, reason: Reason) -> float:
        """How long a listener's stream may wait while `reason` keeps it out."""
        usual_s = PROMPT_WAIT_S if reason == "first_pcm" else self._ticks.place_wait_s
        return usual_s if self._admission.limits.max_wait_s is None else self._admission.limits.max_wait_s

    def wake_s(self, now_s: float) -> float:
        """The next time at which a stream that waits could be admitted or refused, inf if none waits. Each time is the
        same sum that is compared elsewhere: rounded differently, it could come too early for that comparison."""
        if not (self._paced or self._unpaced or self.reserved_pages):
            return math.inf
        changes_s = [self._table.changes_s(now_s), self.idle_since_s + HELD_S]
        for waiting in filter(None, (self._paced, self._unpaced)):
            changes_s.append(max(self.idle_since_s, waiting[0].arrived_s) + HELD_S)
        if self._paced:
            reasons: tuple[Reason, ...] = ("first_pcm", "capacity")
            changes_s += [self._paced[0].arrived_s + self._max_wait_s(reason) for reason in reasons]
        return min((at_s for at_s in changes_s if at_s > now_s), default=now_s)

    def obstacle(self, arrival: Arrival, model: TickModel, now_s: float) -> Reason:
        """Why a stream cannot be admitted now; "" if it can. The only listener needs no more than a slot and memory."""
        table, admission = self._table, self._admission
        if table.open.all():
            return "slots"
        if self._pages is not None and not self._pages.fits(arrival.max_rows, arrival.key, self.reserved_pages):
            return "memory"
        listeners = sum(count(now_s) for count in admission.listeners)
        if arrival.paced and listeners >= admission.most:
            return "max_streams" if listeners >= (admission.limits.max_streams or math.inf) else "capacity"
        rows = int(table.prompt_rows[table.open].sum())
        if not listeners or not rows:
            return ""
        # Ticks until its first PCM: the one that runs, and those that all waiting prompts take.
        ticks = 1 + math.ceil((rows + arrival.prompt_rows) / self._ticks.max_rows)
        lanes = min(listeners, self._ticks.max_lanes)
        tick_s = model.predict(lanes, 0, lanes * float(table.context_rows[table.open].mean()))
        taken_s = ticks * min(tick_s, self._ticks.max_tick_s) + model.row_s * (rows + arrival.prompt_rows)
        return "first_pcm" if taken_s > self._ticks.first_pcm_s else ""


_OBSTACLES: dict[Reason, str] = {
    "queue": "too many streams wait",
    "waited": "no place came free in time",
    "held": "the streams that are open keep their places and wait for their text or their readers",
}


def refusal(reason: Reason, open_streams: int, most: float) -> BusyError:
    """The error that ends a stream refused for `reason`. most: listeners that are admitted at once."""
    served = "" if math.isinf(most) else f", where {int(most)} can be served at once"
    refused = f"refused with {counted(open_streams, 'stream')} open{served}: {_OBSTACLES[reason]}"
    error = BusyError(f"{refused}; try again when some have ended, or on another machine")
    error.capacity = None if math.isinf(most) else int(most)
    return error


def measured_streams(frame_s: float, row_s: float, margin: float) -> float:
    """Listeners whose frames (`frame_s` each) and prompts (`row_s` a row) together take `margin` of real time."""
    return margin / (frame_s / FRAME_S + row_s * _MEAN_ROWS / _MEAN_S)
