"""Another sample rate, by a windowed sinc."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

_KAISER_BETA = 9.0  # of the resampler: stop band below -90 dB


def resample(pcm: np.ndarray, from_hz: int, to_hz: int, cutoff: float, half_taps: int) -> np.ndarray:
    """float (n,) at `from_hz` -> float32 (ceil(n * to / from),) at `to_hz`, without delay. Outside `pcm` is silence.

    cutoff: where the low pass has halved the amplitude, as a share of the lower rate's Nyquist frequency. half_taps: of
    the low pass, to either side of its middle, at the least common multiple of both rates (48 kHz for 16 and 24).
    """
    common = math.gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    out = np.zeros(-(-up * len(pcm) // down))
    if not len(pcm):
        return out.astype(np.float32)
    taps, source = _low_pass(up, down, cutoff, half_taps), pcm.astype(np.float64)
    for phase in range(min(up, len(out))):
        # out[up m + phase] sums taps[half_taps + down (up m + phase) - up k] pcm[k] over k: every up-th from `start`
        lead, start = divmod(down * phase + half_taps, up)
        part = out[phase::up]
        part[:] = np.convolve(source, taps[start::up])[lead::down][: len(part)]
    return out.astype(np.float32)


@cache
def _low_pass(up: int, down: int, cutoff: float, half_taps: int) -> np.ndarray:
    """(2 * half + 1,) taps at `up` times the source's rate; gain `up`, for the zeros between the source's samples."""
    n, widest = np.arange(-half_taps, half_taps + 1), max(up, down)
    return np.sinc(n * cutoff / widest) * np.kaiser(len(n), _KAISER_BETA) * (cutoff * up / widest)
