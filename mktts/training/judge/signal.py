"""Measures of artefacts that are audible but do not disturb a recogniser; audio is float (n,), 24 kHz, full scale 1."""

import numpy as np

from mktts.spec import SAMPLE_RATE_HZ

STEP_SAMPLES = 480  # 20 ms: a decoder's step before its last upsamplings
CENTRES_HZ = tuple(1_000 * 2 ** (k / 3) for k in range(-5, 10))  # third-octave bands from 0.3 to 8 kHz
PITCH_BAND_HZ = (1_000.0, 3_400.0)  # where hearing is most sensitive and a comb masks the pitch
_WINDOW, _HOP = 1_440, 240  # 60 ms, 10 ms
_WINDOW_OF_PITCH, _NEAR = 600, 4  # samples: 25 ms, in which pitch hardly changes; range around the period
_LOUD_DB = 30.0  # a window counts if its band is at most this far below the loudest one of the utterance
_FAINT = 10 ** (-70 / 20)  # of full scale: the least level of a window that counts
_LOWEST_HZ, _HIGHEST_HZ = 70.0, 400.0  # pitch of voices
_VOICED = 0.5  # least autocorrelation of a voiced window, relative to lag 0


def band_passed(pcm: np.ndarray, low_hz: float, high_hz: float) -> np.ndarray:
    """The part of (n,) between two frequencies, float64, without delay; edges are a tenth of the band's width."""
    hz = np.fft.rfftfreq(max(1, len(pcm)), 1 / SAMPLE_RATE_HZ)
    inside = np.clip(np.minimum(hz - low_hz, high_hz - hz) / (0.1 * (high_hz - low_hz)) + 0.5, 0, 1)
    return np.fft.irfft(np.fft.rfft(pcm.astype(np.float64)) * (0.5 - 0.5 * np.cos(np.pi * inside)), len(pcm))


def repeated(band: np.ndarray, lags: np.ndarray | int, window: int = _WINDOW) -> np.ndarray:
    """Normalised correlation of windows, every 10 ms, with those `lags` samples later; nan for quiet ones. lags: one
    for all windows, or one for each (0: nan). For noise the values scatter around 0."""
    count = max(0, (len(band) - window - int(np.max(lags))) // _HOP + 1)
    lag = np.full(count, lags) if np.ndim(lags) == 0 else np.asarray(lags)[:count]
    starts = _HOP * np.arange(len(lag))
    power = np.concatenate(([0.0], np.cumsum(band * band)))
    now, later = power[starts + window] - power[starts], power[starts + lag + window] - power[starts + lag]
    both = np.zeros(len(lag))
    for each in np.unique(lag):
        at = starts[lag == each]
        products = np.concatenate(([0.0], np.cumsum(band[: len(band) - each] * band[each:])))
        both[lag == each] = products[at + window] - products[at]
    least = max(now.max(initial=0) * 10 ** (-_LOUD_DB / 10), _FAINT**2 * window)
    good = (np.minimum(now, later) > least) & (lag > 0)
    return np.where(good, both / np.sqrt(np.maximum(now * later, 1e-20)), np.nan)


def comb(pcm: np.ndarray) -> np.ndarray:
    """Correlation of each third-octave band after 20 ms, (bands,), the mean over its loud windows; nan if none."""
    bands = (band_passed(pcm, centre * 2 ** (-1 / 6), centre * 2 ** (1 / 6)) for centre in CENTRES_HZ)
    return np.array([_mean(repeated(band, STEP_SAMPLES)) for band in bands])


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def pitch_periods(pcm: np.ndarray) -> np.ndarray:
    """The pitch's period in samples, in windows of 60 ms every 10 ms; 0 if unvoiced. Uses the autocorrelation below 1
    kHz over the window's own (Boersma 1993), and the first of the peaks that are nearly as high as the highest."""
    if len(pcm) < _WINDOW:
        return np.zeros(0, int)
    windows = np.lib.stride_tricks.sliding_window_view(band_passed(pcm, 0, PITCH_BAND_HZ[0]), _WINDOW)[::_HOP]
    shape = np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft((windows - windows.mean(1, keepdims=True)) * shape, 2 * _WINDOW)) ** 2
    slope = np.fft.irfft(np.abs(np.fft.rfft(shape, 2 * _WINDOW)) ** 2)
    low, high = int(SAMPLE_RATE_HZ / _HIGHEST_HZ), int(SAMPLE_RATE_HZ / _LOWEST_HZ)
    found = np.fft.irfft(power)[:, : high + 2] / slope[: high + 2]
    level = found[:, :1]
    ratio = found[:, low:] / np.maximum(level, 1e-12)
    inner, most = ratio[:, 1:-1], ratio.max(1, keepdims=True)
    peak = (inner >= ratio[:, :-2]) & (inner > ratio[:, 2:]) & (inner > 0.9 * most)
    voiced = (most[:, 0] > _VOICED) & (level[:, 0] > max(level.max() * 1e-3, _FAINT**2 * _WINDOW)) & peak.any(1)
    return np.where(voiced, low + 1 + peak.argmax(1), 0)


def pitch_band(pcm: np.ndarray) -> float:
    """Correlation of 1 to 3.4 kHz after the pitch's period, the mean over voiced windows of 25 ms; nan if none. The
    best lag near the period is used, because one sample is a tenth of a wave there."""
    periods, band = pitch_periods(pcm), band_passed(pcm, *PITCH_BAND_HZ)
    if not periods.any():
        return float("nan")
    near = [repeated(band, np.where(periods > 0, periods + d, 0), _WINDOW_OF_PITCH) for d in range(-_NEAR, _NEAR + 1)]
    return _mean(np.nanmax(np.stack([row[: min(map(len, near))] for row in near]), 0))


def high_band_db(pcm: np.ndarray) -> float:
    """Energy above 8 kHz relative to the total, dB."""
    power = np.abs(np.fft.rfft(pcm.astype(np.float64))) ** 2
    hz = np.fft.rfftfreq(len(pcm), 1 / SAMPLE_RATE_HZ)
    return float(10 * np.log10((power[hz >= 8_000].sum() + 1e-12) / (power.sum() + 1e-9)))


def pitch_errors(student: np.ndarray, teacher: np.ndarray) -> tuple[float, float]:
    """Root mean square error in cents where both are voiced, and the fraction of frames voiced in only one of them,
    along the best path between log-mel spectra (dynamic time warping)."""
    from librosa import feature, sequence

    sizes = {"sr": SAMPLE_RATE_HZ, "n_fft": _WINDOW, "hop_length": _HOP, "n_mels": 32, "center": False}
    spectra = [np.log(feature.melspectrogram(y=pcm, **sizes) + 1e-6) for pcm in (student, teacher)]
    at = sequence.dtw(*spectra, metric="cityblock")[1]
    ours, theirs = pitch_periods(student)[at[:, 0]], pitch_periods(teacher)[at[:, 1]]
    both = (ours > 0) & (theirs > 0)
    cents = 1_200 * np.log2(theirs[both] / ours[both])
    return _mean(cents**2) ** 0.5, float(np.mean((ours > 0) != (theirs > 0)))
