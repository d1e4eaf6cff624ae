"""The executor that makes many streams at once: admission, slots, ticks by the scheduler, and what each tick gave.

Where the lanes work beside the host, tick t + 1 is planned while tick t runs, as late as possible, so that who arrives
meanwhile is in it; it is launched before t is read, so that the device has no pause. What t then says can make a lane
of t + 1 useless (the speech had ended): it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mktts.batch.admission import AdmissionSettings, Door, Request, Verdict
from mktts.batch.board import Board
from mktts.batch.lanes import Made
from mktts.batch.log import TickLog
from mktts.batch.model import LaneModel
from mktts.batch.pages import PAGE_ROWS
from mktts.batch.refusal import refusal
from mktts.batch.scheduler import next_tick
from mktts.batch.tick import Tick
from mktts.batch.tick_model import TickFit
from mktts.batch.utterance import LaneUtterance
from mktts.errors import CapacityError, EngineError
from mktts.speech.job import EngineName, Job

_LINE_WAIT_S = 2e-3  # between two looks at a line that nothing else moves on
_HOST_S = 1.0e-3  # of planning and launching a tick, until some were timed
_SMOOTHING = 0.1  # of that time: the newest tick's weight


class _Lane(NamedTuple):
    """Who had a lane in a tick."""

    slot: int
    job: Job
    work: LaneUtterance
    segment: int


@dataclass
class _Running:
    """A launched tick. ends_s: as predicted."""

    tick: Tick
    lanes: list[_Lane]
    launched: Any
    ends_s: float


class Together:
    """See the module, and `mktts.speech.executor.Executor`."""

    name: EngineName = "batch"

    def __init__(self, model: LaneModel, admission: AdmissionSettings, log: TickLog | None = None) -> None:
        """log: where the ticks are noted."""
        self.model, self.log = model, log
        lanes = model.lanes
        self._lanes, self._pages, self._settings = lanes, lanes.pages, lanes.settings
        self._board = Board(lanes.slots)
        self._door = Door(self._board, lanes.pages, lanes.settings, admission)
        self._fit = TickFit(lanes.model)
        self._free = list(range(lanes.slots - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # by slot
        self._outside: list[Job] = []  # not admitted: their text has not come
        self._in_line: set[Job] = set()
        self._waiting: set[int] = set()  # slots whose next input is not known
        self._running: _Running | None = None
        self._host_s = _HOST_S

    @property
    def open_jobs(self) -> int:
        """See Executor."""
        return len(self._jobs) + len(self._outside) + len(self._in_line)

    def take(self, job: Job) -> None:
        """See Executor."""
        self._outside.append(job)

    def turn(self, now_s: float, alone: bool) -> float:
        """See Executor."""
        self._admit(now_s)
        running = self._running
        if running is not None and now_s < (plan_s := running.ends_s - self._host_s):
            return plan_s
        self._look_round(now_s)
        begins_s = now_s if running is None else max(now_s, running.ends_s)
        tick = next_tick(self._board, begins_s, self._fit.model, self._settings)
        self._running = None if tick.empty else self._launch(tick, now_s, begins_s)
        if running is not None:
            self._read(running)
        if self._running is not None:
            if not self._lanes.overlaps:
                running, self._running = self._running, None
                self._read(running)
                return float("-inf")
            return self._running.ends_s - self._host_s
        if running is not None:
            return float("-inf")
        return min(tick.wake_s, now_s + _LINE_WAIT_S if self._in_line else tick.wake_s)

    def close(self) -> None:
        """See Executor."""
        if self._running is not None:
            self._lanes.collect(self._running.launched)
        for job in (*self._jobs.values(), *self._outside, *self._in_line):
            job.cancel()
            job.end(None)

    # ---- who comes in

    def _admit(self, now_s: float) -> None:
        for job in self._outside[:]:
            work = job.work
            try:
                if job.runnable() and not work.next_segment():
                    job.advance(LaneUtterance.flush)  # it ended without a word
                if not job.open:
                    self._outside.remove(job)
                elif work.segment is not None:
                    self._outside.remove(job)
                    request = self._request(job, now_s)
                    self._judged(request, self._door.ask(request, self._fit.model), now_s)
            except Exception as error:
                self._outside.remove(job)
                job.fail(error)
        while self._in_line and (left := self._door.next(now_s, self._fit.model)) is not None:
            self._in_line.discard(left[0].name)
            self._judged(*left, now_s)

    def _request(self, job: Job, now_s: float) -> Request:
        segment = job.work.segment
        rows, key = len(segment.prompt.embeds), _key(segment.prompt)
        computed = rows - self._pages.find(key)
        return Request(now_s, computed, rows + segment.max_frames, job.paced, key, job)

    def _judged(self, request: Request, verdict: Verdict, now_s: float) -> None:
        job: Job = request.name
        if not job.open or job.cancelled:
            job.end(None)
        elif verdict.decision == "admit":
            slot = self._free.pop()
            self._jobs[slot] = job
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
            job.fail(CapacityError(refusal(verdict.reason, request, self._pages, len(self._jobs))))

    def _begin(self, slot: int, now_s: float) -> None:
        """The segment of the stream in `slot` gets its pages, and its prompt waits to enter."""
        segment = self._jobs[slot].work.segment
        prompt = segment.prompt
        embeds = prompt.embeds
        kept, copies = self._pages.open(slot, len(embeds) + segment.max_frames, _key(prompt))
        self._lanes.begin(slot, embeds, segment.sampling, segment.seed, copies)
        self._board.prompt(slot, len(embeds) - kept, kept)
        self._board.text(slot, True, now_s)

    def _leave(self, slot: int) -> None:
        """The stream in `slot` is over."""
        del self._jobs[slot]
        self._waiting.discard(slot)
        self._board.leave(slot)
        self._lanes.leave(slot)
        if self._pages.is_open(slot):
            self._pages.close(slot)
        self._free.append(slot)

    # ---- ticks

    def _look_round(self, now_s: float) -> None:
        """What consumers and writers did since the last tick."""
        board = self._board
        for job in [job for job in self._in_line if job.cancelled]:
            self._in_line.discard(job)
            self._door.give_up(job)
            job.end(None)
        for slot, job in list(self._jobs.items()):
            if job.cancelled:
                job.end(None)
            else:
                board.frames_taken[slot] = job.taken_frames
                pending = board.frames_made[slot] - job.made_frames
                board.full[slot] = pending >= job.buffer_frames - job.made_frames + job.taken_frames and job.full(
                    pending
                )
        for slot in list(self._waiting):
            self._resume(slot, now_s)

    def _resume(self, slot: int, now_s: float) -> None:
        """Lets a stream go on that waited for text, or for pages between two segments, if they have come."""
        job = self._jobs[slot]
        work: LaneUtterance = job.work
        try:
            if self._pages.is_open(slot):
                if work.input_known():
                    self._waiting.discard(slot)
                    self._board.text(slot, True, now_s)
                    return
            elif work.next_segment():
                request = self._request(job, now_s)
                if request.max_rows > self._pages.rows_per_slot:
                    raise CapacityError(refusal("too_long", request, self._pages, len(self._jobs)))
                if self._pages.fits(request.max_rows, request.key):
                    self._waiting.discard(slot)
                    self._begin(slot, now_s)
                return
            if work.ready() and not work.unread:
                job.advance(LaneUtterance.flush)  # the text has stopped for now: the listener gets what there is
        except Exception as error:
            job.fail(error)

    def _launch(self, tick: Tick, now_s: float, begins_s: float) -> _Running | None:
        board = self._board
        lanes, rows = [], []
        for slot in tick.lanes.tolist():
            job = self._jobs[slot]
            work: LaneUtterance = job.work
            lanes.append(_Lane(slot, job, work, work.number))
            rows.append(work.row)
        try:
            launched = self._lanes.launch(tick, rows)
        except Exception as error:
            for lane in lanes:
                lane.job.fail(EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}"))
            return None
        board.begin(tick)
        self._door.ticked(tick)
        for piece in tick.pieces:
            if piece.last:
                self._keep_prefix(piece.slot)
        for slot, _, work, _ in lanes:
            work.went()
            if not work.may_go_on:
                board.text_known[slot] = False
            elif work.row is None:
                board.text(slot, False, now_s)
                self._waiting.add(slot)
        self._host_s += _SMOOTHING * (time.perf_counter() - now_s - self._host_s)
        return _Running(tick, lanes, launched, begins_s + tick.predicted_s)

    def _keep_prefix(self, slot: int) -> None:
        """The prompt in `slot` has entered: its prefix is kept for others, where it fills a page at least."""
        prompt = self._jobs[slot].work.segment.prompt
        key = _key(prompt)
        if key is not None and not self._pages.find(key):
            self._lanes.copy(self._pages.keep(slot, key, prompt.prefix_rows) or ())

    def _read(self, running: _Running) -> None:
        """Waits for a tick, and gives its frames to their streams."""
        try:
            made = self._lanes.collect(running.launched)
        except Exception as error:
            for lane in running.lanes:
                lane.job.fail(EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}"))
            return
        ended_s = time.perf_counter()
        tick, board = running.tick, self._board
        self._fit.observe(*tick.bucket, tick.context_rows, made.took_s)
        late_s = board.finish(tick, ended_s)
        if self.log is not None:
            self.log.add(tick, made.took_s, ended_s, len(self._jobs), float(late_s.max(initial=0.0)))
        tick_ms = 1e3 * made.took_s / max(len(running.lanes), 1)
        self._give(running.lanes, made, tick_ms, ended_s)

    def _give(self, lanes: Sequence[_Lane], made: Made, tick_ms: float, ended_s: float) -> None:
        board = self._board
        codes = torch.from_numpy(made.codes.copy()).unbind(0)
        for index, (slot, job, work, segment) in enumerate(lanes):
            if not job.open:
                continue
            ended = bool(made.ended[index])
            if work.number != segment or work.segment is None or ended:
                board.frames_made[slot] -= 1  # nothing came of it
            if work.number != segment or work.segment is None:
                continue  # the speech had ended when this was launched
            if made.codes[index, 0] < 0:
                job.fail(EngineError("the model gave no number for this stream: its prompt or voice holds NaN"))
                continue
            frame: Tensor | None = None if ended else codes[index]
            job.advance(partial(LaneUtterance.made, codes=frame, pcm=made.pcm[index], tick_ms=tick_ms))
            if not job.open:
                continue
            board.chunk(slot, job.made_frames, job.made_frames + work.next_chunk_frames)
            if ended:
                self._pages.close(slot)
                board.text_known[slot] = False
                self._waiting.add(slot)
                self._resume(slot, ended_s)


def _key(prompt: Any) -> Any:
    """What the prompt's prefix is kept under; None where that saves less than it costs: less than a page."""
    return prompt.prefix_key if prompt.prefix_rows >= PAGE_ROWS else None
