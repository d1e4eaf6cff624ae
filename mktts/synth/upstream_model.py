"""qwen-tts's own generate, end to end, behind the interface of the other backends.

Upstream makes an utterance in one piece and cannot wait for text or take turns, so here a step may last a whole
segment, other streams wait for it, and fed text is spoken after its end. Cancelling still works within a frame.
It draws from torch's generator only, so a seed gives the codes of the torch backend with Sampling(rng="torch").
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import PendingPcm
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.voice import Voice
from mktts.spec import SAMPLES_PER_FRAME
from mktts.speech.chunking import Chunker
from mktts.speech.guard import FinishReason, GuardState
from mktts.speech.options import Chunk, Plan
from mktts.speech.script import CollectedScript, Script, WholeScript
from mktts.speech.utterance import MAX_SEGMENT_FRAMES
from mktts.synth.upstream import decode_codes, generate_codes


@dataclass(frozen=True)
class UpstreamModel:
    """`upstream` is a qwen_tts.Qwen3TTSModel; `prompts` only checks requests and counts tokens."""

    upstream: Any
    prompts: PromptBuilder
    name: str = "upstream"

    def forget(self, voice: Voice) -> None:
        """As `Speaker.forget`: nothing is kept here."""

    def check(self, request: Request) -> Request:
        """Any thread. Raises PromptError or TextError."""
        return self.prompts.check(request)

    def speak(self, requests: list[Request], plan: Plan, started_s: float) -> UpstreamGeneration:
        """As `StepModel.speak`."""
        return UpstreamGeneration(self, WholeScript(requests, lambda request: request, started_s), plan)

    def listen(self, request: Request, max_chars: int, plan: Plan) -> tuple[UpstreamGeneration, CollectedScript]:
        """As `StepModel.listen`."""
        script = CollectedScript(request, max_chars)
        return UpstreamGeneration(self, script, plan), script


class UpstreamGeneration:
    """What `mktts.synth.generation.Generation` is for a step model; all generation time shows as talker_ms."""

    def __init__(self, model: UpstreamModel, script: Script, plan: Plan) -> None:
        self.codes: list[Tensor] = []
        self.finish_reason: FinishReason | None = None
        self.cancelled = self.alone = False
        self._model = model
        self._script = script
        self._plan = plan
        self._chunker = Chunker(self._decode, plan.options)
        self._segments = 0
        self._request: Request | None = None  # whose turn to be generated has come
        self._limit_reached: FinishReason | None = None
        self._frames: deque[Tensor] = deque()  # generated, not yet in a chunk
        self._pcm = np.zeros(0, dtype=np.float32)  # of those frames and the chunker's

    @property
    def pending_frames(self) -> int:
        return self._chunker.pending_frames

    def ready(self) -> bool:
        """Whether `step` has something to do now; False means: the text has not been finished."""
        self._script.update()
        if not self._frames and self._request is None and self._limit_reached is None:
            self._request = self._script.next_segment()
        return bool(self._frames) or self._request is not None or self._over()

    def step(self) -> Chunk | None:
        """Hands on one frame, generating a segment first where none is left; returns a chunk when it completes one."""
        if not self._frames and self._request is not None:
            self._generate(self._request)
            self._request = None
        if self._frames:
            self._chunker.add(self._frames.popleft())
        if self._over():
            self.finish_reason = self._limit_reached or "eos"
        if self.cancelled:
            return None
        return self._chunker.take(self._script.started_s, flush=self.finish_reason is not None)

    def close(self) -> None:
        """As `Utterance.close`."""
        self._chunker.close()

    def _over(self) -> bool:
        if self._frames or self._request is not None:
            return False
        return self._limit_reached is not None or self._script.ended()

    def _generate(self, request: Request) -> None:
        plan = self._plan
        limit = MAX_SEGMENT_FRAMES if plan.max_frames is None else plan.max_frames - len(self.codes)
        watch = GuardState(plan.options.guard, limit)
        text_tokens = len(self._model.prompts.tokenizer.encode(request.text))
        begun_s = time.perf_counter()

        def on_frame(codes: Tensor) -> None:
            self.codes.append(codes)
            self._limit_reached = watch.count(codes, text_tokens)

        codes = generate_codes(
            self._model.upstream,
            request,
            plan.sampling,
            plan.seed + self._segments,
            limit,
            cancelled=lambda: self.cancelled or self._limit_reached is not None,
            on_frame=on_frame,
        )
        self._segments += 1
        generated_s = time.perf_counter()
        self._chunker.talker_ms += 1e3 * (generated_s - begun_s)
        if self.cancelled or not len(codes):
            return
        reference = None if request.voice is None else request.voice.codes
        pcm = decode_codes(self._model.upstream, codes, reference)
        self._pcm = np.concatenate((self._pcm, pcm.astype(np.float32)))
        self._chunker.codec_ms += 1e3 * (time.perf_counter() - generated_s)
        self._frames.extend(codes)

    def _decode(self, frames: list[Tensor]) -> PendingPcm:
        samples = len(frames) * SAMPLES_PER_FRAME
        pcm, self._pcm = self._pcm[:samples], self._pcm[samples:]
        return PendingPcm(torch.from_numpy(pcm))
