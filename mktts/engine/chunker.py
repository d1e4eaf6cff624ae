"""The frames of one stream become chunks of PCM."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mktts.audio import first_audible_sample, joined
from mktts.engine.options import SCHEDULE, Chunk, StreamOptions, Timings
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

KEPT_LEAD_SAMPLES = SAMPLE_RATE_HZ * 40 // 1_000  # before the first audible 10 ms: the attack of a soft sound is whole


class Chunker:
    """Collects the frames of one utterance and hands out chunks."""

    def __init__(self, options: StreamOptions, started_s: float, schedule: tuple[int, ...] = SCHEDULE) -> None:
        """started_s: perf_counter of the call that timings count from. schedule: where the options leave it open."""
        self._started_s = started_s
        self._schedule = options.schedule or schedule
        self._trimming = options.trim_lead
        self.undecoded: list[Any] = []  # of each frame, what `decode` of `take` takes
        self.decoding: list[tuple[Any, int]] = []  # chunks on their way to the host, with their frames
        self._lead = np.zeros(0, dtype=np.float32)  # the end of the silence so far, while trimming
        self._chunks = 0
        self._samples = 0  # decoded so far, trimmed ones included
        self._silent_frames = 0  # trimmed away since the last chunk
        self.pending_frames = 0  # made and not in a chunk yet
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0  # since the last chunk

    @property
    def missing_frames(self) -> int:
        """Frames that make the next chunk whole."""
        wanted = self._schedule[min(self._chunks + len(self.decoding), len(self._schedule) - 1)]
        return wanted - len(self.undecoded)

    def take(self, decode: Callable[[list[Any]], Any], flush: bool = False, ahead: bool = False) -> Chunk | None:
        """The next chunk once the schedule has it whole, or what there is with `flush`; None for nothing to hear.

        decode: begins to turn `undecoded` into PCM (T * SAMPLES_PER_FRAME,) float32, which its result waits for. ahead:
        a chunk that has become whole is only begun to be decoded, and the next call hands it out.
        """
        whole = bool(self.undecoded) if flush else self.missing_frames <= 0
        if not whole and not self.decoding:
            return None
        begun_s = time.perf_counter()
        taken = len(self.decoding)
        if whole:
            self.decoding.append((decode(self.undecoded), len(self.undecoded)))
            self.undecoded = []
            taken += not ahead
        if not taken:
            return None
        frames = sum(count for _, count in self.decoding[:taken])
        parts = [pending.result() for pending, _ in self.decoding[:taken]]
        pcm = parts[0] if taken == 1 else joined(parts)  # (S,)
        pcm16 = self.decoding[0][0].pcm16 if taken == 1 else None
        del self.decoding[:taken]
        self._samples += len(pcm)
        if self._trimming:
            pcm, pcm16 = self._trimmed(pcm), None
        ready_s = time.perf_counter()
        self.codec_ms += 1e3 * (ready_s - begun_s)
        if not len(pcm):
            self._silent_frames += frames
            return None
        spent_ms = self.prefill_ms, self.talker_ms, self.predictor_ms, self.codec_ms
        timings = Timings(1e3 * (ready_s - self._started_s), *spent_ms)
        frames += self._silent_frames
        chunk = Chunk(pcm, (self._samples - len(pcm)) / SAMPLE_RATE_HZ, frames, timings, pcm16)
        self._chunks += 1
        self._silent_frames = 0
        self.pending_frames -= frames
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0
        return chunk

    def silence(self, samples: int) -> Iterator[Chunk]:
        """Chunks of exact silence, no longer than those of speech, behind all that was taken so far."""
        longest = SAMPLES_PER_FRAME * SCHEDULE[-1]
        for start in range(0, samples, longest):
            count = min(longest, samples - start)
            timings = Timings(1e3 * (time.perf_counter() - self._started_s), 0.0, 0.0, 0.0, 0.0)
            yield Chunk(np.zeros(count, np.float32), self._samples / SAMPLE_RATE_HZ, 0, timings, bytes(2 * count))
            self._samples += count

    def _trimmed(self, pcm: np.ndarray) -> np.ndarray:
        whole = joined((self._lead, pcm))
        audible = first_audible_sample(whole)
        if audible is None:
            self._lead = whole[-(KEPT_LEAD_SAMPLES + len(whole) % AUDIBLE_WINDOW_SAMPLES) :]  # begins with a window
            return whole[:0]
        self._trimming = False
        self._lead = whole[:0]
        return whole[max(0, audible - KEPT_LEAD_SAMPLES) :]
