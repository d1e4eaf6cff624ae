"""Decides one tick: which prompts enter, which streams get a frame, which bucket runs. No device and no clock.

Arrivals come first, oldest first, as far as the bucket's prompt rows go; a longer prompt enters in pieces over ticks.
Then the streams that have the least lead before their listeners, of those that have less than a limit: streams that
are ahead skip ticks, so a tick is as small as what is wanted now, and the next arrival waits for it no longer than it
must. One whose text has come after a wait goes first. Where many enter at once, only those ride along that would soon
be late. Empty lanes of the bucket that runs anyway are given to streams that are not far beyond the limit. Few streams
are not held back at all: a lone one gets its frames at once. Where nothing is wanted now, a small tick takes those on
that are least ahead, so that who reads faster than speech is served as fast as the machine goes.

A stream that waits for text, or for its reader, is in no tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mktts.engine.board import FRAME_S, Board
from mktts.engine.options import SCHEDULE, TOGETHER_SCHEDULE
from mktts.engine.tick import Piece, Tick, TickModel
from mktts.errors import OptionsError

_TOLERANCE_S = 1e-6  # of a lead, so that what is waited for has come when the wait is over
_RUSH = 32  # first frames of a tick: those that are not pressed for time leave it to so many
_LANES = (8, 32, 64, 128, 192, 256, 384, 512, 768, 1_024)  # of an H200's buckets
_PROMPT_ROWS = (0, 64, 256, 1_024)
_WIDE = 768  # lanes from which 64 prompt rows save nothing against 256
_PATIENCE_S = 1.0  # an unpaced stream's prompt lets those pass that arrive within this time after it


@dataclass(frozen=True)
class TickSettings:
    """What a tick may be.

    buckets: the (lanes, prompt rows) that can run; () where a tick may have any size, up to the limits.
    max_lanes, max_rows: of a tick. At least one bucket has both at once.
    min_rows: prompt rows that may enter even where playing listeners are pressed for time, so that arrivals go on.
    max_tick_s: ticks are no longer than this, as predicted, while a smaller one is possible: the time that an arrival
        waits for the tick that runs. It must leave a listener's second frame in time: below 80 ms.
    lead_s: a stream with this much lead is not wanted now. fill_lead_s: up to this lead it may ride in an empty lane,
    or where a tick has fewer than `fill_lanes`.
    few_lanes: so many streams at once are not held back by their lead. idle_lanes: of a tick while nothing is wanted.
    whole_prompts: a prompt enters in one tick, also where it has more rows than those limits.
    chunks: frames of a stream's first, second, ... chunk, see `StreamOptions.schedule`, where it leaves that open. A
        chunk can be heard when its last frame is made: with ticks of `max_tick_s` it should be no larger than those
        that are made while the chunks before it are played.
    margin: of the ticks' time that listeners may take together: the rest is for what comes unevenly, and for a host
        whose work beside a device is not in the ticks.
    first_pcm_s: the longest predicted wait for a first PCM with which a stream is admitted beside waiting prompts.
    Raises OptionsError for values that contradict each other.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    max_lanes: int = 512
    max_rows: int = 1_024
    min_rows: int = 32
    max_tick_s: float = 0.05
    lead_s: float = 0.4
    fill_lead_s: float = 0.8
    few_lanes: int = 8
    idle_lanes: int = 0
    fill_lanes: int = 0
    whole_prompts: bool = False
    chunks: tuple[int, ...] = TOGETHER_SCHEDULE
    margin: float = 0.9
    first_pcm_s: float = 0.1  # two ticks of 1,024 lanes take 70 ms on an H200

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(sorted((int(lanes), int(rows)) for lanes, rows in self.buckets)))
        if not 1 <= self.few_lanes <= self.max_lanes or not 1 <= self.min_rows <= self.max_rows:
            raise OptionsError(
                "expected 1 <= few_lanes <= max_lanes and 1 <= min_rows <= max_rows, got "
                f"{self.few_lanes}, {self.max_lanes} and {self.min_rows}, {self.max_rows}"
            )
        if not 0 <= self.idle_lanes <= self.max_lanes:
            raise OptionsError(f"expected 0 <= idle_lanes <= max_lanes, got {self.idle_lanes} and {self.max_lanes}")
        if not 0 < self.max_tick_s < FRAME_S <= self.lead_s <= self.fill_lead_s:
            raise OptionsError(
                f"expected 0 < max_tick_s < {FRAME_S} <= lead_s <= fill_lead_s, got "
                f"{self.max_tick_s}, {self.lead_s} and {self.fill_lead_s}"
            )
        if self.buckets and not any(b >= self.max_lanes and p >= self.max_rows for b, p in self.buckets):
            raise OptionsError(
                f"no bucket takes max_lanes {self.max_lanes} and max_rows {self.max_rows} together: {self.buckets}"
            )

    @classmethod
    def h200(cls, streams: int = _LANES[-1]) -> TickSettings:
        """CUDA graphs of 8 to 1 024 lanes, of those sizes that so many streams can fill, and 0 to 1 024 prompt rows:
        32 arrivals a tick; with 4, 1 400 listeners queued."""
        sizes = [lanes for lanes, smaller in zip(_LANES, (0, *_LANES), strict=False) if smaller < streams]
        buckets = tuple((lanes, rows) for lanes in sizes for rows in _PROMPT_ROWS if rows != 64 or lanes < _WIDE)
        # The ticks of an H200 have time for 2,200 listeners; from one process 1,450 were served in time (LOG.md).
        return cls(buckets=buckets, max_lanes=sizes[-1], idle_lanes=min(32, sizes[-1]), margin=0.6)

    @classmethod
    def cpu(cls) -> TickSettings:
        """Ticks of any size, up to 24 lanes: operators cost by the call, not by the row, but a frame lasts 80 ms."""
        return cls(
            max_lanes=24,
            max_rows=256,
            min_rows=16,
            max_tick_s=0.064,
            few_lanes=2,
            idle_lanes=4,
            fill_lanes=12,
            whole_prompts=True,
            chunks=(1, 1, 1, 1, 2, 2, 2, 2, 4),
            first_pcm_s=0.3,
        )

    @classmethod
    def one(cls) -> TickSettings:
        """One stream a tick, its prompt in one piece."""
        return cls(
            max_lanes=1,
            max_rows=1,
            min_rows=1,
            few_lanes=1,
            idle_lanes=1,
            whole_prompts=True,
            chunks=SCHEDULE,
            first_pcm_s=0.5,
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Lanes that a tick may be run with, ascending, up to `max_lanes`."""
        if not self.buckets:
            return tuple(range(1, self.max_lanes + 1))
        return tuple(sorted({lanes for lanes, _ in self.buckets if lanes < self.max_lanes} | {self.max_lanes}))

    def most_lanes(self, model: TickModel, context_rows: float) -> int:
        """The most lanes, each of so many rows, with which a tick keeps to `max_tick_s`; at least one size is run."""
        lane_s = model.predict(1, 0, context_rows) - model.constant_s
        fitting = (self.max_tick_s - model.constant_s) / lane_s if lane_s else np.inf
        return max((size for size in self.sizes if size <= fitting), default=self.sizes[0])

    def bucket(self, model: TickModel, lanes: int, rows: int) -> tuple[int, int]:
        """The quickest bucket with room for so many lanes and prompt rows."""
        if not self.buckets:
            return lanes, rows
        found, least_s = self.buckets[-1], np.inf
        for bucket in self.buckets:  # every arrival asks for many: no list is made, and wide ones are not looked at
            lanes_s = model.lane_s * bucket[0]
            if lanes_s >= least_s:
                break
            if bucket[0] >= lanes and bucket[1] >= rows and lanes_s + model.row_s * bucket[1] < least_s:
                found, least_s = bucket, lanes_s + model.row_s * bucket[1]
        return found

    def worthwhile(self, model: TickModel, lanes: int, least: int, rows: int, context_rows: float) -> tuple[int, int]:
        """The bucket, with room for `rows` prompt rows and `least` lanes, that makes most frames a second where `lanes`
        want one, each at so many rows: an empty lane costs as much as a full one."""
        if not self.buckets:
            return lanes, rows

        def frames_hz(bucket: tuple[int, int]) -> float:
            filled = min(bucket[0], lanes)
            return max(filled, 1) / model.predict(*bucket, filled * context_rows)

        return max(((b, p) for b, p in self.buckets if b >= least and p >= rows), key=frames_hz)


def next_tick(board: Board, now_s: float, model: TickModel, settings: TickSettings) -> Tick:
    """The tick to run at `now_s`. Changes nothing: `Board.begin` does, when it runs. About 0.1 ms at 1 000 streams."""
    able = board.able()
    if not len(able):
        return Tick()
    lead_s = board.lead_s(able, now_s, settings.lead_s)
    limit_s = np.inf if len(able) <= settings.few_lanes else settings.lead_s + _TOLERANCE_S
    waiting = board.prompt_rows[able] > 0
    speaking = np.flatnonzero(~waiting)
    resumed = speaking[board.resumed[able[speaking]]]
    lead_s[resumed] = lead_s[speaking].min(initial=np.inf) - _TOLERANCE_S
    speaking = speaking[np.argsort(lead_s[speaking], kind="stable")]
    leads_s = lead_s[speaking]

    settled_s = _settled_s(board, able[speaking], leads_s, settings)
    context_rows = float(board.context_rows[able].mean())
    most = settings.most_lanes(model, context_rows)
    due = min(int(np.searchsorted(leads_s, limit_s)), most)
    pieces: list[Piece] = []
    pressed = due
    if waiting.any():
        longest_s = model.predict(most, settings.max_rows, most * context_rows)
        # Late, perhaps, if the next tick were their first: a chunk is heard when its last frame is made.
        pressed = int(np.searchsorted(leads_s, (1 + settings.chunks[-1]) * longest_s))
        budget = _row_budget(min(due + int(waiting.sum()), most), leads_s, context_rows, model, settings)
        entering = waiting & (lead_s < limit_s)
        order = _order(board, able[entering], lead_s[entering], now_s, settings)
        pieces = _pieces(board, order, budget, max(most - pressed, 1), settings.whole_prompts)
    new = [piece.slot for piece in pieces if piece.last]
    if len(new) >= _RUSH:
        due = min(due, pressed)  # the others can wait until those who came have heard something

    count = min(due, most - len(new))
    if not count and not pieces:
        if not settings.idle_lanes:
            return Tick(wake_s=_wake_s(board, able, now_s, settings), lead_s=settled_s)
        order = _order(board, able[waiting], lead_s[waiting], now_s, settings)
        pieces = _pieces(board, order[:1], settings.min_rows, 1, settings.whole_prompts)
        new = [piece.slot for piece in pieces if piece.last]
        count = min(settings.idle_lanes, most, len(speaking)) if not pieces else 0
    rows = sum(piece.rows for piece in pieces)
    bucket = settings.worthwhile(model, len(new) + count, len(new), rows, context_rows)
    count = min(count, bucket[0] - len(new))
    near = int(np.searchsorted(leads_s, settings.fill_lead_s))
    count = max(count, min(near, min(max(bucket[0], settings.fill_lanes), most) - len(new)))
    if not settings.buckets:
        bucket = len(new) + count, rows
    old = able[speaking[:count]]
    lanes = np.concatenate((np.array(new, np.int64), old))
    context_rows = int(board.context_rows[old].sum()) + sum(piece.start + piece.rows for piece in pieces)
    return Tick(
        bucket=bucket,
        lanes=lanes.astype(np.int32),
        new_lanes=len(new),
        frames=board.frames_made[lanes],
        serials=board.serial[lanes],
        pieces=tuple(pieces),
        context_rows=context_rows,
        predicted_s=model.predict(*bucket, context_rows),
        wake_s=now_s,
        lead_s=settled_s,
    )


def lone_tick(board: Board, slot: int, now_s: float) -> Tick:
    """`next_tick` with `TickSettings.one()` where no slot but this one is able: it runs, whatever its lead. What orders
    many takes a fifth of a millisecond for one, of every frame and of the time to the first."""
    lanes = np.array([slot], np.int32)
    context, rows = int(board.context_rows[slot]), int(board.prompt_rows[slot])
    pieces = (Piece(slot, context, rows, True),) if rows else ()
    return Tick(
        bucket=(1, rows),
        lanes=lanes,
        new_lanes=len(pieces),
        frames=board.frames_made[lanes],
        serials=board.serial[lanes],
        pieces=pieces,
        context_rows=context + rows,
        wake_s=now_s,
    )


def _settled_s(board: Board, slots: np.ndarray, leads_s: np.ndarray, settings: TickSettings) -> float:
    """`Tick.lead_s`, of `slots` by their `leads_s`, ascending. A stream's first chunks are small, so it cannot be far
    ahead before it comes to those that stay as large as they are."""
    settled = board.paced[slots] & (board.chunk_start[slots] >= sum(settings.chunks[:-1]))
    leads_s = leads_s[settled]
    return float(leads_s[len(leads_s) // 4]) if len(leads_s) else float(np.inf)


def _row_budget(lanes: int, leads_s: np.ndarray, context_rows: float, model: TickModel, settings: TickSettings) -> int:
    """Prompt rows that may enter: as many as keep to `max_tick_s` and the most urgent listener waiting for its frame,
    but some always. `leads_s`: ascending."""
    time_s = min([settings.max_tick_s, *leads_s[:1]])
    levels = sorted({rows for size, rows in settings.buckets if rows >= settings.min_rows and size >= lanes})
    if levels:
        fitting = [
            r for r in levels if model.predict(settings.bucket(model, lanes, r)[0], r, lanes * context_rows) <= time_s
        ]
        return min(max(fitting, default=levels[0]), settings.max_rows)
    spare_s = time_s - model.predict(lanes, 0, lanes * context_rows)
    rows = spare_s / model.row_s if model.row_s else np.inf
    return int(np.clip(rows, settings.min_rows, settings.max_rows))


def _order(board: Board, slots: np.ndarray, lead_s: np.ndarray, now_s: float, settings: TickSettings) -> np.ndarray:
    """Slots with waiting prompts by the time since when each is wanted: a new stream since it arrived, the next segment
    of a playing one since its lead fell below the limit."""
    fresh = board.frames_made[slots] == 0
    arrived_s = board.arrived_s[slots] + np.where(board.paced[slots], 0.0, _PATIENCE_S)
    since_s = np.where(fresh, arrived_s, now_s + lead_s - settings.lead_s)
    return slots[np.argsort(np.where(board.resumed[slots], -np.inf, since_s), kind="stable")]


def _pieces(board: Board, order: np.ndarray, rows: int, seats: int, whole: bool) -> list[Piece]:
    """What enters of the prompts in `order`: up to `rows`, and up to `seats` prompts to their end. `whole`: none is
    cut, and one enters always."""
    pieces: list[Piece] = []
    for slot in order.tolist():
        left = int(board.prompt_rows[slot])
        taken = min(left, rows)
        if whole and taken < left:
            taken = 0 if pieces else left
        last = taken == left
        if not taken or (last and not seats):
            break
        pieces.append(Piece(slot, int(board.context_rows[slot]), taken, last))
        rows -= taken
        seats -= last
    return pieces


def _wake_s(board: Board, able: np.ndarray, now_s: float, settings: TickSettings) -> float:
    """When the first of the streams that are ahead will be wanted, if no news comes. What the reader has not taken does
    not become less by waiting."""
    ahead_s = FRAME_S * (board.frames_made[able] - board.frames_taken[able])
    heard_out = able[ahead_s <= settings.lead_s]
    if not len(heard_out):
        return float(np.inf)
    return now_s + float(board.lead_s(heard_out, now_s, settings.lead_s).min()) - settings.lead_s
