"""The executor that makes many streams at once: admission, slots, ticks by the scheduler, and what each tick gave.

Where the lanes work beside the host, tick t + 1 is planned while tick t runs, as late as possible, so that who arrives
meanwhile is in it; it is launched before t is read, so that the device has no pause. What t then says can make a lane
of t + 1 useless (the speech had ended): it is dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mktts.audio import rows_to_pcm16
from mktts.batch.admission import AdmissionSettings, Arrival, Door, Verdict, refusal, too_long
from mktts.batch.board import Board
from mktts.batch.lanes import Made
from mktts.batch.model import LaneModel, LaneUtterance
from mktts.batch.pages import kept_under
from mktts.batch.scheduler import next_tick
from mktts.batch.tick import Tick, TickFit, TickLog, TickModel
from mktts.errors import EngineError
from mktts.model.backend import no_number
from mktts.speech.executor import Standing, TickTimes, Wishes, abandoned
from mktts.speech.job import EngineName, Job

_EARLY_S = 2e-3  # until some ran
# A gap on the device says that a tick was planned too late: the next is planned earlier by this part of the gap. Where
# there is none, it is planned a little later every time, until there is one: about a twentieth of that lead in the end.
_GAP_PART = 0.6
_RELAX = 0.97
_MOST_EARLY_S = 0.05


class TickPace:
    """model: what a tick takes on the device. step_model: with the pause before it, where there is one: a host may be
    slower than its device. early_s: before the tick that runs ends, when the next one is planned."""

    def __init__(self, believed: TickModel) -> None:
        """believed: what a tick takes, before any was seen."""
        self._device, self._steps = TickFit(believed), TickFit(believed)
        self.model = self.step_model = believed
        self.early_s = _EARLY_S

    def observe(self, tick: Tick, made: Made, follows: bool) -> None:
        """A tick was read. follows: it was launched while the one before it ran."""
        paused_s = made.idle_s if follows else 0.0
        self.model = self._device.observe(*tick.bucket, tick.context_rows, made.took_s)
        self.step_model = self._steps.observe(*tick.bucket, tick.context_rows, made.took_s + paused_s)
        if follows:
            self.early_s = min(_RELAX * self.early_s + _GAP_PART * paused_s, _MOST_EARLY_S)


class TickLane(NamedTuple):
    """Who had a lane in a tick."""

    slot: int
    job: Job
    work: LaneUtterance
    segment: int


@dataclass
class Running:
    """A launched tick. jobs: with a lane or a piece of a prompt in it. ends_s: as predicted. follows: the one before it
    still ran."""

    tick: Tick
    lanes: list[TickLane]
    jobs: list[Job]
    launched: Any
    ends_s: float
    follows: bool


def fail_all(jobs: Sequence[Job], error: Exception) -> None:
    """Their tick has failed. Each gets an error of its own: where it is raised is noted in it."""
    for job in jobs:
        job.fail(EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}"))


# Who comes while others play is admitted beside the tick that runs. Where many come at once the next tick waits for as
# many as it can take along: those who play are ahead, and one more tick costs the host what several arrivals do.
_LATE_S = 12e-3
_STARTING_S = 3e-3  # where no tick runs yet


class Together:
    """See the module, and `mktts.speech.executor.Executor`."""

    name: EngineName = "batch"

    def __init__(self, model: LaneModel, admission: AdmissionSettings) -> None:
        self.model, self.log = model, TickLog()
        lanes = model.lanes
        self._lanes, self._pages, self._settings = lanes, lanes.pages, lanes.settings
        self._admission = admission
        self._ticks = TickTimes()
        self._elsewhere: Callable[[], int] = lambda: 0
        self._pace = TickPace(lanes.model)
        self._reset()

    def _reset(self) -> None:
        """Nothing is open."""
        self._board = Board(self._lanes.slots)
        self._door = Door(self._board, self._pages, self._settings, self._admission)
        self._door.elsewhere = self._elsewhere
        self._free = list(range(self._lanes.slots - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # by slot
        self._arrived: deque[Job] = deque()  # not looked at yet
        self._outside: set[Job] = set()  # not admitted: their text has not come
        self._in_line: set[Job] = set()
        self._awake: dict[int, Job] = {}  # those of `_jobs` that are looked at before every tick
        self._asleep: dict[Job, int] = {}  # the others, with their slots: they wait for text, and news of it
        self._waiting: dict[int, None] = {}  # slots awake whose next input is not known, in the order of their waits
        self._running: deque[Running] = deque()  # two at most, and one between two turns
        self._room = False  # somebody has left, or reads no more, since the line was looked at

    @property
    def open_jobs(self) -> int:
        return len(self._jobs) + len(self._arrived) + len(self._outside) + len(self._in_line)

    @property
    def listeners(self) -> int:
        return self._door.listeners(time.perf_counter())

    @property
    def carries(self) -> int:
        return self._door.carries(self._pace.step_model)

    @property
    def standing(self) -> Standing:
        pages, line = self._pages, self._door.line
        lanes = self._lanes.slots, len(self._jobs)
        return Standing(self.carries, self.listeners, line, *lanes, pages.all, pages.free, self._ticks)

    def admit(self, wishes: Wishes) -> None:
        self._admission = self._door.settings = self._admission.wished(wishes)

    def beside(self, elsewhere: Callable[[], int]) -> None:
        self._elsewhere = self._door.elsewhere = elsewhere

    def take(self, job: Job) -> None:
        self._arrived.append(job)

    def hear(self, job: Job) -> None:
        if job in self._outside:
            self._outside.discard(job)
            self._arrived.append(job)
        elif (slot := self._asleep.pop(job, None)) is not None:
            job.rest(False)
            self._board.resumed[slot] = True
            self._awake[slot] = job
            self._waiting[slot] = None

    def turn(self, now_s: float, alone: bool) -> float:
        running = self._running[0] if self._running else None
        plan_s = now_s if running is None else running.ends_s - self._pace.early_s
        self._admit(now_s, now_s + _STARTING_S if running is None else plan_s)
        if now_s < plan_s:
            return float("-inf") if self._arrived else plan_s
        self._look_round(now_s)
        begins_s = now_s if running is None else max(now_s, running.ends_s)
        tick = next_tick(self._board, begins_s, self._pace.model, self._settings)
        self._door.planned(tick)
        if not tick.empty:
            self._launch(tick, now_s, begins_s)
        if self._running:
            self._door.works()
        else:
            self._door.rests(now_s)
        if running is not None:
            self._let_in(now_s, running.ends_s)
            self._read()
        if self._running and self._lanes.overlaps:
            return float("-inf") if self._arrived else self._running[0].ends_s - self._pace.early_s
        if self._running:
            self._read()
        elif tick.empty and running is None and not self._room and not self._arrived:
            return self._pause(tick, now_s)
        return float("-inf")

    def abandon(self, error: BaseException) -> None:
        self._end_all(lambda job: job.fail(abandoned(error)))
        for slot in filter(self._pages.is_open, range(self._lanes.slots)):
            self._pages.close(slot)
        self._reset()  # whatever was wrong in the books, empty ones are right

    def close(self) -> None:
        self._end_all(lambda job: (job.cancel(), job.end(None)))

    def _end_all(self, end: Callable[[Job], None]) -> None:
        """Ends every stream, whatever the lanes or the books still say to it."""
        while self._running:
            with contextlib.suppress(Exception):
                self._lanes.collect(self._running.popleft().launched)
        for job in (*self._jobs.values(), *self._arrived, *self._outside, *self._in_line):
            with contextlib.suppress(Exception):
                end(job)

    def _pause(self, tick: Tick, now_s: float) -> float:
        """Until when nothing is to be done without news; -inf where some has come."""
        for slot in self._board.able().tolist():  # they are ahead, and what their readers take is news
            if self._jobs[slot].watch() != self._board.frames_taken[slot]:
                return float("-inf")
        return min(tick.wake_s, self._door.patience_s(now_s))

    # ---- who comes in

    def _admit(self, now_s: float, until_s: float) -> None:
        """Those who arrived, as far as there is time, and those in line."""
        self._let_in(now_s, until_s)
        self._room = False
        while self._in_line and (left := self._door.next(now_s, self._pace.step_model)) is not None:
            self._in_line.discard(left[0].name)
            self._judged(*left, now_s)

    def _let_in(self, now_s: float, until_s: float) -> None:
        """Judges those who arrived, until then, or a little longer; the first one always where nobody is open."""
        board, most_rows = self._board, self._settings.max_rows
        while self._arrived:
            late_s = time.perf_counter() - max(until_s, now_s) if self._jobs else -1.0
            if late_s >= _LATE_S or (late_s >= 0 and board.prompt_rows[board.open].sum() >= most_rows):
                return
            job = self._arrived.popleft()
            settled = self._settled(job, now_s)
            job.rest(not settled)
            if not settled:
                self._outside.add(job)

    def _settled(self, job: Job, now_s: float) -> bool:
        """Whether a new stream is over, or its text has come and it was judged."""
        work = job.work
        try:
            if job.runnable() and not work.next_segment():
                job.advance(LaneUtterance.flush)  # it ended without a word
            if job.open and work.segment is not None:
                request = self._request(job, now_s)
                self._judged(request, self._door.ask(request, self._pace.step_model), now_s)
                return True
        except Exception as error:
            job.fail(error)
        return not job.open

    def _request(self, job: Job, now_s: float) -> Arrival:
        segment = job.work.segment
        rows, key = len(segment.prompt.embeds), kept_under(segment.prompt)
        computed = rows - self._pages.find(key)
        return Arrival(now_s, computed, rows + segment.max_frames, job.paced, key, job)

    def _judged(self, request: Arrival, verdict: Verdict, now_s: float) -> None:
        job: Job = request.name
        if not job.open or job.cancelled:
            job.end(None)
        elif verdict.decision == "admit":
            slot = self._free.pop()
            self._jobs[slot] = self._awake[slot] = job
            job.work.on_close = partial(self._leave, slot)
            self._board.enter(slot, request.arrived_s, job.paced)
            try:
                self._lanes.enter(slot, job.work.reference)
                self._begin(slot, now_s)
            except Exception as error:
                job.fail(error)
        elif verdict.decision == "queue":
            self._in_line.add(job)
        else:
            job.fail(refusal(verdict.reason, request, self._pages, len(self._jobs), self.carries))

    def _begin(self, slot: int, now_s: float) -> None:
        """The segment of the stream in `slot` gets its pages, and its prompt waits to enter."""
        segment = self._jobs[slot].work.segment
        prompt = segment.prompt
        embeds = prompt.embeds
        kept, copies = self._pages.open(slot, len(embeds) + segment.max_frames, kept_under(prompt))
        self._lanes.begin(slot, embeds, segment.sampling, segment.seed, copies)
        self._board.prompt(slot, len(embeds) - kept, kept)
        self._board.text(slot, True, now_s)

    def _leave(self, slot: int) -> None:
        """The stream in `slot` is over."""
        self._lanes.leave(slot)
        self._asleep.pop(self._jobs.pop(slot), None)
        self._awake.pop(slot, None)
        self._waiting.pop(slot, None)
        self._board.leave(slot)
        if self._pages.is_open(slot):
            self._pages.close(slot)
        self._free.append(slot)
        self._room = True

    def _look_round(self, now_s: float) -> None:
        """What consumers and writers did since the last tick."""
        for job in [job for job in self._in_line if job.cancelled]:
            self._in_line.discard(job)
            self._door.give_up(job)
            self._room = True  # those behind it may come in
            job.end(None)
        for job in [job for job in self._awake.values() if job.cancelled]:
            job.end(None)
        self._look_at_readers(now_s)
        self._door.reserved_pages = 0
        for slot in list(self._waiting):
            self._resume(slot, now_s)

    def _look_at_readers(self, now_s: float) -> None:
        """What those of `_awake` have taken, and whose buffer is full: a loop only over those of whom there is news."""
        board, jobs = self._board, list(self._awake.values())
        slots = np.fromiter(self._awake, np.int64, len(jobs))
        taken = np.array([job.taken_frames for job in jobs], np.int64)
        watched = np.array([job.watched for job in jobs], bool)
        frames = board.frames_made[slots]
        crowded = frames - taken >= np.array([job.buffer_frames for job in jobs], np.int64)
        for index in np.flatnonzero(crowded | watched | board.full[slots]).tolist():
            slot, job = int(slots[index]), jobs[index]
            # A frame on its way may complete a chunk that fills the buffer: it is waited for.
            read = crowded[index] or watched[index]
            full = bool((crowded[index] and job.work.unread) or (read and job.full(frames[index] - job.made_frames)))
            self._room |= full and not board.full[slot]  # it may count no more
            board.full[slot] = full
            job.rest(full)
        board.read(slots, taken, now_s)

    def _resume(self, slot: int, now_s: float) -> None:
        """Lets a stream go on that waited for text, or for pages between two segments, if they have come."""
        job = self._jobs[slot]
        work: LaneUtterance = job.work
        try:
            if self._pages.is_open(slot):
                if work.input_known():
                    del self._waiting[slot]
                    self._board.text(slot, True, now_s)
                    return
            elif work.next_segment() and self._goes_on(slot, now_s):
                return
            if work.ready() and not work.unread:
                job.advance(LaneUtterance.flush)  # nothing comes for now: the listener gets what there is
                if job.open:
                    self._board.chunk(slot, job.made_frames, job.made_frames + work.next_chunk_frames)
            if job.open and not work.unread and (work.segment is None or self._pages.is_open(slot)):
                job.rest(True)  # without a frame on its way, nor pages to wait for
                self._asleep[job] = slot
                del self._awake[slot], self._waiting[slot]
        except Exception as error:
            job.fail(error)

    def _goes_on(self, slot: int, now_s: float) -> bool:
        """Begins the next segment of the stream in `slot` if its pages are there; it stands before who comes in."""
        door, pages = self._door, self._pages
        request = self._request(self._jobs[slot], now_s)
        if request.max_rows > pages.rows_per_slot:
            raise too_long(request, pages)
        if not pages.fits(request.max_rows, request.key, door.reserved_pages):
            if door.held(now_s):
                raise refusal("held", request, pages, len(self._jobs), self.carries)
            door.reserved_pages += pages.count(request.max_rows)
            return False
        del self._waiting[slot]
        self._begin(slot, now_s)
        return True

    def _launch(self, tick: Tick, now_s: float, begins_s: float) -> None:
        board = self._board
        lanes, rows = [], []
        for slot in tick.lanes.tolist():
            job = self._jobs[slot]
            work: LaneUtterance = job.work
            lanes.append(TickLane(slot, job, work, work.number))
            rows.append(work.row)
        jobs = [*(lane.job for lane in lanes), *(self._jobs[piece.slot] for piece in tick.pieces if not piece.last)]
        try:
            launched = self._lanes.launch(tick, rows)
        except Exception as error:
            fail_all(jobs, error)
            return
        follows = bool(self._running)
        running = Running(tick, lanes, jobs, launched, begins_s + tick.predicted_s, follows)
        self._running.append(running)
        board.begin(tick)
        for slot, _, work, _ in lanes:
            work.went()
            if not work.may_go_on:
                board.text_known[slot] = False
            elif work.row is None:
                board.text(slot, False, now_s)
                self._waiting[slot] = None

    def _read(self) -> None:
        """Waits for the oldest tick, and gives its frames to their streams."""
        running = self._running.popleft()
        try:
            made = self._lanes.collect(running.launched)
        except Exception as error:
            fail_all(running.jobs, error)
            return
        ended_s = time.perf_counter()
        tick, board = running.tick, self._board
        self._pace.observe(tick, made, running.follows)
        late_s = board.finish(tick, ended_s)
        self._ticks.add(made.took_s)
        self.log.add(tick, made.took_s, ended_s, len(self._jobs), float(late_s.max(initial=0.0)))
        tick_ms = 1e3 * made.took_s / max(len(running.lanes), 1)
        self._give(running.lanes, made, tick_ms, ended_s)
        for lane in running.lanes[: tick.new_lanes]:
            if lane.job.open and lane.work.number == lane.segment and lane.work.segment is not None:
                self._keep_prefix(lane.slot, lane.work.segment.prompt)

    def _give(self, lanes: Sequence[TickLane], made: Made, tick_ms: float, ended_s: float) -> None:
        board = self._board
        # Who listens takes 16 bits mostly: made here for all at once. Files are written by others.
        pcm16 = rows_to_pcm16(made.pcm) if any(lane.job.paced for lane in lanes) else [None] * len(lanes)
        for index, (slot, job, work, segment) in enumerate(lanes):
            if not job.open:
                continue
            ended = bool(made.ended[index])
            if work.number != segment or work.segment is None or ended:
                board.frames_made[slot] -= 1  # nothing came of it
            if work.number != segment or work.segment is None:
                continue  # the speech had ended when this was launched
            if not ended and made.codes[index, 0] < 0:
                job.fail(no_number())
                continue
            # A copy of its own: the stream's codes may be kept for long, and should not keep the whole tick's.
            frame = None if ended else made.codes[index].copy()
            before = job.made_frames
            samples = made.pcm[index]
            job.advance(partial(LaneUtterance.made, codes=frame, pcm=samples, tick_ms=tick_ms, pcm16=pcm16[index]))
            if not job.open:
                continue
            if job.made_frames != before or not before:
                board.chunk(slot, job.made_frames, job.made_frames + work.next_chunk_frames)
            if ended:
                self._pages.close(slot)
                board.text_known[slot] = False
                self._waiting[slot] = None
                self._resume(slot, ended_s)

    def _keep_prefix(self, slot: int, prompt: Any) -> None:
        """The prompt in `slot` has entered: its prefix is kept for others, where it fills a page at least."""
        key = kept_under(prompt)
        if key is not None and not self._pages.find(key):
            self._lanes.copy(self._pages.keep(slot, key, prompt.prefix_rows) or ())
