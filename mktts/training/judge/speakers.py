"""What tells speakers apart: pitch, and the mean and spread of an utterance's cepstra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mktts.errors import MetricsError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge.mcd import WINDOW, cepstra, frames

_LOWEST_HZ, _HIGHEST_HZ, _VOICED = 60.0, 400.0, 0.5
_LEAST_SPREAD = 1e-6


def median_f0_hz(pcm: np.ndarray) -> float:
    """Median pitch of the voiced frames of (n,) at 24 kHz by autocorrelation; nan where no frame is voiced."""
    windowed = frames(pcm) * np.hanning(WINDOW)
    windowed = windowed - windowed.mean(1, keepdims=True)
    power = np.abs(np.fft.rfft(windowed, 2 * WINDOW)) ** 2
    window = np.fft.irfft(np.abs(np.fft.rfft(np.hanning(WINDOW), 2 * WINDOW)) ** 2)
    low, high = int(SAMPLE_RATE_HZ / _HIGHEST_HZ), int(SAMPLE_RATE_HZ / _LOWEST_HZ)
    found = np.fft.irfft(power)[:, : high + 1] / window[: high + 1]  # the window's own slope taken out (Boersma 1993)
    loud = found[:, 0] > 0.05 * found[:, 0].max(initial=0)
    ratio = found[:, low:] / np.maximum(found[:, :1], 1e-12)
    # the first peak nearly as high as the highest: multiples of the period are as high as the period itself
    inner = ratio[:, 1:-1]
    peak = (inner >= ratio[:, :-2]) & (inner > ratio[:, 2:]) & (inner > 0.9 * ratio.max(1, keepdims=True))
    lag = low + 1 + peak.argmax(1)
    voiced = loud & (ratio.max(1) > _VOICED) & peak.any(1)
    return float(np.median(SAMPLE_RATE_HZ / lag[voiced])) if voiced.any() else float("nan")


def embedding(pcm: np.ndarray) -> np.ndarray:
    """(n,) at 24 kHz -> (26,): means and standard deviations of mel cepstra 1 to 13 over the utterance."""
    found = cepstra(pcm)
    return np.concatenate((found.mean(0), found.std(0)))


@dataclass(frozen=True)
class Centroids:
    """The mean embedding of each speaker; distances count in standard deviations within a speaker."""

    speakers: tuple[str, ...]
    means: np.ndarray  # (speakers, 26)
    spread: np.ndarray  # (26,)

    @classmethod
    def of(cls, embeddings: Mapping[str, Sequence[np.ndarray]]) -> Centroids:
        """From utterances of each speaker. Raises MetricsError where one has fewer than two."""
        few = [speaker for speaker, many in embeddings.items() if len(many) < 2]
        if few or not embeddings:
            raise MetricsError(f"expected at least two utterances of every speaker, got fewer of {few or 'all'}")
        means = np.stack([np.mean(many, 0) for many in embeddings.values()])
        within = np.mean([np.var(many, 0) for many in embeddings.values()], 0)
        return cls(tuple(embeddings), means, np.maximum(np.sqrt(within), _LEAST_SPREAD))

    def nearest(self, utterance: np.ndarray) -> str:
        """The speaker whose centroid is nearest to an embedding (26,)."""
        return self.speakers[int((((self.means - utterance) / self.spread) ** 2).sum(1).argmin())]
