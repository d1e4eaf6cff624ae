"""Runs the streams of one set of lanes: admits them, gives them slots, runs ticks, and hands out what each tick made.

Where the lanes run concurrently with the host, tick t + 1 is planned while tick t runs, as late as possible, so that it
includes streams that arrive meanwhile; it is launched before t is read, so that the device has no pause. What t then
shows can make a lane of t + 1 useless, because its speech had ended: what that lane made is dropped."""

import contextlib
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mktts.audio import rows_to_pcm16
from mktts.engine.admission import Admission, AdmissionQueue, Arrival, Reason, refusal
from mktts.engine.lanes import Lanes, Made
from mktts.engine.options import Chunker
from mktts.engine.pages import PAGE_ROWS
from mktts.engine.scheduler import MeanTick, StreamTable, Tick, TickFit, TickModel, next_tick
from mktts.engine.stream import EngineName, Segment, Utterance
from mktts.errors import CapacityError, EngineError
from mktts.model.backend import no_number
from mktts.model.prompt import FedPrompt, PromptBuilder, Request, is_of_voice
from mktts.model.voice import Voice

TICK_BOUNDS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.16, 0.5)
_EARLY_S = 2e-3  # the first value of `Runner._early_s`
# A gap on the device shows that a tick was planned too late: the next is planned earlier by this part of the gap. With
# no gap each is planned a little later than the last, until there is one: in the end, of a twentieth of the lead.
_GAP_PART = 0.6
_RELAX = 0.97
_MOST_EARLY_S = 0.05


