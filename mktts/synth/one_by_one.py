"""The model that makes one frame of one stream a step, and its executor: a tick has one lane."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mktts.batch.admission import AdmissionSettings, Arrival, Door, Verdict, refusal
from mktts.batch.board import Board
from mktts.batch.pages import Pages
from mktts.batch.scheduler import TickSettings, lone_tick, next_tick
from mktts.batch.tick import TickModel
from mktts.codec.decoder import CodecDecoder, CodecState, PendingPcm, PrimedStates
from mktts.codec.graphs import GraphedCodec
from mktts.model.backend import Backend, Frame
from mktts.model.voice import Voice
from mktts.speech.executor import Standing, TickTimes, Wishes, abandoned
from mktts.speech.job import EngineName, Job
from mktts.speech.options import Chunk, Plan
from mktts.speech.script import Script
from mktts.speech.utterance import Speaker, Utterance

MAX_FRAMES_AHEAD = 4  # of one launch: the longest wait of a stream that arrives during it, 6 ms on an H200


@dataclass(kw_only=True)
class StepModel(Speaker):
    """A model that makes one frame a step: what the worker owns, shared by all utterances.

    overlaps: whether the codec works beside the host, so that waiting for it at once would waste time.
    queues: whether a frame can be decoded behind its launch, before the host has its codes.
    """

    backend: Backend
    codec: CodecDecoder | GraphedCodec
    overlaps: bool = False
    primed: PrimedStates = field(init=False)
    queues: bool = field(init=False)

    def __post_init__(self) -> None:
        self.primed = PrimedStates(self.codec)
        self.queues = hasattr(self.backend, "codes_to_come") and hasattr(self.codec, "submit_unmade")

    @property
    def name(self) -> str:
        return self.backend.name

    def _utterance(self, script: Script, plan: Plan, voice: Voice | None) -> Generation:
        return Generation(self, script, plan, voice)

    def forget(self, voice: Voice) -> None:
        """As `Speaker.forget`; the backend's prefixes and the codec's states too."""
        super().forget(voice)
        self.backend.forget(voice)
        if voice.codes is not None:
            self.primed.forget(voice.codes)

    def codec_state(self, reference: Tensor | None) -> CodecState:
        """A codec state of the caller's own that has heard `reference` (R, 16)."""
        return self.codec.start() if reference is None else self.primed.of(reference).copy()


class Generation(Utterance):
    """An utterance whose frames a `Backend` makes. The engine calls `ready`, then `step`; both may raise, and the
    utterance is then over."""

    def __init__(self, model: StepModel, script: Script, plan: Plan, voice: Voice | None) -> None:
        super().__init__(script, plan, model.positions, self._decode)
        self.alone = False  # set by the engine: nobody waits for a turn, so that a step may ask for frames ahead
        self._model = model
        self._reference = None if voice is None else voice.codes
        self._codec_state: CodecState | None = None
        self._state: Any = None  # the backend's, of the segment
        self._ahead: Iterator[Frame] | None = None  # frames of one launch, of which some are to come
        self._ahead_frames = 0
        self._queued: PendingPcm | None = None  # the first chunk, decoded behind its frame's launch

    def input_known(self) -> bool:
        """As `Utterance.input_known`; frames of a launch have their input already."""
        return self._ahead is not None or super().input_known()

    def step(self) -> Chunk | None:
        """Makes one frame; returns a chunk when that completes one. Call only when `ready`."""
        if not self.input_known():
            return self.flush()
        if self.begins:
            self._start()
        frame = self._next_frame()
        if frame.codes is None:
            self._state = None
        # Where nobody waits, the codec decodes a chunk beside the launch of the next frames; the first is wanted now.
        return self.took(frame, ahead=self.alone and self._model.overlaps and self._chunker.begun)

    def _start(self) -> None:
        begun_s = time.perf_counter()
        segment = self.begin()
        self._state = self._model.backend.start(segment.prompt, segment.sampling, segment.seed, segment.max_frames)
        self._chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)

    def _next_frame(self) -> Frame:
        """The next frame; several are asked for at once where nobody else waits and their inputs are known."""
        backend = self._model.backend
        if self._ahead is None:
            rows = self.rows_ahead(MAX_FRAMES_AHEAD if self.alone else 1)
            first = self._codec_state is None and not self._chunker.pending_frames
            if first and self._chunker.missing_frames == 1 and self._model.queues:
                return backend.step(self._state, rows[0], meanwhile=self._queue_decoding)
            if len(rows) == 1:
                return backend.step(self._state, rows[0])
            self._ahead, self._ahead_frames = backend.frames(self._state, rows), len(rows)
        frame = next(self._ahead)
        self._ahead_frames -= 1
        if not self._ahead_frames or frame.codes is None:
            self._ahead.close()
            self._ahead = None
        return frame

    def _queue_decoding(self) -> None:
        """The first frame's, which is a chunk by itself. It has codes: no stream ends before MIN_NEW_FRAMES."""
        model = self._model
        self._codec_state = model.codec_state(self._reference)
        self._queued = model.codec.submit_unmade(model.backend.codes_to_come(self._state)[None], self._codec_state)

    def _decode(self, frames: list[Tensor]) -> PendingPcm:
        if self._queued is not None:
            queued, self._queued = self._queued, None
            return queued
        if self._codec_state is None:
            self._codec_state = self._model.codec_state(self._reference)
        return self._model.codec.submit(torch.stack(frames), self._codec_state)


