"""Scheduler: plans a tick, that is, which prompts enter, which streams get a frame, and which bucket runs. It has no
device and no clock.

Prompts come first, oldest first, as far as the bucket's prompt rows go; a longer prompt enters in pieces over several
ticks. Then come the streams with the least lead over their listeners, less the time that the rest of a chunk takes. Of
these, only streams whose lead is below a limit take part, so that a tick is as small as what is wanted now; a stream
whose text has come after a wait goes first. Where many prompts enter at once, only streams that would soon be late take
part. A few streams are never held back, and where nothing is wanted now, a small tick makes frames for the streams with
the least lead. A stream that waits for text or for its reader is in no tick."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mktts.engine.options import SCHEDULE, TOGETHER_SCHEDULE
from mktts.spec import FRAME_RATE_HZ

_CONTEXT_UNIT_ROWS = 100


class Piece(NamedTuple):
    """Rows of the prompt in `slot`, from position `start` on, that enter in a tick. last: a frame is made after it."""

    slot: int
    start: int
    rows: int
    last: bool


@dataclass(frozen=True, eq=False)
class Tick:
    """One tick to run. If it has no lane and no piece, nothing is due: plan again after an update, or at `wake_s`.

    lanes (n,) int32: slots that get a frame, first the `new_lanes` whose prompts end in this tick. frames (n,) int64:
    the number of each lane's frame in its stream. serials (n,) int64: see StreamTable. pieces: of prompts, in the order
    of their rows. bucket: (lanes, prompt rows) to run. context_rows: what all lanes and pieces attend to together."""

    bucket: tuple[int, int] = (0, 0)
    lanes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    new_lanes: int = 0
    frames: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    serials: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pieces: tuple[Piece, ...] = ()
    context_rows: int = 0
    wake_s: float = np.inf


@dataclass(frozen=True)
class TickModel:
    """Seconds of a tick: `constant_s` + `lane_s` a lane + `row_s` a prompt row + `attention_s` a hundred rows attended
    to. Lanes and prompt rows are those of the bucket that runs, attended rows those of the lanes that are filled."""

    constant_s: float
    lane_s: float
    row_s: float
    attention_s: float

    @classmethod
    def h200(cls) -> TickModel:
        """0.6B shapes in bfloat16 and the codec in fp16 on one H200, in one CUDA graph: least squares over 25 measured
        buckets of 8 to 512 lanes and 0 to 1,024 prompt rows, all within 5 %."""
        return cls(constant_s=4.97e-3, lane_s=23.2e-6, row_s=2.86e-6, attention_s=2.74e-6)

    @classmethod
    def cpu(cls) -> TickModel:
        """The voice in the box by batched PyTorch operators in fp32, one thread at 2.3 GHz: for the first ticks."""
        return cls(constant_s=11.5e-3, lane_s=2.0e-3, row_s=85e-6, attention_s=55e-6)

    def predict(self, lanes: int, rows: int, context_rows: float) -> float:
        """Seconds of a tick of so many lanes and prompt rows, whose lanes together attend to `context_rows` rows."""
        attended = context_rows / _CONTEXT_UNIT_ROWS
        return self.constant_s + self.lane_s * lanes + self.row_s * rows + self.attention_s * attended


_KEEP = math.exp(-1 / 500)  # after 500 ticks an observation weighs 1/e


class TickFit:
    """Learns the tick model of a machine from its ticks: a factor for each part of `prior`, by exponentially weighted
    least squares of relative errors, in which the prior has the weight of one tick."""

    def __init__(self, prior: TickModel) -> None:
        self.model = prior
        self._parts = np.array(astuple(prior))
        # A part of 0 has no factor to learn; the prior keeps the equations solvable.
        self._prior_weight = 1 / len(self._parts) ** 2
        self._prior_squares = self._prior_weight * np.eye(len(self._parts))
        self._squares = np.zeros((len(self._parts), len(self._parts)))
        self._right = np.zeros(len(self._parts))

    def observe(self, lanes: int, rows: int, context_rows: float, took_s: float) -> None:
        """Adds a tick that has run; its measured seconds count as at most a factor of three off what is expected."""
        if not took_s > 0:
            return
        expected_s = self.model.predict(lanes, rows, context_rows)
        took_s = min(max(took_s, expected_s / 3), expected_s * 3)
        shares = self._parts * (1.0, lanes, rows, context_rows / _CONTEXT_UNIT_ROWS)
        total_s = shares.sum()
        shares /= total_s
        self._squares = _KEEP * self._squares + shares[:, None] * shares
        self._right = _KEEP * self._right + shares * (took_s / total_s)
        factors = np.linalg.solve(self._squares + self._prior_squares, self._right + self._prior_weight)
        self.model = TickModel(*(self._parts * np.clip(factors, 0.02, 50.0)).tolist())


class MeanTick:
    """As `TickFit`, for ticks of one lane: their exponentially weighted mean."""

    def __init__(self, prior: TickModel) -> None:
        self.model = prior
        self._sum_s, self._ticks = prior.constant_s, 1.0

    def observe(self, lanes: int, rows: int, context_rows: float, took_s: float) -> None:
        self._sum_s = _KEEP * self._sum_s + took_s
        self._ticks = _KEEP * self._ticks + 1
        self.model = TickModel(constant_s=self._sum_s / self._ticks, lane_s=0.0, row_s=0.0, attention_s=0.0)


_COUNTS = ("lanes", "new", "rows", "open", "bucket_lanes", "bucket_rows")
# The record of a tick: when its PCM was on the host (perf_counter), its time on the device, its counts and bucket, and
# how late its latest frame was.
TICKS = np.dtype([("ended_s", float), ("took_s", float), *((name, int) for name in _COUNTS), ("late_s", float)])


FRAME_S = 1 / FRAME_RATE_HZ
# A buffer that stays full for so long has no reader: one that plays in real time takes more.
ABSENT_S = 2.0
_TOLERANCE_S = 1e-6  # of a lead, so that a stream is due when the wait for it is over
_MANY_NEW = 32  # first frames in a tick; with so many, streams that are not pressed for time stay out of it
_LANES = (8, 32, 64, 128, 192, 256, 384, 512, 768, 1_024)  # of an H200's buckets
_PROMPT_ROWS = (0, 64, 256, 1_024)
_WIDE = 768  # lanes from which 64 prompt rows save no time against 256
_PATIENCE_S = 1.0  # an unpaced stream's prompt lets those pass that arrive up to this long after it


@dataclass(frozen=True)
class TickSettings:
    """What a tick may be.

    buckets: the (lanes, prompt rows) that can run; () if a tick may have any size, up to the limits.
    max_lanes, max_rows: of a tick. At least one bucket has both at once.
    min_rows: prompt rows that may enter even while listeners are pressed for time, so that new streams do begin.
    max_tick_s: ticks are predicted to be no longer, unless a listener would otherwise be late. A stream that arrives
        waits up to this long for the tick that runs, and a listener's second frame must be in time: below 80 ms.
    lead_s: a stream with this much lead is not due. fill_lead_s: up to this lead it may use a lane that would be empty,
        or be in a tick of fewer than `fill_lanes`.
    few_lanes: up to so many streams are never held back by their lead. idle_lanes: of a tick when no stream is due.
    whole_prompts: a prompt enters in one tick, even if it has more rows than those limits.
    chunks: frames of a stream's first, second, ... chunk, where its `StreamOptions.schedule` is None. A chunk can be
        heard when its last frame is made: with ticks of `max_tick_s` it should have no more frames than are made while
        the chunks before it are played.
    margin: the part of the time that listeners' ticks may take: the rest is for uneven load, and for the host's work
        beside a device, which is in no tick.
    first_pcm_s: the longest predicted wait for a first PCM with which a stream is admitted behind waiting prompts.
    place_wait_s: how long a stream waits for a listener to leave, where `AdmissionLimits` does not say."""

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
    first_pcm_s: float = 0.12  # two ticks of 50 ms and their prompts; two of 1,024 lanes take 70 ms on an H200
    place_wait_s: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(sorted((int(lanes), int(rows)) for lanes, rows in self.buckets)))

    @classmethod
    def h200(cls, streams: int = _LANES[-1]) -> TickSettings:
        """CUDA graphs of 8 to 1,024 lanes, in those sizes that so many streams can fill, and of 0 to 1,024 prompt rows:
        32 prompts a tick; with 4, some of 1,400 listeners had to wait."""
        sizes = [lanes for lanes, smaller in zip(_LANES, (0, *_LANES), strict=False) if smaller < streams]
        buckets = tuple((lanes, rows) for lanes in sizes for rows in _PROMPT_ROWS if rows != 64 or lanes < _WIDE)
        # The ticks of an H200 have time for 2,200 listeners; one process served 1,450 in time (LOG.md).
        idle = min(32, sizes[-1])
        # Under overload every admitted stream has waited this long, and its first PCM counts from its arrival.
        return cls(buckets=buckets, max_lanes=sizes[-1], idle_lanes=idle, margin=0.7, place_wait_s=0.05)

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
            margin=0.65,  # the host's own work, on the same cores, is in no tick
            chunks=(*[1] * 10, 2),  # larger ones would be late where a tick takes 70 ms
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

    @cached_property
    def grows(self) -> np.ndarray:
        """Whether a larger chunk follows, for each of a stream's frames in order; the last holds for all after it."""
        return np.append(np.repeat(np.diff(self.chunks) > 0, self.chunks[:-1]), False)

    def size(self, lanes: int) -> int:
        """The smallest number of lanes that can be run and is at least this; `max_lanes` if there is none."""
        return next((size for size in self.sizes if size >= lanes), self.max_lanes)

    def bucket(self, model: TickModel, lanes: int, rows: int) -> tuple[int, int]:
        """The quickest bucket with room for so many lanes and prompt rows."""
        if not self.buckets:
            return lanes, rows
        found, least_s = self.buckets[-1], np.inf
        for bucket in self.buckets:  # every arrival asks often: no list is made, and wide buckets are not looked at
            lanes_s = model.lane_s * bucket[0]
            if lanes_s >= least_s:
                break
            if bucket[0] >= lanes and bucket[1] >= rows and lanes_s + model.row_s * bucket[1] < least_s:
                found, least_s = bucket, lanes_s + model.row_s * bucket[1]
        return found

    def worthwhile(self, model: TickModel, lanes: int, least: int, rows: int, context_rows: float) -> tuple[int, int]:
        """The bucket with room for `rows` prompt rows and `least` lanes that makes most frames a second, if `lanes`
        streams at so many rows each are due: an empty lane costs as much as a full one."""

        def frames_hz(bucket: tuple[int, int]) -> float:
            filled = min(bucket[0], lanes)
            return max(filled, 1) / model.predict(*bucket, filled * context_rows)

        return max(((b, p) for b, p in self.buckets if b >= least and p >= rows), key=frames_hz)