class TickTimes:
    """How long ticks took since the start: counts by TICK_BOUNDS_S, the last for longer ones, and the sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TICK_BOUNDS_S) + 1)
        self.sum_s = 0.0


class EngineStats(NamedTuple):
    """The state of one set of lanes now.

    listeners: streams that need frames in time. waiting: streams that wait for admission. lanes: slots for streams.
    lanes_used: slots that have one, whether frames are made for it now or not. pages, pages_free: of keys and values, 0
    where each stream has its own."""

    listeners: int
    waiting: int
    lanes: int
    lanes_used: int
    pages: int
    pages_free: int
    ticks: TickTimes


class Running(NamedTuple):
    """A launched tick. lanes: slots and segments. streams: those with a lane or a piece of a prompt in it. ends_s: its
    predicted end, if it runs concurrently with the host. follows: the one before it still ran."""

    tick: Tick
    lanes: list[tuple[int, Segment]]
    streams: list[Utterance]
    launched: Any
    ends_s: float
    follows: bool


# Streams that arrive while others play are examined while a tick runs. If many arrive at once, the next tick waits this
# long to take more of them: those that play are ahead, and a tick costs the host as much as several arrivals.
_LATE_S = 12e-3
_STARTING_S = 3e-3  # the same where no tick runs yet


class Runner:
    """Makes streams on `lanes`, tick by tick. It belongs to the engine's worker thread, except for what says "any
    thread". An error of one stream does not touch the others."""

    def __init__(
        self,
        lanes: Lanes,
        prompts: PromptBuilder,
        admission: Admission,
        build: Callable[[Request], Any] | None = None,
        open_prompt: Callable[[Request], Any] | None = None,
    ) -> None:
        """build, open_prompt: make prompts of checked requests, whole and fed ones; None: those of `prompts`."""
        self.lanes, self.prompts, self.admission = lanes, prompts, admission
        self.log: deque[tuple[Any, ...]] = deque(maxlen=100_000)  # records of the newest ticks, as TICKS
        self.build = build or prompts.of_checked
        self.open_prompt = open_prompt or partial(FedPrompt, prompts)
        self.name: EngineName = "single" if lanes.settings.max_lanes == 1 else "batch"
        self._pages, self._settings = lanes.pages, lanes.settings
        self._times = TickTimes()
        # Learnt times of ticks on the device, and with the pause before each: a host may be slower than its device.
        learns = TickFit if lanes.settings.max_lanes > 1 else MeanTick
        self.ticks, self.steps = learns(lanes.model), learns(lanes.model)
        self._early_s = _EARLY_S  # how long before the end of the running tick the next one is planned
        self._delivery_s = 0.0  # from the end of a tick until its last frame is delivered
        self.reference_model: TickModel | None = None  # of the measured capacity: how long ticks are expected to take
        self._table = StreamTable(lanes.slots)
        admission.listeners.append(self._table.listening)
        self._reset()

    def _reset(self) -> None:
        self._table.open[:] = False
        self._queue = AdmissionQueue(self.admission, self._table, self._pages, self._settings)
        self.free_slots = list(range(self.lanes.slots - 1, -1, -1))
        self.open_streams: dict[Utterance, int | None] = {}  # all that are not over, with their slots; None: no slot
        # An open stream is in one of these, and waits             until
        self._arrived: deque[Utterance] = deque()  # for a check,    this turn or the next
        self._textless: set[Utterance] = set()  # for its first text, an update
        # `_queue`                                  for a slot,      one is free, or `AdmissionQueue.pop` refuses it
        self._awake: dict[int, Utterance] = {}  # for frames,        the scheduler takes it; its reader takes a chunk
        self._asleep: dict[Utterance, int] = {}  # for more text,    an update
        self._streams: dict[int, Utterance] = {}  # the awake and the sleeping ones, by slot
        self._waiting: dict[int, None] = {}  # awake slots whose next input is not known, in the order of their waits
        self._running: deque[Running] = deque()  # two at most, and one between two turns
        self._lately_read: deque[Utterance] = deque()  # consumers append their stream with each chunk they take
        self._cancelled: set[Utterance] = set()  # cancelled since the last tick, after their first check
        self._freed = False  # a stream has ended, or lost its reader, since the queue was looked at

    @property
    def stats(self) -> EngineStats:
        """The state now. Any thread."""
        admitted = len(self._streams)
        waiting = max(0, len(self.open_streams) - admitted)
        pages = (0, 0) if self._pages is None else (self._pages.all, self._pages.free)
        listeners = self._table.listening(time.perf_counter())
        return EngineStats(listeners, waiting, self.lanes.slots, admitted, *pages, self._times)

    def forget(self, voice: Voice) -> None:
        """Drops what is kept for prompts with this voice; open streams go on."""
        self.prompts.forget(voice)
        if self._pages is not None:
            self._pages.forget(lambda key: is_of_voice(key, voice))
        self.lanes.forget(voice)

    def update(self, stream: Utterance) -> None:
        """Handles the update of a stream: it is new or cancelled, has more text, or its full buffer was read from; it
        may be over. A stream that waits is not looked at without one."""
        if stream.chunker is None or stream in self._textless:
            if stream.chunker is None:
                stream.chunker = Chunker(stream.plan.options, stream.script.started_s, self._settings.chunks)
                stream.on_close, stream.lately_read = partial(self._leave, stream), self._lately_read
                self.open_streams[stream] = None
            stream.arrived_s = time.perf_counter()
            self._textless.discard(stream)
            self._arrived.append(stream)
        elif stream.cancelled:
            self._cancelled.add(stream)
        elif (slot := self._asleep.pop(stream, None)) is not None:
            stream.set_idle(False)
            self._table.resumed[slot] = True
            self._awake[slot] = stream
            self._waiting[slot] = None
            self._lately_read.append(stream)  # what was taken while it slept is not counted yet

    def turn(self, now_s: float) -> float:
        """Does what is due, launching one tick at most. Returns when the next turn is due if nothing happens outside:
        perf_counter seconds, -inf for at once, inf for never."""
        running, table = self._running[0] if self._running else None, self._table
        plan_s = now_s if running is None else running.ends_s - self._early_s
        self._take_arrivals(now_s, now_s + _STARTING_S if running is None else plan_s)
        self._freed = False
        while (left := self._queue.pop(now_s, self.steps.model)) is not None:
            self._begin(*left, now_s)
        if now_s < plan_s:
            return float("-inf") if self._arrived else plan_s
        if self._cancelled:
            for stream in self._cancelled:
                stream.end(None)
            self._queue.cancel(self._cancelled)
            self._cancelled.clear()
            self._freed = True  # streams behind them in the queue may be admitted
        self._update_readers(now_s)
        self._queue.reserved_pages = 0
        for slot in list(self._waiting):
            self._resume(slot, now_s)
        begins_s = now_s if running is None else max(now_s, running.ends_s)
        # Planned with the times of whole steps, the host's pauses included, for when its frames reach their readers.
        tick = next_tick(table, begins_s + self._delivery_s, self.steps.model, self._settings)
        if len(tick.lanes) or tick.pieces:
            self._launch(tick, now_s, begins_s)
        self._queue.idle_since_s = math.inf if self._running else min(self._queue.idle_since_s, now_s)
        if running is not None:
            self._take_arrivals(now_s, running.ends_s)
            self._read()
        if self._running and self.lanes.overlaps:
            return float("-inf") if self._arrived else self._running[0].ends_s - self._early_s
        if self._running:
            self._read()
        elif running is None and not self._freed and not self._arrived:
            for slot in table.able().tolist():  # they are ahead of their readers, who from now on wake the worker
                self._streams[slot].watched = True
            if self._lately_read:  # one was read meanwhile
                return float("-inf")
            return min(tick.wake_s - self._delivery_s, self._queue.wake_s(now_s))
        return float("-inf")

    def fail_all(self, error: BaseException) -> None:
        """Ends every stream with an EngineError, because `turn` raised `error`; streams that come later are served."""
        why = f"the engine failed while this stream was open: {type(error).__name__}: {error}"
        self._end_all(lambda stream: stream.fail(EngineError(why)))  # one each, because raising an error changes it
        self._reset()

    def close(self) -> None:
        self._end_all(lambda stream: (stream.cancel(), stream.end(None)))

    def _end_all(self, end: Callable[[Utterance], Any]) -> None:
        while self._running:
            with contextlib.suppress(Exception):
                self.lanes.collect(self._running.popleft().launched)
        for stream in list(self.open_streams):
            with contextlib.suppress(Exception):
                end(stream)

    def _take_arrivals(self, now_s: float, until_s: float) -> None:
        """Examines streams that arrived, until `until_s` or a little longer; at least one if no stream is open."""
        table, queue, most_rows = self._table, self._queue, self._settings.max_rows
        while self._arrived:
            late_s = time.perf_counter() - max(until_s, now_s) if self._streams else -1.0
            if late_s >= _LATE_S or (late_s >= 0 and table.prompt_rows[table.open].sum() >= most_rows):
                return
            stream = self._arrived.popleft()
            try:
                if stream.cancelled:
                    stream.end(None)
                elif stream.plan.paced and (reason := queue.refused(stream.arrived_s, now_s)):
                    raise self._refusal(reason)  # before its prompt is built in vain: forty may come at once
                elif stream.next_segment(self.lanes.positions):
                    arrival = self._arrival(stream)
                    reason = queue.submit(arrival, self.steps.model, now_s)
                    if reason is not None:
                        self._begin(arrival, reason, now_s)
                elif stream.has_rest:
                    stream.flush()  # its text ended without a word
            except Exception as error:
                stream.fail(error)
            textless = stream.open and stream.segment is None
            stream.set_idle(textless)
            if textless:
                self._textless.add(stream)

    def _arrival(self, stream: Utterance) -> Arrival:
        """A stream's request for admission. Raises CapacityError for a segment of more positions than lanes have."""
        segment, key, kept = stream.segment, None, 0
        rows = len(segment.prompt.embeds)
        most = rows + segment.max_frames
        if most > self.lanes.positions:
            limit = f"one may have {self.lanes.positions}: shorten the text or lower max_frames"
            raise CapacityError(f"a stream of {most} positions (prompt and frames) was asked for, {limit}")
        if self._pages is not None:
            key = segment.prompt.prefix_key
            kept = self._pages.find(key)
        return Arrival(stream.arrived_s, rows - kept, most, stream.plan.paced, key, stream)

    def _refusal(self, reason: Reason) -> Exception:
        return refusal(reason, len(self._streams), self.admission.most)

    def _begin(self, arrival: Arrival, reason: Reason, now_s: float) -> None:
        """Gives an admitted stream a slot and memory for its segment; ends a stream that is refused for `reason`."""
        stream: Utterance = arrival.name
        segment, table, kept = stream.segment, self._table, 0
        try:
            if stream.cancelled:
                stream.end(None)
                return
            if reason:
                raise self._refusal(reason)
            slot = self.open_streams[stream]
            if slot is None:
                slot = self.open_streams[stream] = self.free_slots.pop()
                self._streams[slot] = self._awake[slot] = stream
                table.enter(slot, now_s, stream.plan.paced)
                table.buffer_frames[slot] = stream.buffer_frames
                if self.lanes.submit is not None:
                    stream.submit = partial(self.lanes.submit, slot)
            anew = stream.begins_anew or not stream.segment_number
            if stream.begins_anew:  # the listener first gets all that was said before the segment, and the pause
                stream.begins_anew = False
                self._flush(slot, stream, now_s)
                if not stream.open:
                    return
            if self._pages is not None:
                kept = self._pages.open(slot, arrival.max_rows, arrival.key)
            segment.begun = True
            self.lanes.begin(slot, segment, anew)
            table.prompt_rows[slot], table.context_rows[slot] = len(segment.prompt.embeds) - kept, kept
        except Exception as error:
            stream.fail(error)

    def _flush(self, slot: int, stream: Utterance, now_s: float) -> None:
        stream.flush()
        if stream.open:
            table, chunker = self._table, stream.chunker
            table.chunk_start[slot] = stream.made_frames
            table.chunk_end[slot] = stream.made_frames + chunker.pending_frames + chunker.missing_frames
            table.pause(slot, stream.silent_s, now_s)

    def _leave(self, stream: Utterance) -> None:
        slot = self.open_streams.pop(stream)
        if slot is None:
            return
        if self._pages is not None:
            self._pages.close(slot)
        self.lanes.leave(slot)
        del self._streams[slot]
        self._asleep.pop(stream, None)
        self._awake.pop(slot, None)
        self._waiting.pop(slot, None)
        self._table.open[slot] = False
        self.free_slots.append(slot)
        self._freed = True

    def _update_readers(self, now_s: float) -> None:
        """Notes what readers of awake streams have taken, and whose buffers are full."""
        table, awake, read = self._table, self._awake.items(), self._lately_read
        slots = {self.open_streams.get(read.popleft()) for _ in range(len(read))}
        if len(awake) > 1:  # only those with news, and those whose buffers may be full
            filled = table.open & (table.full | (table.frames_made - table.frames_taken >= table.buffer_frames))
            slots.update(np.flatnonzero(filled).tolist())
            awake = [(slot, self._awake[slot]) for slot in slots & self._awake.keys()]
            found = np.array([(slot, stream.taken_frames) for slot, stream in awake], int).reshape(-1, 2)
            table.read(*found.T, now_s)
        for slot, stream in awake:
            taken, frames = stream.taken_frames, int(table.frames_made[slot])
            if table.frames_taken[slot] != taken:
                table.frames_taken[slot], table.taken_s[slot] = taken, now_s
            at_limit = frames - taken >= stream.buffer_frames
            # A frame in flight may complete a chunk that fills the buffer: only then is it full.
            full = (at_limit and stream.unread) or (
                (at_limit or stream.watched) and stream.full(frames - stream.made_frames)
            )
            self._freed |= full and not table.full[slot]  # it may not count as a listener any more
            table.full[slot] = full
            stream.set_idle(full)

    def _resume(self, slot: int, now_s: float) -> None:
        """Lets a stream go on that waited for text, or for memory between two segments, if that has come."""
        stream, queue, pages, known = self._streams[slot], self._queue, self._pages, False
        try:
            if stream.segment is not None and stream.segment.begun:
                stream.script.update()
                stream.segment.row = stream.segment.prompt.row(stream.segment.launched - 1)
                known = stream.segment.row is not None
            elif stream.next_segment(self.lanes.positions):  # it goes before streams that arrive
                arrival = self._arrival(stream)
                known = pages is None or pages.fits(arrival.max_rows, arrival.key, queue.reserved_pages)
                if known:
                    self._begin(arrival, "", now_s)
                elif queue.held(now_s):
                    raise self._refusal("held")
                else:
                    queue.reserved_pages += pages.count(arrival.max_rows)
            if known:
                self._waiting.pop(slot, None)  # it is not there if `_begin` failed
                self._table.text(slot, True, now_s)
                return
            if stream.has_rest and not stream.unread:
                self._flush(slot, stream, now_s)  # no frame comes for now: the listener gets what there is
            if stream.open and not stream.unread and (stream.segment is None or stream.segment.begun):
                stream.set_idle(True)  # it has no frame in flight, and no memory to wait for
                self._asleep[stream] = slot
                del self._awake[slot], self._waiting[slot]
        except Exception as error:
            stream.fail(error)

    def _launch(self, tick: Tick, now_s: float, begins_s: float) -> None:
        table = self._table
        lanes = [(slot, self._streams[slot].segment) for slot in tick.lanes.tolist()]
        entering = (self._streams[piece.slot] for piece in tick.pieces if not piece.last)
        streams = [*(segment.stream for _, segment in lanes), *entering]
        try:
            launched = self.lanes.launch(tick, [segment.row for _, segment in lanes])
        except Exception as error:
            self._fail_tick(streams, error)
            return
        took_s = self.ticks.model.predict(*tick.bucket, tick.context_rows) if self.lanes.overlaps else 0.0
        self._running.append(Running(tick, lanes, streams, launched, begins_s + took_s, follows=bool(self._running)))
        table.begin(tick)
        for slot, segment in lanes:
            segment.row = segment.prompt.row(segment.launched)
            segment.launched += 1
            if segment.launched >= segment.max_frames:  # this is its last frame, unless it ends before
                table.text_known[slot] = False
            elif segment.row is None:
                table.text(slot, False, now_s)
                self._waiting[slot] = None

    def _fail_tick(self, streams: Sequence[Utterance], error: Exception) -> None:
        """Ends the streams of a failed tick. Each gets an error of its own, because raising an error changes it."""
        for stream in streams:
            mine = EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}")
            stream.fail(error if self._settings.max_lanes == 1 else mine)

    def _read(self) -> None:
        """Waits for the oldest tick, and delivers its frames to their streams."""
        running = self._running.popleft()
        try:
            made = self.lanes.collect(running.launched)
        except Exception as error:
            self._fail_tick(running.streams, error)
            return
        ended_s = time.perf_counter()
        tick, table = running.tick, self._table
        paused_s, size = made.idle_s if running.follows else 0.0, (*tick.bucket, tick.context_rows)
        self.ticks.observe(*size, made.took_s)
        self.steps.observe(*size, made.took_s + paused_s)
        if running.follows:
            self._early_s = min(_RELAX * self._early_s + _GAP_PART * paused_s, _MOST_EARLY_S)
        late_s = table.finish(tick, ended_s)
        self._times.counts[bisect_left(TICK_BOUNDS_S, made.took_s)] += 1
        self._times.sum_s += made.took_s
        counts = len(tick.lanes), tick.new_lanes, sum(piece.rows for piece in tick.pieces), len(self._streams)
        self.log.append((ended_s, made.took_s, *counts, *tick.bucket, float(late_s.max(initial=0.0))))
        if self.reference_model is not None:
            took_s, expected_s = made.took_s + paused_s, self.reference_model.predict(*size)
            self.admission.tick(ended_s, took_s, expected_s, int((late_s > 0).sum()), len(tick.lanes))
        self._give(running, made, late_s, ended_s)
        self._delivery_s = max(_RELAX * self._delivery_s, time.perf_counter() - ended_s)
        if self._pages is None:
            return
        for slot, segment in running.lanes[: tick.new_lanes]:  # their prompts are complete: others may share prefixes
            key, rows = segment.prompt.prefix_key, segment.prompt.prefix_rows
            if key is None or rows < PAGE_ROWS:  # one that fills no page is cheaper to compute than to keep
                continue
            if segment.stream.segment is segment and not self._pages.find(key):
                self._pages.keep(slot, key, rows)

    def _give(self, running: Running, made: Made, late_s: np.ndarray, ended_s: float) -> None:
        table, pcm16 = self._table, None
        if made.pcm is not None and any(segment.stream.plan.paced for _, segment in running.lanes):
            pcm16 = rows_to_pcm16(made.pcm)  # most listeners take 16 bits: converted here for all of them at once
        predictor_ms = 1e3 * made.predictor_s
        talker_ms = 1e3 * made.took_s / max(len(running.lanes), 1) - predictor_ms
        ahead = self.lanes.alone and self.lanes.decodes_beside
        for index, (slot, segment) in enumerate(running.lanes):
            stream, chunker, ended = segment.stream, segment.stream.chunker, bool(made.ended[index])
            if not stream.open:
                continue
            if stream.segment is not segment or ended:
                table.frames_made[slot] -= 1  # counted at the launch, but not made
            if stream.segment is not segment:
                continue  # the speech had ended when this was launched
            if not ended and made.codes[index, 0] < 0:
                stream.fail(no_number())
                continue
            stream.late_s += float(late_s[index])
            chunker.talker_ms += talker_ms
            chunker.predictor_ms += predictor_ms
            # A copy: the stream's codes may be kept for long, and should not keep the whole tick's.
            codes = None if ended else made.codes[index].copy()
            pcm = None
            if made.pcm is not None and not ended:  # not `copy`: numpy would release the interpreter's lock for it
                pcm = bytearray(made.pcm[index]), None if pcm16 is None else pcm16[index]
            before = stream.made_frames
            try:
                stream.add_frame(codes, pcm, ahead and before > 0)
            except BaseException as error:  # any error ends this stream alone; the worker and the others go on
                stream.fail(error)
            if not stream.open:
                continue
            if stream.made_frames != before or not before:
                table.chunk_start[slot] = stream.made_frames
                table.chunk_end[slot] = stream.made_frames + chunker.pending_frames + chunker.missing_frames
            if ended:
                if self._pages is not None:
                    self._pages.close(slot)
                table.text_known[slot] = False
                self._waiting[slot] = None
                self._resume(slot, ended_s)
