"""Mel-cepstral distortion after time alignment, and the cepstra and pitch that tell speakers apart."""

from __future__ import annotations

import numpy as np

from mktts.errors import MetricsError
from mktts.spec import SAMPLE_RATE_HZ

_WINDOW, _HOP, _BANDS, _COEFFICIENTS = 1024, 240, 40, 13
_FLOOR = 1e-5
_DB = 10 / np.log(10) * np.sqrt(2)  # Kubichek 1993
_LOWEST_HZ, _HIGHEST_HZ, _VOICED = 60.0, 400.0, 0.5


def cepstra(pcm: np.ndarray) -> np.ndarray:
    """float32 (n,) at 24 kHz -> mel cepstra 1 to 13 (frames, 13) of natural-log mel magnitudes, every 10 ms."""
    if len(pcm) < _WINDOW:
        raise MetricsError(f"expected at least {_WINDOW} samples, got {len(pcm)}")
    magnitudes = np.abs(np.fft.rfft(_frames(pcm) * np.hanning(_WINDOW)))
    logs = np.log(np.maximum(magnitudes @ _mel().T, _FLOOR))
    n = np.arange(_BANDS) + 0.5
    basis = np.cos(np.pi / _BANDS * np.arange(1, _COEFFICIENTS + 1)[:, None] * n) * np.sqrt(2 / _BANDS)
    return logs @ basis.T


def distortion_db(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over the dynamic-time-warping path of 10/ln 10 * sqrt(2 sum (difference)^2), in dB; 24 kHz audio in."""
    x, y = cepstra(a), cepstra(b)
    cost = np.sqrt(np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T, 0))
    total = np.full((len(x) + 1, len(y) + 1), np.inf)
    steps = np.zeros_like(total)
    total[0, 0] = 0
    for i in range(1, len(x) + 1):
        for j in range(1, len(y) + 1):
            u, v = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
            total[i, j], steps[i, j] = total[u, v] + cost[i - 1, j - 1], steps[u, v] + 1
    return float(_DB * total[-1, -1] / steps[-1, -1])


def median_f0_hz(pcm: np.ndarray) -> float:
    """Median pitch of the voiced frames by autocorrelation; nan where no frame is voiced."""
    frames = _frames(pcm) * np.hanning(_WINDOW)
    frames = frames - frames.mean(1, keepdims=True)
    power = np.abs(np.fft.rfft(frames, 2 * _WINDOW)) ** 2
    window = np.fft.irfft(np.abs(np.fft.rfft(np.hanning(_WINDOW), 2 * _WINDOW)) ** 2)
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


def _frames(pcm: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(pcm.astype(np.float64), _WINDOW)[::_HOP]


def _mel() -> np.ndarray:
    """(bands, window / 2 + 1) triangles, HTK's mel scale up to 8 kHz: the teacher has nothing above."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), _BANDS + 2) / 2595) - 1)
    hz = np.fft.rfftfreq(_WINDOW, 1 / SAMPLE_RATE_HZ)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(0, np.minimum((hz - low) / (middle - low), (high - hz) / (high - middle)))
