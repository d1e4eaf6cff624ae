"""PCM: float32 mono in [-1, 1] inside the package, 16 bits outside; its level, its onset, another sample rate."""

import math
from collections.abc import Sequence

import numpy as np

from mktts.errors import AudioError
from mktts.spec import AUDIBLE_DBFS, AUDIBLE_WINDOW_MS, SAMPLE_RATE_HZ

FULL_SCALE = 2**15 - 1  # of 16 bits: samples that are made from these, divided by it, give the same again


def to_pcm16(pcm: np.ndarray) -> bytes:
    """Signed 16-bit little-endian samples of `pcm` (S,) float32, clipped. Raises AudioError for other input and NaN."""
    if not isinstance(pcm, np.ndarray) or pcm.ndim != 1 or pcm.dtype != np.float32:
        shape = f"{pcm.dtype} {pcm.shape}" if isinstance(pcm, np.ndarray) else type(pcm).__name__
        raise AudioError(f"PCM must be a float32 array (samples,), got {shape}")
    # The sum is finite only where every sample is; it takes a third of the time of asking each.
    if not math.isfinite(np.add.reduce(pcm)) and not np.isfinite(pcm).all():
        raise AudioError(f"PCM must be finite, found NaN or infinity at sample {int(np.argmin(np.isfinite(pcm)))}")
    scaled = pcm * np.float32(FULL_SCALE)
    np.rint(scaled, out=scaled)
    np.minimum(scaled, FULL_SCALE, out=scaled)
    np.maximum(scaled, -FULL_SCALE, out=scaled)
    return scaled.astype("<i2").tobytes()


def rows_to_pcm16(pcm: np.ndarray) -> list[bytes | None]:
    """As `to_pcm16`, of each row of `pcm` (n, S) float32 in [-1, 1]; None for a row that is not finite. All rows in
    three passes: at each pass another thread may take the interpreter's lock."""
    finite = np.isfinite(np.add.reduce(pcm, axis=1)).tolist()
    with np.errstate(invalid="ignore"):  # of the rows that are not finite
        scaled = pcm * np.float32(FULL_SCALE)
        samples = np.rint(scaled, out=scaled).astype("<i2")
    return [row.tobytes() if good else None for row, good in zip(samples, finite, strict=True)]


def joined(pieces: Sequence[np.ndarray | bytearray]) -> np.ndarray:
    """Pieces of PCM (S,) float32, arrays or their bytes, one after another, in memory of their own. As
    `np.concatenate`, which lets go of the interpreter's lock, and where another thread takes it, waits for it."""
    return np.frombuffer(bytearray().join(pieces), np.float32)


def from_pcm16(samples: bytes | np.ndarray) -> np.ndarray:
    """float32 in [-1, 1), of the same shape, of signed 16-bit samples: int16, or little-endian bytes."""
    if isinstance(samples, bytes):
        samples = np.frombuffer(samples, "<i2")
    return samples.astype(np.float32) / np.float32(2**15)


def first_audible_sample(pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> int | None:
    """Where the first audible window of `pcm` (S,) begins; None where there is none. Windows of 10 ms stand side by
    side from sample 0 on; one is audible if its RMS is above `spec.AUDIBLE_DBFS`: a click of a few samples is not."""
    window = sample_rate_hz * AUDIBLE_WINDOW_MS // 1_000
    windows = pcm[: len(pcm) // window * window].reshape(-1, window)
    (audible,) = np.nonzero(np.mean(np.square(windows, dtype=np.float64), axis=1) > 10 ** (AUDIBLE_DBFS / 10))
    return int(audible[0]) * window if len(audible) else None


def resample(pcm: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """float32 (n,) at `from_hz` -> float32 (ceil(n * to / from),) at `to_hz`, by its whole spectrum."""
    if from_hz == to_hz:
        return pcm
    divisor = math.gcd(from_hz, to_hz)
    up, down = to_hz // divisor, from_hz // divisor
    blocks = -(-(len(pcm) + from_hz // 10) // down)  # whole ones, with a tenth of a second between end and start
    n, m = blocks * down, blocks * up
    spectrum = np.fft.rfft(np.pad(pcm.astype(np.float64), (0, n - len(pcm))))
    found = np.fft.irfft(spectrum[: m // 2 + 1], m) * (m / n)
    return found[: -(-len(pcm) * up // down)].astype(np.float32)
