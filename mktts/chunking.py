"""From frames to chunks: the schedule, the silent lead, the accounts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from mktts.audio import first_audible_sample
from mktts.options import Chunk, StreamOptions, Timings
from mktts.spec import SAMPLE_RATE_HZ

KEPT_LEAD_SAMPLES = SAMPLE_RATE_HZ // 100  # 10 ms before the first audible sample, so that its attack is whole


class Chunker:
    """Collects the frames of one utterance and hands out chunks.

    `decode` turns the next frames, a list of codes (16,), into PCM (T * SAMPLES_PER_FRAME,) float32 on the host.
    """

    def __init__(self, decode: Callable[[list[Tensor]], np.ndarray], options: StreamOptions) -> None:
        self._decode = decode
        self._schedule = options.schedule
        self._trimming = options.trim_lead
        self._undecoded: list[Tensor] = []
        self._lead = np.zeros(0, dtype=np.float32)  # the end of the silence so far, while trimming
        self._chunks = 0
        self._samples = 0  # decoded so far, trimmed ones included
        self.pending_frames = 0  # made since the last chunk
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0  # since the last chunk

    @property
    def undecoded_frames(self) -> int:
        return len(self._undecoded)

    @property
    def missing_frames(self) -> int:
        """How many more frames make the next chunk whole."""
        return self._wanted - len(self._undecoded)

    @property
    def _wanted(self) -> int:
        return self._schedule[min(self._chunks, len(self._schedule) - 1)]

    def add(self, codes: Tensor) -> None:
        """Takes one frame, (16,) int64 on the host."""
        self._undecoded.append(codes)
        self.pending_frames += 1

    def take(self, started_s: float, flush: bool = False) -> Chunk | None:
        """The next chunk once the schedule has it whole, or what there is with `flush`; None for nothing to hear."""
        wanted = 1 if flush else self._wanted
        if len(self._undecoded) < wanted:
            return None
        begun_s = time.perf_counter()
        pcm = self._decode(self._undecoded)  # (S,)
        self._undecoded = []
        self._samples += len(pcm)
        if self._trimming:
            pcm = self._trimmed(pcm)
        ready_s = time.perf_counter()
        self.codec_ms += 1e3 * (ready_s - begun_s)
        if not len(pcm):
            return None
        timings = Timings(
            1e3 * (ready_s - started_s), self.prefill_ms, self.talker_ms, self.predictor_ms, self.codec_ms
        )
        chunk = Chunk(pcm, (self._samples - len(pcm)) / SAMPLE_RATE_HZ, self.pending_frames, timings)
        self._chunks += 1
        self.pending_frames = 0
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0
        return chunk

    def _trimmed(self, pcm: np.ndarray) -> np.ndarray:
        joined = np.concatenate((self._lead, pcm))
        audible = first_audible_sample(joined)
        if audible is None:
            self._lead = joined[-KEPT_LEAD_SAMPLES:]
            return joined[:0]
        self._trimming = False
        self._lead = joined[:0]
        return joined[max(0, audible - KEPT_LEAD_SAMPLES) :]
