"""What the ear minds and a recogniser does not: noise that repeats itself, a click at the start, a wrong spectrum.

All audio is float32 (n,) mono at 24 kHz, full scale 1.
"""

from __future__ import annotations

import numpy as np

from mktts.audio import peak_dbfs
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge.mcd import frames

NOISE_BAND_HZ = (3_500.0, 7_200.0)  # where hiss and breath are, above the voice's strong harmonics
BUZZ_LAG_S, FRAME_LAG_S = 0.020, 0.080  # a decoder's step before its last upsampling, and a frame
CLICK_S = 0.010
_CLICK_BAND_HZ = (1_000.0, SAMPLE_RATE_HZ)
_WINDOW_S, _HOP_S = 0.060, 0.010
_EDGE_HZ = 100.0  # of the band pass, half a cosine wide
_LOUD_DB = 30.0  # a window counts if its band is at most so far below the loudest of the utterance
_FAINT = 10 ** (-70 / 20)  # of full scale: and not fainter than this
_FLOOR_DB = -80.0  # of the full-scale sine's bin; what is fainter differs for no listener


def lag_correlation(samples: np.ndarray, lag_s: float, band_hz: tuple[float, float] = NOISE_BAND_HZ) -> float:
    """How much `band_hz` of the audio repeats itself after `lag_s`: the median of `lag_correlations`, nan for none.

    1: every window is the one before it again (a buzz of 1 / lag_s Hz); 0: noise that never repeats.
    """
    found = lag_correlations(samples, lag_s, band_hz)
    return float(np.median(found)) if len(found) else float("nan")


def lag_correlations(samples: np.ndarray, lag_s: float, band_hz: tuple[float, float] = NOISE_BAND_HZ) -> np.ndarray:
    """Normalised correlation in [-1, 1] of each 60 ms with the 60 ms that are `lag_s` later: float64 (windows,).

    Windows begin every 10 ms; those whose band is more than 30 dB below the utterance's loudest, or below -70 dBFS,
    are left out: silence has no hiss. For noise the values scatter by about 0.05.
    """
    lag, window, hop = (round(seconds * SAMPLE_RATE_HZ) for seconds in (lag_s, _WINDOW_S, _HOP_S))
    band = band_passed(samples, band_hz)
    if len(band) < lag + window:
        return np.zeros(0)
    cut = np.lib.stride_tricks.sliding_window_view(band, window)[::hop]
    late = np.lib.stride_tricks.sliding_window_view(band[lag:], window)[::hop]
    cut = cut[: len(late)]
    power, late_power = (cut**2).mean(1), (late**2).mean(1)
    least = max(power.max() * 10 ** (-_LOUD_DB / 10), _FAINT**2)
    loud = (power > least) & (late_power > least)
    both = (cut[loud] * late[loud]).mean(1)
    return both / np.sqrt(power[loud] * late_power[loud])


def band_passed(samples: np.ndarray, band_hz: tuple[float, float]) -> np.ndarray:
    """The part of (n,) between two frequencies, float64 (n,), without delay; edges are 100 Hz wide."""
    hz = np.fft.rfftfreq(max(1, len(samples)), 1 / SAMPLE_RATE_HZ)
    low, high = band_hz
    inside = np.clip(np.minimum(hz - low, high - hz) / _EDGE_HZ + 0.5, 0, 1)
    gain = 0.5 - 0.5 * np.cos(np.pi * inside)
    return np.fft.irfft(np.fft.rfft(samples.astype(np.float64)) * gain, len(samples)) if len(samples) else samples


def click_dbfs(samples: np.ndarray) -> float:
    """The step from the silence before the audio to its sample 0, dBFS; -inf for a zero."""
    return peak_dbfs(samples[:1])


def start_dbfs(samples: np.ndarray) -> float:
    """The loudest sample of the first 10 ms above 1 kHz, dBFS: a click that is not at sample 0 shows here.

    The filter takes 0.8 dB from a click of one sample. A breath at the start counts, too: the teacher's -80 to -65.
    """
    silence = round(CLICK_S * SAMPLE_RATE_HZ)
    heard = band_passed(np.pad(samples[: 10 * silence], silence), _CLICK_BAND_HZ)
    return peak_dbfs(heard[silence // 2 : 2 * silence])


def log_spectral_distance_db(reference: np.ndarray, other: np.ndarray) -> float:
    """Root mean square difference of two log spectra up to 8 kHz, in dB, mean over the frames of 43 ms every 10 ms.

    `other` is to be in step with `reference`, sample for sample, as a codec's copy is; the longer one is cut. Bins
    below -80 dBFS count as that level. (Gray and Markel 1976.)
    """
    length = min(len(reference), len(other))
    a, b = (_log_spectra(pcm[:length]) for pcm in (reference, other))
    return float(np.sqrt(((a - b) ** 2).mean(1)).mean())


def _log_spectra(pcm: np.ndarray) -> np.ndarray:
    """(frames, bins up to 8 kHz) in dB of a full-scale sine."""
    cut = frames(pcm)
    window = np.hanning(cut.shape[1])
    magnitudes = np.abs(np.fft.rfft(cut * window)) * (2 / window.sum())
    bins = round(8_000 / SAMPLE_RATE_HZ * cut.shape[1]) + 1
    return 20 * np.log10(np.maximum(magnitudes[:, :bins], 10 ** (_FLOOR_DB / 20)))