class StreamTable:
    """What the scheduler knows of the open streams. All arrays have one entry a slot; the methods make the changes that
    concern several of them. Times are seconds of one clock, which the caller reads.

    A listener is assumed to play from the first PCM on, in real time; where PCM came late, the listener has waited, and
    the frames after it are wanted that much later.

    open: the slot has a stream; otherwise it is in no tick. paced: a listener plays it in real time; otherwise its
    frames are wanted as soon as others allow. text_known: the talker's next input is known. full: the reader's buffer,
    of buffer_frames, takes no more. serial: counts the streams that a slot has had. prompt_rows: rows of the segment's
    prompt still to enter. context_rows: rows in the keys and values, those in shared pages included. frames_made,
    frames_taken: over all segments; made counts the tick that runs. chunk_start, chunk_end: frames made where the chunk
    that is being made begins, and where it is whole, a silent lead included: until then its listener has none of it.
    arrived_s; newest_s: of the newest frame; playing_since_s: -inf before the first PCM; taken_s: when the reader last
    took a frame. silent_s: pauses so far, which have no frames. resumed: it waited for text, which has come, and was in
    no tick since."""

    def __init__(self, slots: int) -> None:
        self.open, self.paced, self.text_known, self.full, self.resumed = np.zeros((5, slots), bool)
        self._counts = np.zeros((6, slots), np.int64)
        self.buffer_frames = np.full(slots, np.iinfo(np.int64).max)
        self.prompt_rows, self.context_rows, self.frames_made, self.frames_taken = self._counts[:4]
        self.chunk_start, self.chunk_end = self._counts[4:]
        self.serial = np.zeros(slots, np.int64)
        self.arrived_s, self.silent_s, self.newest_s, self.taken_s, self.playing_since_s = np.zeros((5, slots))

    def enter(self, slot: int, arrived_s: float, paced: bool = True) -> None:
        """Puts a stream into a free slot. The caller sets its `prompt_rows` before the next tick is planned."""
        self.open[slot], self.paced[slot] = True, paced
        self.text_known[slot], self.full[slot], self.resumed[slot] = True, False, False
        self.serial[slot] += 1
        self._counts[:, slot] = self.silent_s[slot] = 0
        self.arrived_s[slot] = self.newest_s[slot] = self.taken_s[slot] = arrived_s
        self.playing_since_s[slot] = -np.inf

    def text(self, slot: int, known: bool, now_s: float) -> None:
        """Notes whether the talker's next input is known. A listener who waited for text hears a pause: no frame was
        late before the text came, and the next one may take a frame's time."""
        if known and not self.text_known[slot]:
            latest_s = now_s - FRAME_S * (self.frames_made[slot] - 1)
            if np.isfinite(self.playing_since_s[slot]):
                self.playing_since_s[slot] = max(self.playing_since_s[slot], latest_s)
        self.text_known[slot] = known

    def pause(self, slot: int, silent_s: float, now_s: float) -> None:
        """Notes that the listener has got `silent_s` of pauses in all: what follows is wanted that much later."""
        paused_s, self.silent_s[slot] = silent_s - self.silent_s[slot], silent_s
        if paused_s:
            played_s = max(float(self.playing_since_s[slot]), now_s - FRAME_S * self.frames_made[slot])
            self.playing_since_s[slot] = played_s + paused_s

    def read(self, slots: np.ndarray, taken: np.ndarray, now_s: float) -> None:
        """Notes that the readers of these slots (n,) have taken so many frames (n,) in all by now."""
        self.taken_s[slots[self.frames_taken[slots] != taken]] = now_s
        self.frames_taken[slots] = taken

    def begin(self, tick: Tick) -> None:
        """Counts a tick when it is launched, so that the next one can be planned as if it had ended."""
        for piece in tick.pieces:
            self.prompt_rows[piece.slot] -= piece.rows
            self.context_rows[piece.slot] += piece.rows
            self.resumed[piece.slot] = False
        self.resumed[tick.lanes] = False
        self.frames_made[tick.lanes] += 1
        self.context_rows[tick.lanes[tick.new_lanes :]] += 1  # a new lane's first frame comes from its last prompt row

    def finish(self, tick: Tick, ended_s: float) -> np.ndarray:
        """Counts a tick whose PCM is on the host; streams that ended in it are not `open` any more. Returns by how many
        seconds (n,) each lane was late for its listener: 0 for those in time, first frames, frames that complete no
        chunk, and streams that left."""
        lanes = tick.lanes
        here = self.open[lanes] & (self.serial[lanes] == tick.serials)
        self.newest_s[lanes[here]] = ended_s
        first = here & (tick.frames == 0)
        self.playing_since_s[lanes[first]] = np.maximum(self.playing_since_s[lanes[first]], ended_s)
        playing = here & ~first & self.paced[lanes] & np.isfinite(self.playing_since_s[lanes])
        # A chunk can be heard when its last frame is made, and is wanted when its first one is.
        chunked = self.chunk_end[lanes] > tick.frames
        whole = ~chunked | (tick.frames + 1 >= self.chunk_end[lanes])
        start = np.where(chunked, self.chunk_start[lanes], tick.frames)
        heard_out = playing & whole & (self.frames_taken[lanes] >= start)
        late_s = ended_s - (self.playing_since_s[lanes] + FRAME_S * start)
        late_s = np.where(heard_out & (late_s > 0), late_s, 0.0)
        self.playing_since_s[lanes] += late_s
        return late_s

    def listening(self, now_s: float) -> int:
        """How many streams need frames in time: the paced ones, except those whose readers are gone, and those that
        wait for text and have played all that was made. Any thread."""
        absent = self.full & (now_s >= self.taken_s + ABSENT_S)
        played_until_s = self.playing_since_s + FRAME_S * self.frames_made
        return int((self.open & self.paced & (self.text_known | (played_until_s > now_s)) & ~absent).sum())

    def changes_s(self, now_s: float) -> float:
        """When `listening` next changes if nothing else happens; inf for never."""
        gone_s = self.taken_s[self.open & self.full] + ABSENT_S
        played_s = (self.playing_since_s + FRAME_S * self.frames_made)[self.open & ~self.text_known]
        return min([*gone_s[gone_s > now_s], *played_s[played_s > now_s]], default=np.inf)

    def able(self) -> np.ndarray:
        """Slots (n,) that can be in a tick now: not those that wait for text or for their readers."""
        return (self.open & self.text_known & ~self.full).nonzero()[0]

    def lead_s(self, slots: np.ndarray, now_s: float, unpaced_s: float) -> np.ndarray:
        """Seconds (n,) from now until each stream's next frame is wanted, at least as long as what its reader has not
        taken. An unpaced stream's frame is wanted `unpaced_s` after its last one, or at once (-inf)."""
        made = self.frames_made[slots]
        heard = np.where(made < self.chunk_end[slots], self.chunk_start[slots], made)  # those in whole chunks
        ahead_s = FRAME_S * (heard - self.frames_taken[slots])
        lead_s = self.playing_since_s[slots] + FRAME_S * heard - now_s
        lead_s = np.where(ahead_s > 0, np.maximum(lead_s, ahead_s), lead_s)  # not 0 for all that are late
        return np.where(self.paced[slots], lead_s, self.newest_s[slots] + unpaced_s - now_s)


