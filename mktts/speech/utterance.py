"""The bookkeeping of one utterance, whatever makes its frames: segments, text rows, guard, chunks, end.
Single-threaded.

Text longer than a segment is spoken segment after segment, each with its own prompt and talker state, while the
codec state goes on: the waveform is continuous over a join, because the decoder never restarts.

Whoever makes the frames asks `ready`; then, while `input_known`, either begins a segment (`begins`, `begin`) or takes
the text row of the next frame (`take_row`, `rows_ahead`), makes the frame, and hands it to `took`. Without input,
`flush` hands on what waits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mktts.audio import first_audible_sample, joined
from mktts.errors import EngineError
from mktts.model.backend import Frame
from mktts.model.prompt import FedPrompt, Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.speech.guard import FinishReason, GuardState
from mktts.speech.options import SCHEDULE, Chunk, Plan, StreamOptions, Timings
from mktts.speech.script import FedScript, Script, WholeScript

KEPT_LEAD_SAMPLES = SAMPLE_RATE_HZ * 40 // 1_000  # before the first audible 10 ms: the attack of a soft sound is whole


class Chunker:
    """Collects the frames of one utterance and hands out chunks.

    `decode` begins to turn the next frames, a list of codes (16,), into PCM (T * SAMPLES_PER_FRAME,) float32 on the
    host, which its result waits for.
    """

    def __init__(
        self, decode: Callable[[list[Tensor]], Any], options: StreamOptions, schedule: tuple[int, ...] = SCHEDULE
    ) -> None:
        """schedule: where the options leave it open."""
        self._decode = decode
        self._schedule = options.schedule or schedule
        self._trimming = options.trim_lead
        self.undecoded: list[Tensor] = []
        self._decoding: list[tuple[Any, int]] = []  # chunks on their way to the host, with their frames
        self._lead = np.zeros(0, dtype=np.float32)  # the end of the silence so far, while trimming
        self._chunks = 0
        self._samples = 0  # decoded so far, trimmed ones included
        self._silent_frames = 0  # trimmed away since the last chunk
        self.pending_frames = 0  # made and not in a chunk yet
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0  # since the last chunk

    @property
    def waiting_frames(self) -> int:
        """Frames that `take` with `flush` would turn into PCM."""
        return len(self.undecoded) + sum(count for _, count in self._decoding)

    @property
    def begun(self) -> bool:
        """Whether a chunk was handed out: the listener hears something."""
        return self._chunks > 0

    @property
    def missing_frames(self) -> int:
        """How many more frames make the next chunk whole."""
        return self._wanted - len(self.undecoded)

    @property
    def _wanted(self) -> int:
        return self._schedule[min(self._chunks + len(self._decoding), len(self._schedule) - 1)]

    def close(self) -> None:
        """Lets go of what decodes, which refers to this: without a cycle, all is free as soon as nobody needs it."""
        self._decode = _closed

    def add(self, codes: Tensor) -> None:
        """Takes one frame, (16,) int64 on the host."""
        self.undecoded.append(codes)
        self.pending_frames += 1

    def take(self, started_s: float, flush: bool = False, ahead: bool = False) -> Chunk | None:
        """The next chunk once the schedule has it whole, or what there is with `flush`; None for nothing to hear.

        `ahead`: a chunk that has become whole is only begun to be decoded, while the caller makes more frames; the
        call after this one hands it out.
        """
        whole = len(self.undecoded) >= (1 if flush else self._wanted)
        if not whole and not self._decoding:
            return None
        begun_s = time.perf_counter()
        taken = len(self._decoding)
        if whole:
            self._decoding.append((self._decode(self.undecoded), len(self.undecoded)))
            self.undecoded = []
            taken += not ahead
        if not taken:
            return None
        frames = sum(count for _, count in self._decoding[:taken])
        parts = [pending.result() for pending, _ in self._decoding[:taken]]
        pcm = parts[0] if taken == 1 else joined(parts)  # (S,)
        pcm16 = self._decoding[0][0].pcm16 if taken == 1 else None
        del self._decoding[:taken]
        self._samples += len(pcm)
        if self._trimming:
            pcm, pcm16 = self._trimmed(pcm), None
        ready_s = time.perf_counter()
        self.codec_ms += 1e3 * (ready_s - begun_s)
        if not len(pcm):
            self._silent_frames += frames
            return None
        timings = Timings(
            1e3 * (ready_s - started_s), self.prefill_ms, self.talker_ms, self.predictor_ms, self.codec_ms
        )
        frames += self._silent_frames
        chunk = Chunk(pcm, (self._samples - len(pcm)) / SAMPLE_RATE_HZ, frames, timings, pcm16)
        self._chunks += 1
        self._silent_frames = 0
        self.pending_frames -= frames
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0
        return chunk

    def _trimmed(self, pcm: np.ndarray) -> np.ndarray:
        whole = joined((self._lead, pcm))
        audible = first_audible_sample(whole)
        if audible is None:
            self._lead = whole[-(KEPT_LEAD_SAMPLES + len(whole) % AUDIBLE_WINDOW_SAMPLES) :]  # begins with a window
            return whole[:0]
        self._trimming = False
        self._lead = whole[:0]
        return whole[max(0, audible - KEPT_LEAD_SAMPLES) :]


def _closed(frames: list[Tensor]) -> Any:
    raise EngineError("the utterance is over: nothing more is decoded for it")


MAX_SEGMENT_FRAMES = int(160 * FRAME_RATE_HZ)  # what one prompt may take where the caller sets no limit


@dataclass(frozen=True)
class Segment:
    """What the frames of one segment are made from. prompt: a `Prompt`, or a `FedPrompt` that is ready."""

    prompt: Any
    sampling: Sampling
    seed: int
    max_frames: int


class Utterance:
    """See the module.

    codes: one (16,) int64 tensor or array a frame so far, of all segments. finish_reason: None while there is more to
    come.
    """

    def __init__(
        self,
        script: Script,
        plan: Plan,
        positions: int,
        decode: Callable[[list[Tensor]], Any],
        schedule: tuple[int, ...] = SCHEDULE,
    ) -> None:
        """positions: of the talker, prompt and frames of one segment together. decode, schedule: see `Chunker`."""
        self.codes: list[Tensor | np.ndarray] = []
        self.finish_reason: FinishReason | None = None
        self.cancelled = False  # set by any thread: no more chunks are wanted
        self._script = script
        self._plan = plan
        self._positions = positions
        self._chunker = Chunker(decode, plan.options, schedule)
        self._segments = 0
        self._prompt: Any = None
        self._guard: GuardState | None = None  # of the segment that has begun
        self._row: Tensor | None = None
        self._max_frames = 0  # of the segment

    @property
    def pending_frames(self) -> int:
        """Made, not yet in a chunk."""
        return self._chunker.pending_frames

    def ready(self) -> bool:
        """Whether there is something to make or to hand on; False means: waiting for text."""
        return self.input_known() or self._spoken() or self._chunker.waiting_frames > 0

    def input_known(self) -> bool:
        """Whether the input of the next frame is known; fetches it."""
        self._script.update()
        if self._prompt is None:
            begun_s = time.perf_counter()
            self._prompt = self._script.next_segment()
            self._chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)
            return self._prompt is not None
        if self._guard is None or self._row is not None:
            return True
        self._row = self._prompt.row(self._guard.frames - 1)
        return self._row is not None

    @property
    def begins(self) -> bool:
        """Whether the next frame is a segment's first: `begin` is to be called, and there is no row."""
        return self._guard is None

    def begin(self) -> Segment:
        """The segment whose turn has come."""
        plan, prompt = self._plan, self._prompt
        limit = MAX_SEGMENT_FRAMES if plan.max_frames is None else plan.max_frames - len(self.codes)
        limit = min(limit, self._positions - len(prompt.embeds))
        # A key-value cache no longer than the guard allows; the frame that reaches the limit is its runaway.
        guarded = plan.options.guard.limit_frames(prompt.text_tokens) if prompt.text_ended else None
        self._max_frames = max(1, limit if guarded is None else min(limit, guarded))
        self._guard = GuardState(plan.options.guard, max(1, limit))
        seed = plan.seed + self._segments
        self._segments += 1
        return Segment(prompt, plan.sampling, seed, self._max_frames)

    def take_row(self) -> Tensor | None:
        """The text row (H,) of the next frame; None at a segment's first."""
        row, self._row = self._row, None
        return row

    def rows_ahead(self, most: int) -> list[Tensor | None]:
        """As `take_row`, and the rows of frames after it as far as they are known, `most` frames, to the chunk's
        end.
        """
        made = self._guard.frames
        rows = [self.take_row()]
        most = min(most, self._chunker.missing_frames, self._max_frames - made)
        while len(rows) < most and (row := self._prompt.row(made - 1 + len(rows))) is not None:
            rows.append(row)
        return rows

    def took(self, frame: Frame, ahead: bool = False) -> Chunk | None:
        """Books a frame; returns a chunk when that completes one. `ahead`: see `Chunker.take`."""
        self._chunker.talker_ms += frame.talker_ms
        self._chunker.predictor_ms += frame.predictor_ms
        if frame.codes is None:
            self._script.leave_segment()
            self._prompt = self._guard = None
            if self._spoken():
                self.finish_reason = "eos"
        else:
            self.codes.append(frame.codes)
            self._chunker.add(frame.codes)
            self.finish_reason = self._guard.count(frame.codes, self._prompt.text_tokens)
        if self.cancelled:
            return None
        over = self.finish_reason is not None
        return self._chunker.take(self._script.started_s, flush=over, ahead=ahead and not over)

    def flush(self) -> Chunk | None:
        """Without input: the end, or the text has stopped for now, and the listener gets what there is."""
        if self._spoken():
            self.finish_reason = "eos"
        return self._chunker.take(self._script.started_s, flush=True)

    def close(self) -> None:
        """Releases what the frames were made with. The utterance is over."""
        self._chunker.close()

    def _spoken(self) -> bool:
        return self._prompt is None and self._script.ended()