_SLOTS = 1_024  # streams that take turns; more wait for one of them to end
_TICKS = TickSettings.one()
_TICK_MODEL = TickModel(constant_s=1.0, lane_s=0.0, row_s=0.0, attention_s=0.0)  # nothing depends on it: one size
_FRAME_S = 1e-3  # until some were made: whoever comes then is let in
_MEMORY_FRAMES = 500.0
_ADMISSION = AdmissionSettings(margin=0.9, first_pcm_s=0.5)
# Before a server asks for admission, whoever finds a slot is let in: no frame takes time.
_EVERYBODY = replace(_ADMISSION, max_line=1 << 30, max_wait_s=math.inf, first_pcm_s=math.inf, host_s=0.0)
_NO_TIME = TickModel(constant_s=1e-9, lane_s=0.0, row_s=0.0, attention_s=0.0)


class OneByOne:
    """One stream a tick: new ones first, then who has least ahead of its listener. Each makes its own frame (`step`);
    a lone one may ask for several frames of one launch. One that waits for its text or its reader is not looked at
    before there is news of it.

    Everybody is let in before `admit`; from then on as many as frames are made for in time, by those made so far.
    """

    name: EngineName = "single"

    def __init__(self) -> None:
        self._admission: AdmissionSettings | None = None
        self._elsewhere: Callable[[], int] = lambda: 0
        self._ticks = TickTimes()
        self._spent_s, self._frames = _FRAME_S, 1.0  # of recent frames, exponentially weighted
        self._reset()

    def _reset(self) -> None:
        """Nothing is open."""
        self._board = Board(_SLOTS)
        self._free = list(range(_SLOTS - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # by slot, as the next
        self._awake: dict[int, Job] = {}
        self._asleep: dict[Job, int] = {}
        self._outside: deque[Job] = deque()
        self._in_line: set[Job] = set()
        self._room = False  # somebody has left, or reads no more, since the line was looked at
        # Its keys and values are each stream's own: there is no book of pages that could be full.
        self._pages = Pages(_SLOTS + 1, _SLOTS, rows_per_slot=1, page_rows=1)
        self._door = Door(self._board, self._pages, _TICKS, self._admission or _EVERYBODY)
        self._door.elsewhere = self._elsewhere

    @property
    def open_jobs(self) -> int:
        return len(self._jobs) + len(self._outside) + len(self._in_line)

    @property
    def listeners(self) -> int:
        return self._door.listeners(time.perf_counter())

    @property
    def carries(self) -> int:
        return self._door.carries(self._model)

    @property
    def standing(self) -> Standing:
        return Standing(
            carries=self.carries,
            listeners=self.listeners,
            waiting=self._door.line + len(self._outside),
            lanes=_SLOTS,
            lanes_used=len(self._jobs),
            pages=0,
            pages_free=0,
            ticks=self._ticks,
        )

    def admit(self, wishes: Wishes) -> None:
        self._admission = self._door.settings = _ADMISSION.wished(wishes)

    def beside(self, elsewhere: Callable[[], int]) -> None:
        self._elsewhere = self._door.elsewhere = elsewhere

    def take(self, job: Job) -> None:
        self._outside.append(job)

    def hear(self, job: Job) -> None:
        slot = self._asleep.pop(job, None)
        if slot is not None:
            job.rest(False)
            self._awake[slot] = job

    def turn(self, now_s: float, alone: bool) -> float:
        self._let_in(now_s)
        board = self._board
        board.read(list(self._awake), [job.taken_frames for job in self._awake.values()], now_s)
        for slot, job in list(self._awake.items()):
            runnable = job.runnable()
            board.text_known[slot] = runnable or job.watched  # one whose buffer is full was not asked for its text
            if not job.open:
                self._leave(slot)
            elif not runnable:
                board.full[slot] = job.watched
                self._room |= job.watched  # it may count no more
                job.rest(True)
                self._asleep[job] = slot
                del self._awake[slot]
            else:
                board.full[slot] = False
        if len(self._awake) == 1:
            tick = lone_tick(board, next(iter(self._awake)), now_s)
        else:
            tick = next_tick(board, now_s, _TICK_MODEL, _TICKS)
        if tick.empty and self._room and self.open_jobs > len(self._jobs):
            return float("-inf")  # and somebody waits for it
        if tick.empty:
            self._door.rests(now_s)
            return min(tick.wake_s, self._door.patience_s(now_s))
        self._door.works()
        slot = int(tick.lanes[0])
        job = self._jobs[slot]

        def step(work: Any) -> Chunk | None:
            work.alone = alone
            return work.step()

        board.begin(tick)
        before, began_s = len(job.codes), time.perf_counter()
        job.advance(step)
        ended_s = time.perf_counter()
        self._spent(ended_s - began_s, len(job.codes) - before)
        board.frames_made[slot] = len(job.codes)
        board.chunk(slot, job.made_frames, len(job.codes) + 1)  # its listener has what is in chunks
        board.finish(tick, ended_s)
        if not job.open:
            self._leave(slot)
        return float("-inf")

    def abandon(self, error: BaseException) -> None:
        for job in (*self._jobs.values(), *self._outside, *self._in_line):
            with contextlib.suppress(Exception):
                job.fail(abandoned(error))
        self._reset()

    def close(self) -> None:
        for job in (*self._jobs.values(), *self._outside, *self._in_line):
            with contextlib.suppress(Exception):
                job.cancel()
                job.end(None)

    # ---- who comes in

    @property
    def _model(self) -> TickModel:
        """What a frame takes, with its part of a chunk's PCM."""
        return TickModel(constant_s=self._spent_s / self._frames, lane_s=0.0, row_s=0.0, attention_s=0.0)

    def _spent(self, took_s: float, frames: int) -> None:
        keep = 1 - 1 / _MEMORY_FRAMES
        self._spent_s = keep * self._spent_s + took_s
        self._frames = keep * self._frames + frames
        self._ticks.add(took_s)

    def _let_in(self, now_s: float) -> None:
        self._room = False
        for job in [job for job in self._in_line if job.cancelled]:
            self._in_line.discard(job)
            self._door.give_up(job)
            job.end(None)
        model = _NO_TIME if self._admission is None else self._model
        while (left := self._door.next(now_s, model)) is not None:
            self._in_line.discard(left[0].name)
            self._judged(*left, now_s)
        while self._outside:
            job = self._outside.popleft()
            request = Arrival(now_s, 1, 1, job.paced, name=job)
            self._judged(request, self._door.ask(request, model), now_s)

    def _judged(self, request: Arrival, verdict: Verdict, now_s: float) -> None:
        job: Job = request.name
        if not job.open or job.cancelled:
            job.end(None)
        elif verdict.decision == "admit":
            self._enter(job, now_s)
        elif verdict.decision == "queue":
            self._in_line.add(job)
        else:
            job.fail(refusal(verdict.reason, request, self._pages, len(self._jobs), self.carries))

    def _enter(self, job: Job, now_s: float) -> None:
        slot = self._free.pop()
        self._jobs[slot] = self._awake[slot] = job
        self._board.enter(slot, now_s, job.paced)
        self._board.prompt(slot, 1)  # it enters with the first frame, however long it is

    def _leave(self, slot: int) -> None:
        del self._jobs[slot], self._awake[slot]
        self._board.leave(slot)
        self._free.append(slot)
        self._room = True
