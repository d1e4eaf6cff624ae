"""Speech faster or slower at the same pitch, and at another sample rate, while it is made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mktts.audio.coding import import_av
from mktts.spec import SAMPLE_RATE_HZ

# FFmpeg's atempo: below 0.5 it does not go, and above 2 it skips samples instead of blending them.
_SLOWEST, _FASTEST = 0.5, 2.0
_TAIL_S = 0.2  # of silence after the end: atempo leaves out the last part of a window


class Tempo:
    """A filter of PCM (S,) float32 at SAMPLE_RATE_HZ: FFmpeg's atempo (WSOLA), then aresample.

    speed: 0.25 to 4. sample_rate_hz: of what comes out, which is as long as what goes in over `speed`, to a sample.
    Its windows hold back up to 0.25 s until `finish`.
    Raises BackendUnavailable without the package av.
    """

    def __init__(self, speed: float, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
        av = import_av()
        self._av = av
        self._samples = 0
        self._given = 0
        self._ratio = sample_rate_hz / SAMPLE_RATE_HZ / speed
        self._graph = av.filter.Graph()
        last = self._graph.add_abuffer(sample_rate=SAMPLE_RATE_HZ, format="flt", layout="mono")
        for name, setting in [*_tempos(speed), *_rates(sample_rate_hz), ("abuffersink", None)]:
            here = self._graph.add(name, setting)
            last.link_to(here)
            last = here
        self._graph.configure()

    def feed(self, pcm: np.ndarray) -> np.ndarray:
        """What is ready once `pcm` is in, (T,) float32; may be nothing yet."""
        if len(pcm):
            self._push(pcm)
            self._samples += len(pcm)
        ready = self._ready()
        self._given += len(ready)
        return ready

    def finish(self) -> np.ndarray:
        """The rest, (T,) float32."""
        if not self._samples:  # without a frame there is nothing to end, and FFmpeg says so by an error
            return np.zeros(0, np.float32)
        self._push(np.zeros(int(_TAIL_S * SAMPLE_RATE_HZ), np.float32))
        self._graph.push(None)
        return self._ready()[: max(0, round(self._samples * self._ratio) - self._given)]

    def _push(self, pcm: np.ndarray) -> None:
        frame = self._av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm)[None], format="flt", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.pts = self._samples
        self._graph.push(frame)

    def _ready(self) -> np.ndarray:
        pieces: list[Any] = [np.zeros(0, np.float32)]
        while True:
            try:
                pieces.append(self._graph.pull().to_ndarray()[0])
            except (BlockingIOError, EOFError):  # as PyAV says: not yet, and no more
                return np.concatenate(pieces)


def _tempos(speed: float) -> list[tuple[str, str]]:
    if speed == 1:
        return []
    steps = 1 if _SLOWEST <= speed <= _FASTEST else 2
    return [("atempo", repr(math.pow(speed, 1 / steps)))] * steps


def _rates(sample_rate_hz: int) -> list[tuple[str, str]]:
    resampled = [] if sample_rate_hz == SAMPLE_RATE_HZ else [("aresample", str(sample_rate_hz))]
    return [*resampled, ("aformat", "sample_fmts=flt:channel_layouts=mono")]
