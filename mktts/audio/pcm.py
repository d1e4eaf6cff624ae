"""PCM, float32 mono in [-1, 1] inside the package and 16 bits outside: conversion, first audible sample, resampling."""

import math
from collections.abc import Sequence

import numpy as np

from mktts.errors import AudioError
from mktts.spec import AUDIBLE_DBFS, AUDIBLE_WINDOW_MS, SAMPLE_RATE_HZ

FULL_SCALE = 2**15 - 1  # for 16 bits: samples divided by it and converted back are unchanged


def to_pcm16(pcm: np.ndarray) -> bytes:
    """Signed 16-bit little-endian samples of `pcm` (S,) float32, clipped. Raises AudioError for other input and NaN."""
    if not isinstance(pcm, np.ndarray) or pcm.ndim != 1 or pcm.dtype != np.float32:
        shape = f"{pcm.dtype} {pcm.shape}" if isinstance(pcm, np.ndarray) else type(pcm).__name__
        raise AudioError(f"PCM must be a float32 array (samples,), got {shape}")
    # The sum is finite only if every sample is; this takes a third of the time of checking each.
    if not math.isfinite(np.add.reduce(pcm)) and not np.isfinite(pcm).all():
        raise AudioError(f"PCM must be finite, found NaN or infinity at sample {int(np.argmin(np.isfinite(pcm)))}")
    scaled = pcm * np.float32(FULL_SCALE)
    np.rint(scaled, out=scaled)
    np.minimum(scaled, FULL_SCALE, out=scaled)
    np.maximum(scaled, -FULL_SCALE, out=scaled)
    return scaled.astype("<i2").tobytes()


def rows_to_pcm16(pcm: np.ndarray) -> list[bytes | None]:
    """Converts each row of `pcm` (n, S) float32 in [-1, 1] as `to_pcm16`; None for a row that is not finite. Takes just
    three passes for all rows, because in each pass another thread may take the interpreter's lock."""
    finite = np.isfinite(np.add.reduce(pcm, axis=1)).tolist()
    with np.errstate(invalid="ignore"):  # for rows that are not finite
        scaled = pcm * np.float32(FULL_SCALE)
        samples = np.rint(scaled, out=scaled).astype("<i2")
    return [row.tobytes() if good else None for row, good in zip(samples, finite, strict=True)]


def joined(pieces: Sequence[np.ndarray | bytearray]) -> np.ndarray:
    """Concatenates pieces of PCM (S,) float32, arrays or their bytes, into new memory. Unlike `np.concatenate`, it does
    not release the interpreter's lock, and so need not wait for another thread to get it back."""
    return np.frombuffer(bytearray().join(pieces), np.float32)


def from_pcm16(samples: bytes | np.ndarray) -> np.ndarray:
    """Converts signed 16-bit samples, int16 or little-endian bytes, to float32 in [-1, 1), of the same shape."""
    if isinstance(samples, bytes):
        samples = np.frombuffer(samples, "<i2")
    return samples.astype(np.float32) / np.float32(2**15)


def first_audible_sample(pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> int | None:
    """The start of the first audible window of `pcm` (S,), or None. Windows are adjacent, 10 ms long and start at
    sample 0; one is audible if its RMS is above `spec.AUDIBLE_DBFS`, which excludes clicks of a few samples."""
    window = sample_rate_hz * AUDIBLE_WINDOW_MS // 1_000
    windows = pcm[: len(pcm) // window * window].reshape(-1, window)
    (audible,) = np.nonzero(np.mean(np.square(windows, dtype=np.float64), axis=1) > 10 ** (AUDIBLE_DBFS / 10))
    return int(audible[0]) * window if len(audible) else None


def resample(pcm: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Resamples float32 (n,) at `from_hz` -> float32 (ceil(n * to / from),) at `to_hz`, by one FFT of the whole."""
    if from_hz == to_hz:
        return pcm
    divisor = math.gcd(from_hz, to_hz)
    up, down = to_hz // divisor, from_hz // divisor
    blocks = -(-(len(pcm) + from_hz // 10) // down)  # at least a tenth of a second of padding between end and start
    n, m = blocks * down, blocks * up
    spectrum = np.fft.rfft(np.pad(pcm.astype(np.float64), (0, n - len(pcm))))
    found = np.fft.irfft(spectrum[: m // 2 + 1], m) * (m / n)
    return found[: -(-len(pcm) * up // down)].astype(np.float32)
