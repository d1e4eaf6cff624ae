"""Frames of one utterance at a time: the model that makes one frame a step, and an utterance on it.

Single-threaded: the engine's worker drives it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState, PendingPcm, PrimedStates
from mktts.codec.graphs import GraphedCodec
from mktts.model.backend import Backend, Frame
from mktts.model.voice import Voice
from mktts.speech.options import Chunk, Plan
from mktts.speech.script import Script
from mktts.speech.speaking import Speaker
from mktts.speech.utterance import Utterance

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
