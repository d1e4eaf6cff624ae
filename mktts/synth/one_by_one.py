"""The executor of a model that makes one frame of one stream a step: a tick has one lane."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

from mktts.batch.board import Board
from mktts.batch.scheduler import TickSettings, next_tick
from mktts.batch.tick_model import TickModel
from mktts.speech.executor import abandoned
from mktts.speech.job import EngineName, Job
from mktts.speech.options import Chunk

_SLOTS = 1_024  # streams that take turns; more wait for one of them to end
_TICKS = TickSettings.one()
_TICK_MODEL = TickModel(constant_s=1.0, lane_s=0.0, row_s=0.0, attention_s=0.0)  # nothing depends on it: one size


class OneByOne:
    """One stream a tick: new ones first, then who has least ahead of its listener. Each makes its own frame (`step`);
    a lone one may ask for several frames of one launch. One that waits for its text or its reader is not looked at
    before there is news of it."""

    name: EngineName = "single"

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Nothing is open."""
        self._board = Board(_SLOTS)
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # by slot, as the next
        self._awake: dict[int, Job] = {}
        self._asleep: dict[Job, int] = {}
        self._outside: deque[Job] = deque()

    @property
    def open_jobs(self) -> int:
        """See Executor."""
        return len(self._jobs) + len(self._outside)

    def take(self, job: Job) -> None:
        """See Executor."""
        self._outside.append(job)

    def hear(self, job: Job) -> None:
        """See Executor."""
        slot = self._asleep.pop(job, None)
        if slot is not None:
            job.rest(False)
            self._awake[slot] = job

    def turn(self, now_s: float, alone: bool) -> float:
        """See Executor."""
        while self._outside and self._free:
            self._enter(self._outside.popleft(), now_s)
        board = self._board
        for slot, job in list(self._awake.items()):
            board.text_known[slot] = runnable = job.runnable()
            board.frames_taken[slot] = job.taken_frames
            if not job.open:
                self._leave(slot)
            elif not runnable:
                job.rest(True)
                self._asleep[job] = slot
                del self._awake[slot]
        tick = next_tick(board, now_s, _TICK_MODEL, _TICKS)
        if tick.empty:
            return tick.wake_s
        slot = int(tick.lanes[0])
        job = self._jobs[slot]

        def step(work: Any) -> Chunk | None:
            work.alone = alone
            return work.step()

        board.begin(tick)
        job.advance(step)
        board.frames_made[slot] = len(job.codes)
        board.chunk(slot, job.made_frames, len(job.codes) + 1)  # its listener has what is in chunks
        board.finish(tick, time.perf_counter())
        if not job.open:
            self._leave(slot)
        return float("-inf")

    def abandon(self, error: BaseException) -> None:
        """See Executor."""
        for job in (*self._jobs.values(), *self._outside):
            with contextlib.suppress(Exception):
                job.fail(abandoned(error))
        self._reset()

    def close(self) -> None:
        """See Executor."""
        for job in (*self._jobs.values(), *self._outside):
            with contextlib.suppress(Exception):
                job.cancel()
                job.end(None)

    def _enter(self, job: Job, now_s: float) -> None:
        slot = self._free.pop()
        self._jobs[slot] = self._awake[slot] = job
        self._board.enter(slot, now_s, job.paced)
        self._board.prompt(slot, 1)  # it enters with the first frame, however long it is

    def _leave(self, slot: int) -> None:
        del self._jobs[slot], self._awake[slot]
        self._board.leave(slot)
        self._free.append(slot)