@dataclass
class Speaker(ABC):
    """Opens utterances; `_utterance` makes one of a script.

    positions: of the talker, prompt and frames of one segment together. fed_prompt: a prompt whose text comes later.
    """

    prompts: PromptBuilder
    positions: int
    fed_prompt: Callable[[PromptBuilder, Request], Any] = FedPrompt

    @abstractmethod
    def _utterance(self, script: Script, plan: Plan, voice: Voice | None) -> Utterance: ...

    def forget(self, voice: Voice) -> None:
        """Lets go of what is kept for prompts with this voice; utterances that are open go on. The worker's thread."""
        self.prompts.forget(voice)

    def _prompt(self, request: Request) -> Prompt:
        return self.prompts.of_checked(request)

    def check(self, request: Request) -> Request:
        """Any thread. Raises PromptError or TextError."""
        return self.prompts.check(request)

    def speak(self, requests: Sequence[Request], plan: Plan, started_s: float) -> Utterance:
        """An utterance of known text: one checked request a segment."""
        return self._utterance(WholeScript(requests, self._prompt, started_s), plan, requests[0].voice)

    def listen(self, request: Request, max_chars: int, plan: Plan) -> tuple[Utterance, FedScript]:
        """An utterance whose text comes later, and the script that it is fed through. `request`: checked, no text."""
        script = FedScript(request, lambda empty: self.fed_prompt(self.prompts, empty), max_chars)
        return self._utterance(script, plan, request.voice), script