def next_tick(table: StreamTable, now_s: float, model: TickModel, settings: TickSettings) -> Tick:
    """Plans the tick to run at `now_s`, in 0.1 ms at 1,000 streams. Changes nothing: `StreamTable.begin` does that."""
    able = table.able()
    if not len(able):
        return Tick()
    if len(able) > 1 or settings.max_lanes > 1:
        return _of_many(table, able, now_s, model, settings)
    # One stream runs whatever its lead is: ordering many takes 0.2 ms, of every frame and before the first.
    (slot,) = able.tolist()
    context, rows = int(table.context_rows[slot]), int(table.prompt_rows[slot])
    pieces = (Piece(slot, context, rows, True),) if rows else ()
    frames, serials = table.frames_made[able], table.serial[able]
    return Tick((1, rows), able.astype(np.int32), len(pieces), frames, serials, pieces, context + rows)


def _of_many(table: StreamTable, able: np.ndarray, now_s: float, model: TickModel, settings: TickSettings) -> Tick:
    limit_s = np.inf if len(able) <= settings.few_lanes else settings.lead_s + _TOLERANCE_S
    waiting = table.prompt_rows[able] > 0
    arrivals = bool(waiting.any())
    speaking = np.flatnonzero(~waiting)
    context_rows = float(table.context_rows[able].mean())
    # The most lanes with which a tick keeps to `max_tick_s`. Where its constant part is nearly as long, 1.5 times that
    # part is allowed, since fewer lanes would hardly shorten it.
    lane_s = model.predict(1, 0, context_rows) - model.constant_s
    time_s = max(settings.max_tick_s, min(1.5 * model.constant_s, settings.margin * FRAME_S))
    fitting = (time_s - model.constant_s) / lane_s if lane_s else np.inf
    most = max((size for size in settings.sizes if size <= fitting), default=settings.sizes[0])
    # With as many listeners as the capacity allows, even a tick of all of them ends in time.
    everyone = max(most, settings.size(len(speaking)))
    longest_s = model.predict(everyone, settings.max_rows if arrivals else 0, len(able) * context_rows)
    wanted_s, ticks_left = table.lead_s(able, now_s, settings.lead_s), _ticks_left(table, able, settings)
    lead_s = wanted_s - longest_s * ticks_left
    resumed = speaking[table.resumed[able[speaking]]]
    lead_s[resumed] = lead_s[speaking].min(initial=np.inf) - _TOLERANCE_S
    speaking = speaking[np.argsort(lead_s[speaking], kind="stable")]
    leads_s = lead_s[speaking]
    # These might be late if the next tick were their first: they are in this one, however long that makes it.
    pressed = int(np.searchsorted(leads_s, 2 * longest_s))
    most = max(most, settings.size(pressed + arrivals))  # and one new stream beside them
    due = min(int(np.searchsorted(leads_s, limit_s)), most)
    pieces: list[Piece] = []
    if arrivals:
        # The time that listeners can spare: if this tick, those until their chunks are whole and one more take equally
        # long; or if all but this one take as long as any may.
        shares_s = wanted_s[speaking] / (2 + ticks_left[speaking])
        time_s = min(settings.max_tick_s, max(shares_s.min(initial=np.inf), leads_s.min(initial=np.inf)))
        budget = _row_budget(min(due + int(waiting.sum()), most), time_s, context_rows, model, settings)
        entering = waiting & (lead_s < limit_s)
        pieces = _pieces(table, able[entering], lead_s[entering], now_s, budget, max(most - pressed, 1), settings)
    new = [piece.slot for piece in pieces if piece.last]
    if len(new) >= _MANY_NEW:
        due = min(due, pressed)  # the others can wait until the new streams have been heard
    count = min(due, most - len(new))
    if not count and not pieces:
        if not settings.idle_lanes:
            return Tick(wake_s=_wake_s(table, able, now_s, longest_s, settings))
        pieces = _pieces(table, able[waiting], lead_s[waiting], now_s, settings.min_rows, 1, settings)
        new = [piece.slot for piece in pieces if piece.last]
        count = min(settings.idle_lanes, most, len(speaking)) if not pieces else 0
    rows = sum(piece.rows for piece in pieces)
    bucket = len(new) + count, rows
    if settings.buckets:
        bucket = settings.worthwhile(model, len(new) + count, len(new), rows, context_rows)
    count = min(count, bucket[0] - len(new))
    near = int(np.searchsorted(leads_s, settings.fill_lead_s))
    count = max(count, min(near, min(max(bucket[0], settings.fill_lanes), most) - len(new)))
    if not settings.buckets:
        bucket = len(new) + count, rows
    old = able[speaking[:count]]
    lanes = np.concatenate((np.array(new, np.int64), old))
    context_rows = int(table.context_rows[old].sum()) + sum(piece.start + piece.rows for piece in pieces)
    frames, serials = table.frames_made[lanes], table.serial[lanes]
    return Tick(bucket, lanes.astype(np.int32), len(new), frames, serials, tuple(pieces), context_rows)


