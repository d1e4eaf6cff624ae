"""One utterance as a machine that makes one frame a step. Single-threaded: the engine's worker drives it.

Text longer than a segment is spoken segment after segment, each with its own prompt and talker state, while the
codec state goes on: the waveform is continuous over a join, because the decoder never restarts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.graphs import GraphedCodec
from mktts.codec.pending import Pending
from mktts.model.backend import Backend, Frame
from mktts.model.fed_prompt import FedPrompt
from mktts.model.prompt import PromptBuilder, Request
from mktts.spec import FRAME_RATE_HZ
from mktts.speech.chunking import Chunker
from mktts.speech.guard import FinishReason, GuardState
from mktts.speech.options import Chunk, Plan
from mktts.speech.script import FedScript, Script, WholeScript

MAX_FRAMES_AHEAD = 4  # of one launch: what a stream that arrives meanwhile waits for at most, 6 ms on an H200
MAX_SEGMENT_FRAMES = int(160 * FRAME_RATE_HZ)  # what one prompt may take where the caller sets no limit
_PRIMED_VOICES = 8
_PRIMING_FRAMES = 32  # at a time: the decoder's working memory grows with the frames of a call


@dataclass
class StepModel:
    """A model that makes one frame a step: what the worker owns, shared by all utterances."""

    backend: Backend
    prompts: PromptBuilder
    codec: CodecDecoder | GraphedCodec
    positions: int  # of the talker: prompt and frames of one segment together
    overlaps: bool = False  # whether the codec works beside the host, so that waiting for it at once would waste time
    _primed: OrderedDict[int, tuple[Tensor, CodecState]] = field(default_factory=OrderedDict)

    @property
    def name(self) -> str:
        return self.backend.name

    def check(self, request: Request) -> Request:
        """Any thread. Raises PromptError or TextError."""
        return self.prompts.check(request)

    def whole_script(self, requests: list[Request]) -> WholeScript:
        return WholeScript(requests, self.prompts.build)

    def fed_script(self, request: Request, max_chars: int) -> FedScript:
        return FedScript(request, lambda first: FedPrompt(self.prompts, first), max_chars)

    def speak(self, request: Request, script: Script, plan: Plan) -> Generation:
        """`request` carries the voice; the text comes from `script`."""
        return Generation(self, script, plan, None if request.voice is None else request.voice.codes)

    def codec_state(self, reference: Tensor | None) -> CodecState:
        """A codec state that has heard `reference` (R, 16), whose audio upstream decodes and cuts off."""
        if reference is None:
            return self.codec.start()
        key = id(reference)
        if key not in self._primed:
            state = self.codec.start()
            for codes in reference.split(_PRIMING_FRAMES):
                self.codec.decode(codes, state)
            self._primed[key] = (reference, state)  # holding the tensor keeps its id from being reused
            if len(self._primed) > _PRIMED_VOICES:
                self._primed.popitem(last=False)
        self._primed.move_to_end(key)
        return self._primed[key][1].copy()


class Generation:
    """See the module. The engine calls `ready`, then `step`; both may raise, and the utterance is then over.

    codes: one (16,) int64 tensor a frame so far, of all segments. finish_reason: None while there is more to come.
    """

    def __init__(self, model: StepModel, script: Script, plan: Plan, reference: Tensor | None = None) -> None:
        self.codes: list[Tensor] = []
        self.finish_reason: FinishReason | None = None
        self.cancelled = False  # set by any thread: no more chunks are wanted
        self.alone = False  # set by the engine: nobody waits for a turn, so that a step may ask for frames ahead
        self._model = model
        self._script = script
        self._plan = plan
        self._reference = reference
        self._codec_state: CodecState | None = None
        self._chunker = Chunker(self._decode, plan.options)
        self._segments = 0
        self._prompt: Any = None
        self._state: Any = None
        self._watch: GuardState | None = None
        self._row: Tensor | None = None
        self._capacity = 0  # frames of the segment that the backend has room for
        self._ahead: Iterator[Frame] | None = None  # frames of one launch, of which some are to come
        self._ahead_frames = 0

    @property
    def pending_frames(self) -> int:
        return self._chunker.pending_frames

    def ready(self) -> bool:
        """Whether `step` has something to do now; False means: waiting for text."""
        return self._next_input() or self._spoken() or self._chunker.waiting_frames > 0

    def step(self) -> Chunk | None:
        """Makes one frame; returns a chunk when that completes one. Call only when `ready`."""
        if not self._next_input():
            if self._spoken():
                self.finish_reason = "eos"
            # Otherwise the text has stopped for now: let the listener have what there is.
            return self._chunker.take(self._script.started_s, flush=True)
        if self._state is None:
            self._begin_segment()
        frame = self._next_frame()
        self._chunker.talker_ms += frame.talker_ms
        self._chunker.predictor_ms += frame.predictor_ms
        if frame.codes is None:
            self._end_segment()
        else:
            self.codes.append(frame.codes)
            self._chunker.add(frame.codes)
            self.finish_reason = self._watch.count(frame.codes, self._prompt.text_tokens)
        if self.cancelled:
            return None
        # Where nobody waits, the codec decodes a chunk beside the launch of the next frames; the first is wanted now.
        ahead = self.alone and self._model.overlaps and self._chunker.begun
        over = self.finish_reason is not None
        return self._chunker.take(self._script.started_s, flush=over, ahead=ahead and not over)

    def _next_frame(self) -> Frame:
        """The next frame; several are asked for at once where nobody else waits and their inputs are known."""
        backend = self._model.backend
        if self._ahead is None:
            rows = self._rows_ahead() if self.alone else [self._row]
            self._row = None
            if len(rows) == 1:
                return backend.step(self._state, rows[0])
            self._ahead, self._ahead_frames = backend.frames(self._state, rows), len(rows)
        frame = next(self._ahead)
        self._ahead_frames -= 1
        if not self._ahead_frames or frame.codes is None:
            self._ahead.close()
            self._ahead = None
        return frame

    def _rows_ahead(self) -> list[Tensor | None]:
        """What the talker takes for the next frames, as far as it is known, up to the end of the chunk."""
        rows, made = [self._row], self._watch.frames
        most = min(MAX_FRAMES_AHEAD, self._chunker.missing_frames, self._capacity - made)
        while len(rows) < most and (row := self._prompt.row(made - 1 + len(rows))) is not None:
            rows.append(row)
        return rows

    def _next_input(self) -> bool:
        """Whether the talker's next input is known; fetches it."""
        self._script.update()
        if self._prompt is None:
            begun_s = time.perf_counter()
            self._prompt = self._script.next_segment()
            self._chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)
            return self._prompt is not None
        if self._state is None or self._row is not None or self._ahead is not None:
            return True
        self._row = self._prompt.row(self._watch.frames - 1)
        return self._row is not None

    def _spoken(self) -> bool:
        return self._prompt is None and self._script.ended()

    def _begin_segment(self) -> None:
        plan, prompt = self._plan, self._prompt
        begun_s = time.perf_counter()
        limit = MAX_SEGMENT_FRAMES if plan.max_frames is None else plan.max_frames - len(self.codes)
        limit = min(limit, self._model.positions - len(prompt.embeds))
        # A key-value cache no longer than the guard allows; the frame that reaches the limit is its runaway.
        guarded = plan.options.guard.limit_frames(prompt.text_tokens) if prompt.text_ended else None
        capacity = limit if guarded is None else min(limit, guarded)
        seed = plan.seed + self._segments
        self._capacity = max(1, capacity)
        self._state = self._model.backend.start(prompt, plan.sampling, seed, self._capacity)
        self._watch = GuardState(plan.options.guard, max(1, limit))
        self._segments += 1
        self._chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)

    def _end_segment(self) -> None:
        self._script.leave_segment()
        self._prompt = self._state = self._watch = None
        if self._spoken():
            self.finish_reason = "eos"

    def _decode(self, frames: list[Tensor]) -> Pending:
        if self._codec_state is None:
            self._codec_state = self._model.codec_state(self._reference)
        return self._model.codec.submit(torch.stack(frames), self._codec_state)
