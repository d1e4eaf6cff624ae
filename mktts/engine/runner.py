"""Makes the streams of one set of lanes: admission, slots, ticks by the scheduler, and what each tick gave.

Where the lanes work beside the host, tick t + 1 is planned while tick t runs, as late as possible, so that streams that
arrive meanwhile are in it; it is launched before t is read, so that the device has no pause. What t then says can make
a lane of t + 1 useless (the speech had ended): it is dropped."""

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
_EARLY_S = 2e-3  # until some ran
# A gap on the device says that a tick was planned too late: the next is planned earlier by this part of the gap. Where
# there is none, it is planned a little later every time, until there is one: about a twentieth of that lead in the end.
_GAP_PART = 0.6
_RELAX = 0.97
_MOST_EARLY_S = 0.05


class TickTimes:
    """How long ticks took, all since the beginning: counts (of TICK_BOUNDS_S and of what is longer), and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TICK_BOUNDS_S) + 1)
        self.sum_s = 0.0


class EngineStats(NamedTuple):
    """The state of one set of lanes at the moment.

    listeners: streams that need frames in time. waiting: streams that wait for admission. lanes, lanes_used: slots for
    streams, whether frames are made for them now or not. pages, pages_free: of keys and values, 0 where streams bring
    their own."""

    listeners: int
    waiting: int
    lanes: int
    lanes_used: int
    pages: int
    pages_free: int
    ticks: TickTimes


class Running(NamedTuple):
    """A launched tick. lanes: slots and segments. streams: with a lane or a piece of a prompt in it. ends_s: as
    predicted where it runs beside the host. follows: the one before it still ran."""

    tick: Tick
    lanes: list[tuple[int, Segment]]
    streams: list[Utterance]
    launched: Any
    ends_s: float
    follows: bool


# Streams that arrive while others play are admitted beside the tick that runs. Where many arrive at once the next tick
# waits for as many as it can take along: those that play are ahead, and one more tick costs the host what several
# arrivals do.
_LATE_S = 12e-3
_STARTING_S = 3e-3  # where no tick runs yet


class Runner:
    """Makes streams on `lanes`, tick by tick. The engine's worker thread owns it; what is said to be read from any
    thread may be. An error of one stream is that stream's alone."""

    def __init__(
        self,
        lanes: Lanes,
        prompts: PromptBuilder,
        admission: Admission,
        build: Callable[[Request], Any] | None = None,
        open_prompt: Callable[[Request], Any] | None = None,
    ) -> None:
        """build, open_prompt: make prompts of checked requests, whole and fed ones; None: as the builder has them."""
        self.lanes, self.prompts, self.admission = lanes, prompts, admission
        self.log: deque[tuple[Any, ...]] = deque(maxlen=100_000)  # of the newest ticks, as TICKS
        self.build = build or prompts.of_checked
        self.open_prompt = open_prompt or partial(FedPrompt, prompts)
        self.name: EngineName = "single" if lanes.settings.max_lanes == 1 else "batch"
        self._pages, self._settings = lanes.pages, lanes.settings
        self._times = TickTimes()
        # What ticks take on the device, learnt; and with the pause before each: a host may be slower than its device.
        learns = TickFit if lanes.settings.max_lanes > 1 else MeanTick
        self.ticks, self.steps = learns(lanes.model), learns(lanes.model)
        self._early_s = _EARLY_S  # before the tick that runs ends, when the next one is planned
        self._give_s = 0.0  # from the end of a tick until the last of its frames is with its reader
        self.reference_model: TickModel | None = None  # of the measured capacity: what ticks are expected to take
        self._table = StreamTable(lanes.slots)
        admission.listeners.append(self._table.listening)
        self._reset()

    def _reset(self) -> None:
        self._table.open[:] = False
        self._queue = AdmissionQueue(self.admission, self._table, self._pages, self._settings)
        self.free_slots = list(range(self.lanes.slots - 1, -1, -1))
        self.open_streams: dict[Utterance, int | None] = {}  # that are not over, with their slots; None: not admitted
        # An open stream is in one of these, and waits             until
        self._arrived: deque[Utterance] = deque()  # for a look,     this turn or the next
        self._textless: set[Utterance] = set()  # for its first text, an update
        # `_queue`                                  for a place,     one is free, or `AdmissionQueue.pop` refuses it
        self._awake: dict[int, Utterance] = {}  # for frames,        the scheduler takes it; its reader takes a chunk
        self._asleep: dict[Utterance, int] = {}  # for more text,    an update
        self._streams: dict[int, Utterance] = {}  # those of the last two, by slot
        self._waiting: dict[int, None] = {}  # slots awake whose next input is not known, in the order of their waits
        self._running: deque[Running] = deque()  # two at most, and one between two turns
        self._lately_read: deque[Utterance] = deque()  # whose readers took a chunk since the last tick; they append
        self._cancelled: set[Utterance] = set()  # since the last tick, of those that were looked at
        self._freed = False  # a stream has ended, or is not read any more, since the queue was looked at

    @property
    def stats(self) -> EngineStats:
        """Any thread."""
        admitted = len(self._streams)
        waiting = max(0, len(self.open_streams) - admitted)
        pages = (0, 0) if self._pages is None else (self._pages.all, self._pages.free)
        listeners = self._table.listening(time.perf_counter())
        return EngineStats(listeners, waiting, self.lanes.slots, admitted, *pages, self._times)

    def forget(self, voice: Voice) -> None:
        """Lets go of what is kept for prompts with this voice; streams that are open go on."""
        self.prompts.forget(voice)
        if self._pages is not None:
            self._pages.forget(lambda key: is_of_voice(key, voice))
        self.lanes.forget(voice)

    def update(self, stream: Utterance) -> None:
        """Takes note of a stream that is new or cancelled, has more text, or whose full buffer was read from; it may be
        over. A stream that waits is not looked at before."""
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
            self._lately_read.append(stream)  # what it took while it slept was not looked at

    def turn(self, now_s: float) -> float:
        """Does what is due: a tick, at most. Returns when it wants its next turn if nothing happens outside:
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
            self._freed = True  # those behind them may come in
        self._update_readers(now_s)
        self._queue.reserved_pages = 0
        for slot in list(self._waiting):
            self._resume(slot, now_s)
        begins_s = now_s if running is None else max(now_s, running.ends_s)
        # Chosen by what a step takes, the host's pause included, for when its frames are with their readers.
        tick = next_tick(table, begins_s + self._give_s, self.steps.model, self._settings)
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
            for slot in table.able().tolist():  # they are ahead, and what their readers take is an update
                self._streams[slot].watched = True
            if self._lately_read:  # one has come
                return float("-inf")
            return min(tick.wake_s - self._give_s, self._queue.wake_s(now_s))
        return float("-inf")

    def fail_all(self, error: BaseException) -> None:
        """`turn` has raised `error`: every stream ends with an EngineError, those that come later are served."""
        why = f"the engine failed while this stream was open: {type(error).__name__}: {error}"
        self._end_all(lambda stream: stream.fail(EngineError(why)))  # raising writes into it: each has its own
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
        """Looks at streams that arrived, until then, or a little longer; at one always where none is open."""
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
                    raise self._refusal(reason)  # before a prompt is built for nothing: forty may come at once
                elif stream.next_segment(self.lanes.positions):
                    arrival = self._arrival(stream)
                    reason = queue.submit(arrival, self.steps.model, now_s)
                    if reason is not None:
                        self._begin(arrival, reason, now_s)
                elif stream.has_rest:
                    stream.flush()  # it ended without a word
            except Exception as error:
                stream.fail(error)
            textless = stream.open and stream.segment is None
            stream.set_idle(textless)
            if textless:
                self._textless.add(stream)

    def _arrival(self, stream: Utterance) -> Arrival:
        """Raises CapacityError for a segment whose keys and values could never have their place."""
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
        """The segment of a stream that was admitted gets its memory; a stream that is refused for `reason` ends."""
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
            if stream.begins_anew:  # the listener gets all that was said before the segment, and the pause
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
        """What readers of awake streams have taken, and whose buffer is full."""
        table, awake, read = self._table, self._awake.items(), self._lately_read
        slots = {self.open_streams.get(read.popleft()) for _ in range(len(read))}
        if len(awake) > 1:  # only those of which something is new, and those whose buffers may be full
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
            # A frame on its way may complete a chunk that fills the buffer: it is waited for.
            full = (at_limit and stream.unread) or (
                (at_limit or stream.watched) and stream.full(frames - stream.made_frames)
            )
            self._freed |= full and not table.full[slot]  # it may be no listener any more
            table.full[slot] = full
            stream.set_idle(full)

    def _resume(self, slot: int, now_s: float) -> None:
        """Lets a stream go on that waited for text, or for memory between two segments, if they have come."""
        stream, queue, pages, known = self._streams[slot], self._queue, self._pages, False
        try:
            if stream.segment is not None and stream.segment.begun:
                stream.script.update()
                stream.segment.row = stream.segment.prompt.row(stream.segment.launched - 1)
                known = stream.segment.row is not None
            elif stream.next_segment(self.lanes.positions):  # it precedes streams that arrive
                arrival = self._arrival(stream)
                known = pages is None or pages.fits(arrival.max_rows, arrival.key, queue.reserved_pages)
                if known:
                    self._begin(arrival, "", now_s)
                elif queue.held(now_s):
                    raise self._refusal("held")
                else:
                    queue.reserved_pages += pages.count(arrival.max_rows)
            if known:
                self._waiting.pop(slot, None)  # not there where it could not begin
                self._table.text(slot, True, now_s)
                return
            if stream.has_rest and not stream.unread:
                self._flush(slot, stream, now_s)  # nothing comes for now: the listener gets what there is
            if stream.open and not stream.unread and (stream.segment is None or stream.segment.begun):
                stream.set_idle(True)  # without a frame on its way, nor memory to wait for
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
            if segment.launched >= segment.max_frames:  # as far as is known before that is read
                table.text_known[slot] = False
            elif segment.row is None:
                table.text(slot, False, now_s)
                self._waiting[slot] = None

    def _fail_tick(self, streams: Sequence[Utterance], error: Exception) -> None:
        """Their tick has failed. Each gets an error of its own: where it is raised is noted in it."""
        for stream in streams:
            mine = EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}")
            stream.fail(error if self._settings.max_lanes == 1 else mine)

    def _read(self) -> None:
        """Waits for the oldest tick, and gives its frames to their streams."""
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
        self._give_s = max(_RELAX * self._give_s, time.perf_counter() - ended_s)
        if self._pages is None:
            return
        for slot, segment in running.lanes[: tick.new_lanes]:  # whose prompts have entered: others may share prefixes
            key, rows = segment.prompt.prefix_key, segment.prompt.prefix_rows
            if key is None or rows < PAGE_ROWS:  # one that fills no page is computed sooner than it is kept
                continue
            if segment.stream.segment is segment and not self._pages.find(key):
                self._pages.keep(slot, key, rows)

    def _give(self, running: Running, made: Made, late_s: np.ndarray, ended_s: float) -> None:
        table, pcm16 = self._table, None
        if made.pcm is not None and any(segment.stream.plan.paced for _, segment in running.lanes):
            pcm16 = rows_to_pcm16(made.pcm)  # listeners take 16 bits mostly: made here for all at once
        predictor_ms = 1e3 * made.predictor_s
        talker_ms = 1e3 * made.took_s / max(len(running.lanes), 1) - predictor_ms
        ahead = self.lanes.alone and self.lanes.decodes_beside
        for index, (slot, segment) in enumerate(running.lanes):
            stream, chunker, ended = segment.stream, segment.stream.chunker, bool(made.ended[index])
            if not stream.open:
                continue
            if stream.segment is not segment or ended:
                table.frames_made[slot] -= 1  # nothing came of it
            if stream.segment is not segment:
                continue  # the speech had ended when this was launched
            if not ended and made.codes[index, 0] < 0:
                stream.fail(no_number())
                continue
            stream.late_s += float(late_s[index])
            chunker.talker_ms += talker_ms
            chunker.predictor_ms += predictor_ms
            # A copy of its own: the stream's codes may be kept for long, and should not keep the whole tick's.
            codes = None if ended else made.codes[index].copy()
            pcm = None
            if made.pcm is not None and not ended:  # not `copy`, for which numpy would release the interpreter's lock
                pcm = bytearray(made.pcm[index]), None if pcm16 is None else pcm16[index]
            before = stream.made_frames
            try:
                stream.add_frame(codes, pcm, ahead and before > 0)
            except BaseException as error:  # whatever it is belongs to this stream; the worker and the others go on
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
