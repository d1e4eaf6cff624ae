"""Mel-cepstral distortion after time alignment, and the cepstra it compares."""

from __future__ import annotations

from functools import cache

import numpy as np

from mktts.spec import SAMPLE_RATE_HZ

WINDOW, HOP = 1024, 240  # 43 ms every 10 ms
_BANDS, _COEFFICIENTS = 40, 13
_FLOOR = WINDOW / 4 * 10 ** (-80 / 20)  # of a sine at -80 dBFS: what is fainter differs for no listener
_DB = 10 / np.log(10) * np.sqrt(2)  # Kubichek 1993


def frames(pcm: np.ndarray) -> np.ndarray:
    """float32 (n,) at 24 kHz -> (frames, 1024) every 10 ms; what is shorter than a window is filled with zeros."""
    padded = np.pad(pcm.astype(np.float64), (0, max(0, WINDOW - len(pcm))))
    return np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]


def cepstra(pcm: np.ndarray) -> np.ndarray:
    """float32 (n,) at 24 kHz -> mel cepstra 1 to 13 (frames, 13) of natural-log mel magnitudes, every 10 ms.

    Scaled so that log magnitude = c_0 + sum c_m cos(m w), as the constant of the distortion takes them: the distance
    of two frames is then the root mean square difference of their smooth spectra in dB. c_0, the level, is left out.
    """
    magnitudes = np.abs(np.fft.rfft(frames(pcm) * np.hanning(WINDOW)))
    logs = np.log(np.maximum(magnitudes @ _mel().T, _FLOOR))
    n = np.arange(_BANDS) + 0.5
    basis = np.cos(np.pi / _BANDS * np.arange(1, _COEFFICIENTS + 1)[:, None] * n) * 2 / _BANDS
    return logs @ basis.T


def distortion_db(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over the dynamic-time-warping path of 10/ln 10 * sqrt(2 sum (difference)^2), in dB; 24 kHz audio in."""
    x, y = cepstra(a), cepstra(b)
    cost = np.sqrt(np.maximum((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T, 0))
    total, steps = warp(cost)
    return float(_DB * total / steps)


def warp(cost: np.ndarray) -> tuple[float, int]:
    """Sum and number of cells of the cheapest path through `cost` (I, J) from corner to corner, by steps of one."""
    rows, columns = cost.shape
    # one anti-diagonal at a time, indexed by row + 1: index 0 is a border
    total = [np.full(rows + 1, np.inf) for _ in range(3)]
    steps = [np.zeros(rows + 1, np.int64) for _ in range(3)]
    total[1][0] = 0  # the cell before the first
    for diagonal in range(rows + columns - 1):
        low, high = max(0, diagonal - columns + 1), min(rows, diagonal + 1)
        i = np.arange(low, high)
        older, newer, now = (total[(diagonal + k) % 3] for k in (1, 2, 0))
        older_steps, newer_steps, now_steps = (steps[(diagonal + k) % 3] for k in (1, 2, 0))
        came = np.stack((older[i], newer[i], newer[i + 1]))  # from (i-1, j-1), (i-1, j), (i, j-1)
        chosen = came.argmin(0)
        now[:] = np.inf
        now[i + 1] = came[chosen, i - low] + cost[i, diagonal - i]
        before = np.stack((older_steps[i], newer_steps[i], newer_steps[i + 1]))
        now_steps[i + 1] = before[chosen, i - low] + 1
    last = (rows + columns - 2) % 3
    return float(total[last][rows]), int(steps[last][rows])


@cache
def _mel() -> np.ndarray:
    """(bands, window / 2 + 1) triangles, HTK's mel scale up to 8 kHz: the teacher has nothing above."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), _BANDS + 2) / 2595) - 1)
    hz = np.fft.rfftfreq(WINDOW, 1 / SAMPLE_RATE_HZ)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    return np.maximum(0, np.minimum((hz - low) / (middle - low), (high - hz) / (high - middle)))