def _row_budget(lanes: int, time_s: float, context_rows: float, model: TickModel, settings: TickSettings) -> int:
    """Prompt rows that may enter: as many as keep the tick within `time_s`, but at least `min_rows`."""
    levels = sorted({rows for size, rows in settings.buckets if rows >= settings.min_rows and size >= lanes})
    attended = lanes * context_rows
    if levels:
        fitting = [r for r in levels if model.predict(settings.bucket(model, lanes, r)[0], r, attended) <= time_s]
        return min(max(fitting, default=levels[0]), settings.max_rows)
    spare_s = time_s - model.predict(lanes, 0, attended)
    rows = spare_s / model.row_s if model.row_s else np.inf
    return int(np.clip(rows, settings.min_rows, settings.max_rows))


def _pieces(
    table: StreamTable,
    slots: np.ndarray,
    lead_s: np.ndarray,
    now_s: float,
    rows: int,
    most_prompts: int,
    settings: TickSettings,
) -> list[Piece]:
    """Pieces of the prompts in these slots, up to `rows` rows and `most_prompts` ends, in the order in which they fell
    due: a new stream when it arrived, the next segment of a playing one when its lead fell below the limit, and before
    all of them those that waited for text. With whole prompts none is cut, and one enters."""
    fresh = table.frames_made[slots] == 0
    arrived_s = table.arrived_s[slots] + np.where(table.paced[slots], 0.0, _PATIENCE_S)
    since_s = np.where(fresh, arrived_s, now_s + lead_s - settings.lead_s)
    order = np.argsort(np.where(table.resumed[slots], -np.inf, since_s), kind="stable")
    pieces: list[Piece] = []
    for slot in slots[order].tolist():
        left = int(table.prompt_rows[slot])
        taken = min(left, rows)
        if settings.whole_prompts and taken < left:
            taken = 0 if pieces else left
        last = taken == left
        if not taken or (last and not most_prompts):
            break
        pieces.append(Piece(slot, int(table.context_rows[slot]), taken, last))
        rows -= taken
        most_prompts -= last
    return pieces


def _ticks_left(table: StreamTable, slots: np.ndarray, settings: TickSettings) -> np.ndarray:
    """Ticks (n,) after the next one until the current chunk is whole, since it is heard when its last frame is made;
    one more where the chunk behind it is larger, none where a prompt waits."""
    made = table.frames_made[slots]
    ticks = np.maximum(table.chunk_end[slots] - made - 1, 0) + settings.grows.take(made, mode="clip")
    return ticks * (table.prompt_rows[slots] == 0)


def _wake_s(table: StreamTable, able: np.ndarray, now_s: float, longest_s: float, settings: TickSettings) -> float:
    """When the first of the streams that are ahead becomes due if nothing else happens; not those whose readers have
    much left to take, since that does not become less by waiting."""
    ahead_s = FRAME_S * (table.frames_made[able] - table.frames_taken[able])
    left_s = longest_s * _ticks_left(table, able, settings)
    heard_out = ahead_s - left_s <= settings.lead_s
    lead_s = table.lead_s(able, now_s, settings.lead_s) - left_s
    return now_s + float(lead_s[heard_out].min(initial=np.inf)) - settings.lead_s
