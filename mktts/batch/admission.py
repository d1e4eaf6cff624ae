"""Who may come in: a new stream is admitted, waits in line, or is refused, for a named reason.

A stream that is admitted has its pages for as long as it may grow, and its frames in time: the listeners together want
no more frames a second than the quickest fitting tick gives, by the tick model, less a margin. Those that find no place
wait in line, listeners for a limited time and before streams that nobody listens to, of each kind first come, first
served. No wait is without an end: where no tick has run for `IDLE_S`, the first in line is admitted whatever the tick
model says, and where the others keep every slot or page without using them, it is refused after `HELD_S`. Nothing here
reads a clock or a device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mktts.batch.board import FRAME_S, Board
from mktts.batch.pages import Pages
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import Tick, TickModel
from mktts.common import counted
from mktts.errors import BusyError, CapacityError, OptionsError
from mktts.speech.executor import Wishes

Decision = Literal["admit", "queue", "refuse"]
Reason = Literal["", "too_long", "slots", "pages", "listeners", "first_pcm", "most", "line", "waited", "held"]

IDLE_S = 2.0  # as long as a reader may take nothing and still count as one
HELD_S = 10.0  # a fed text may pause for some seconds, and others wait for its place

_MEAN_FRAMES = 87.5  # of an utterance: 2 to 12 s, 7 on average, as in the measurements
_MEAN_ROWS = 32.0  # of its prompt; both only until ticks have been seen
_MEMORY_FRAMES = 20_000.0
_MEAN_MAX_ROWS = 400.0  # that such a stream may grow to, by the default guard; only until some have come
_MEMORY_STREAMS = 200.0


@dataclass(frozen=True)
class AdmissionSettings:
    """As on an H200, where two ticks at the capacity of 1 024 lanes take about 70 ms.

    margin: listeners want at most this part of what the tick model can give. lead_s: nobody comes in while a quarter
    of those who have listened for a while is less ahead (`Tick.lead_s`): then the ticks give less than the model says.
    first_pcm_s: the longest predicted wait for a first PCM. host_s: between two ticks. max_line, max_wait_s: of paced
    streams that are not admitted at once. max_listeners: at once, whatever else could be carried; None: no such bound.
    """

    margin: float = 0.95
    lead_s: float = 0.3
    first_pcm_s: float = 0.1
    host_s: float = 0.3e-3
    max_line: int = 256
    max_wait_s: float = 0.25
    max_listeners: int | None = None

    def __post_init__(self) -> None:
        if (
            not 0 < self.margin <= 1
            or not self.first_pcm_s > 0
            or min(self.lead_s, self.host_s, self.max_line, self.max_wait_s) < 0
        ):
            raise OptionsError(f"expected 0 < margin <= 1, first_pcm_s > 0 and the others at least 0, got {self}")
        if self.max_listeners is not None and self.max_listeners < 1:
            raise OptionsError(f"expected max_listeners of at least 1 or None, got {self.max_listeners}")

    def wished(self, wishes: Wishes) -> AdmissionSettings:
        """These, with what a server wants instead."""
        return replace(
            self,
            max_listeners=wishes.max_listeners,
            max_line=wishes.max_waiting,
            max_wait_s=wishes.max_wait_s,
        )

    @classmethod
    def cpu(cls) -> AdmissionSettings:
        """Ticks of up to 64 ms whose time varies with what else the machine does."""
        return cls(margin=0.9, first_pcm_s=0.3, max_wait_s=0.5)


@dataclass(frozen=True)
class Arrival:
    """A stream that would come in. prompt_rows: to compute, without a kept prefix. max_rows: prompt and frames
    together, at most. key: of the prompt's prefix. name: whatever the caller knows it by. An unpaced one waits while
    the others work.
    """

    arrived_s: float
    prompt_rows: int
    max_rows: int
    paced: bool = True
    key: Hashable | None = None
    name: Any = None


class Verdict(NamedTuple):
    """What is to be done with a request, and why it was not simply admitted:

    too_long: it could never have its pages. slots, pages: all taken. listeners: the ticks would be too slow for all.
    first_pcm: too many prompts wait. most: as many listeners as the settings allow. line: too many streams wait.
    waited: longer than it may. held: the places are kept by streams that wait for their text or their readers.
    """

    decision: Decision
    reason: Reason = ""


class Door:
    """Judges requests by the board, the pages and the tick model; keeps the line of those that wait.

    The caller opens what is admitted (`Pages.open`, `Board.enter`, `Board.prompt`) before it asks again.
    reserved_pages: that open streams wait for between two segments; who comes in leaves them to those. settings: may be
    changed at any time. elsewhere: listeners that something else on the machine serves: they count in `max_listeners`.
    """

    def __init__(self, board: Board, pages: Pages, ticks: TickSettings, settings: AdmissionSettings) -> None:
        self._board, self._pages, self._ticks, self.settings = board, pages, ticks, settings
        self.reserved_pages = 0
        self.elsewhere: Callable[[], int] = lambda: 0
        self._listening: deque[Arrival] = deque()  # paced ones that wait
        self._unheard: deque[Arrival] = deque()  # unpaced ones
        self._rows, self._frames = _MEAN_ROWS, _MEAN_FRAMES  # of recent ticks, exponentially weighted
        self._max_rows = _MEAN_MAX_ROWS  # of recent streams, likewise
        self._lead_s = math.inf
        self._idle_since_s = math.inf

    @property
    def line(self) -> int:
        """Streams that wait."""
        return len(self._listening) + len(self._unheard)

    def works(self) -> None:
        """A tick runs."""
        self._idle_since_s = math.inf

    def rests(self, now_s: float) -> None:
        """No tick runs, and none is due."""
        self._idle_since_s = min(self._idle_since_s, now_s)

    def held(self, now_s: float, arrived_s: float = -math.inf) -> bool:
        """Whether nothing has run for so long, behind such an arrival, that what open streams keep is held for good."""
        return now_s >= max(self._idle_since_s, arrived_s) + HELD_S

    def patience_s(self, now_s: float) -> float:
        """Until when time alone changes nothing for those that wait, in line or for pages; inf where nobody does.

        Every time is the sum that is compared with elsewhere: rounded otherwise, it could come and change nothing.
        """
        if not self.line and not self.reserved_pages:
            return math.inf
        changes_s = [self._board.changes_s(now_s), self._idle_since_s + IDLE_S, self._idle_since_s + HELD_S]
        if (first := self._first(paced=False)) is not None:
            changes_s.append(max(self._idle_since_s, first.arrived_s) + HELD_S)
        changes_s = [at_s for at_s in changes_s if at_s > now_s]
        if self._listening:
            changes_s.append(min(request.arrived_s for request in self._listening) + self.settings.max_wait_s)
        return min(changes_s, default=now_s)

    def ask(self, request: Arrival, model: TickModel) -> Verdict:
        """What becomes of a request that arrives now; one with "queue" stands in line. It never overtakes an earlier
        one, unless somebody listens to it and nobody to that."""
        if request.max_rows > self._pages.rows_per_slot:
            return Verdict("refuse", "too_long")
        self._max_rows += (request.max_rows - self._max_rows) / _MEMORY_STREAMS
        first = self._first(request.paced)
        reason = self.obstacle(request, model) if first is None else self.obstacle(first, model) or "line"
        if not reason:
            return Verdict("admit")
        if request.paced and len(self._listening) >= self.settings.max_line:
            return Verdict("refuse", "line")
        (self._listening if request.paced else self._unheard).append(request)
        return Verdict("queue", reason)

    def next(self, now_s: float, model: TickModel) -> tuple[Arrival, Verdict] | None:
        """One that leaves the line now: admitted, or refused after its longest wait. None: nobody, for now."""
        first = self._first(paced=False)
        if first is not None and not self.obstacle(first, model, now_s):
            return (self._listening or self._unheard).popleft(), Verdict("admit")
        for request in self._listening:
            if now_s >= request.arrived_s + self.settings.max_wait_s:
                self._listening.remove(request)
                return request, Verdict("refuse", "waited")
        if first is not None and self.held(now_s, first.arrived_s):
            return (self._listening or self._unheard).popleft(), Verdict("refuse", "held")
        return None

    def give_up(self, name: Any) -> None:
        """A request that waits was cancelled."""
        self._listening = deque(request for request in self._listening if request.name != name)
        self._unheard = deque(request for request in self._unheard if request.name != name)

    def _first(self, paced: bool) -> Arrival | None:
        """Whose turn it is before that of a request that arrives now."""
        return next(iter(self._listening if paced else self._listening or self._unheard), None)

    def planned(self, tick: Tick) -> None:
        """Learns how far listeners are ahead, and how many prompt rows come with the frames: call it with every tick,
        also with an empty one."""
        self._lead_s = tick.lead_s
        keep = math.exp(-len(tick.lanes) / _MEMORY_FRAMES)
        self._frames = keep * self._frames + len(tick.lanes)
        self._rows = keep * self._rows + tick.rows

    def obstacle(self, request: Arrival, model: TickModel, now_s: float | None = None) -> Reason:
        """What stands against admitting `request`, now or when it arrives; "" for nothing.

        A stream that would be alone may always come in, however slow the machine is and however long the prompt. An
        unpaced one takes time only from listeners. One that waits for its text or its reader takes none.
        """
        board, settings = self._board, self.settings
        now_s = request.arrived_s if now_s is None else now_s
        here = self.listeners(now_s)
        if request.paced and settings.max_listeners is not None:
            if here + self.elsewhere() >= settings.max_listeners:
                return "most"
        if board.open.all():
            return "slots"
        if not self._pages.fits(request.max_rows, request.key, self.reserved_pages):
            return "pages"
        unpaced = int((board.open & ~board.paced & board.text_known & ~board.full).sum())
        alone = not here and not (request.paced and unpaced)
        if alone or now_s >= self._idle_since_s + IDLE_S:
            return ""
        if self._lead_s < settings.lead_s:
            return "listeners"
        # Frames that all are due, in those of a listener.
        listeners = here * self._weight(True) + unpaced * self._weight(False) + self._weight(request.paced)
        tick_s = self.tick_s(listeners, request.prompt_rows + self._pages.find(request.key), model)
        if not math.isfinite(tick_s):
            return "listeners"
        rows = int(board.prompt_rows[board.open].sum()) + request.prompt_rows
        ticks = 1 + math.ceil(rows / self._ticks.max_rows)  # the one that runs, then those that the prompts take
        return "first_pcm" if rows > request.prompt_rows and ticks * tick_s > settings.first_pcm_s else ""

    def tick_s(self, listeners: float, prompt_rows: int, model: TickModel) -> float:
        """Seconds of the ticks that so many listeners need: of the smallest bucket that makes frames faster than they
        are played, with the prompts that come with them. Infinite where no bucket does."""
        here = self._board.context_rows[self._board.open]
        context_rows = max(prompt_rows + _MEAN_FRAMES / 2, float(here.mean()) if len(here) else 0.0)
        wanted_hz = listeners / FRAME_S / self.settings.margin
        for lanes, tick_s in self._possible(context_rows, model):
            if lanes >= wanted_hz * (tick_s + self.settings.host_s):
                return tick_s
        return math.inf

    def carries(self, model: TickModel) -> int:
        """Listeners that would be admitted at once, of those that came lately or, before any came, of utterances of 7 s
        with short prompts: as far as ticks, slots, pages and `max_listeners` go. At least 1, as one alone may come."""
        context_rows = _MEAN_FRAMES * (self._rows / self._frames + 0.5)
        paces_hz = [lanes / (tick_s + self.settings.host_s) for lanes, tick_s in self._possible(context_rows, model)]
        by_time = FRAME_S * self.settings.margin * max(paces_hz)
        most_rows = min(math.ceil(self._max_rows), self._pages.rows_per_slot)
        by_pages = self._pages.all // self._pages.count(most_rows)
        most = self.settings.max_listeners
        bounds = (by_time, by_pages, self._board.slots, math.inf if most is None else most)
        return max(1, int(min(bounds)))

    def listeners(self, now_s: float) -> int:
        """Open streams that need frames in time, see `Board.listened`."""
        return int(self._board.listened(now_s).sum())

    def _possible(self, context_rows: float, model: TickModel) -> Iterator[tuple[int, float]]:
        """Lanes, and seconds of a tick that has them, each of so many rows, and the prompts that come with them."""
        ticks = self._ticks
        for lanes in ticks.sizes:
            lanes = min(lanes, math.ceil(ticks.max_rows * self._frames / self._rows))  # more could not begin so fast
            rows = min(math.ceil(lanes * self._rows / self._frames), ticks.max_rows)
            tick_s = model.predict(*ticks.bucket(model, lanes, rows), lanes * context_rows)
            if tick_s > ticks.max_tick_s and lanes > ticks.sizes[0]:
                break
            yield lanes, tick_s

    def _weight(self, paced: bool) -> float:
        """Frames that a stream is due, in those of a listener: an unpaced one takes what is left, and a little."""
        return 1.0 if paced else FRAME_S / self._ticks.lead_s


_OBSTACLES: dict[Reason, str] = {
    "slots": "every slot is taken",
    "pages": "the memory for keys and values is taken",
    "listeners": "frames for one more listener would come too late for all",
    "first_pcm": "too many prompts wait",
    "most": "as many listen as the settings allow",
    "line": "too many streams wait for a place",
    "waited": "no place came free in time",
    "held": "the streams that are open keep their places and wait for their text or their readers",
}


def too_long(request: Arrival, pages: Pages) -> CapacityError:
    """Of a stream that could never have its pages."""
    return CapacityError(
        f"a stream of {request.max_rows} positions (prompt and frames) was asked for, one may have "
        f"{pages.rows_per_slot}: shorten the text or lower max_frames"
    )


def refusal(reason: Reason, request: Arrival, pages: Pages, open_streams: int, carries: int) -> CapacityError:
    """What ends a stream that was refused for `reason`. carries: listeners that would be admitted, about."""
    if reason == "too_long":
        return too_long(request, pages)
    error = BusyError(
        f"refused with {counted(open_streams, 'stream')} open, where about {carries} can be carried at once: "
        f"{_OBSTACLES[reason]}; try again when some have ended, or on another machine"
    )
    error.carries = carries
    return error
