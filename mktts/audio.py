"""PCM in and out: float32 mono in [-1, 1] inside the package, 16-bit or WAV outside."""

from __future__ import annotations

import io
import math
import wave
from functools import cache
from pathlib import Path

import numpy as np

from mktts.common import write_whole
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import AUDIBLE_DBFS, SAMPLE_RATE_HZ

_FULL_SCALE = 2**15 - 1
_KAISER_BETA = 9.0  # of the resampler: stop band below -90 dB


def to_pcm16(pcm: np.ndarray) -> bytes:
    """Signed 16-bit little-endian samples of `pcm` (S,) float32; values beyond [-1, 1] are clipped.

    Raises AudioError unless `pcm` is one-dimensional, float32 and finite.
    """
    return np.rint(np.clip(_checked(pcm), -1, 1) * _FULL_SCALE).astype("<i2").tobytes()


def from_pcm16(samples: bytes | np.ndarray) -> np.ndarray:
    """float32 in [-1, 1), of the same shape, of signed 16-bit samples: int16, or little-endian bytes."""
    if isinstance(samples, bytes):
        samples = np.frombuffer(samples, "<i2")
    return samples.astype(np.float32) / np.float32(2**15)


def write_wav(path: Path | str, pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Path:
    """Writes `pcm` (S,) float32 as a mono 16-bit WAV file, whole or not at all. Raises AudioError as `to_pcm16`."""
    samples, file = to_pcm16(pcm), io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate_hz)
        out.writeframes(samples)
    return write_whole(path, file.getvalue())


def read_audio(path: Path | str) -> tuple[np.ndarray, int]:
    """Reads an audio file: mono float32 (S,), channels averaged, and its sample rate in Hz.

    Raises VoiceError where there is no file or it is not audio, BackendUnavailable without soundfile.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"reading audio files needs the package soundfile: {error}") from None
    path = Path(path)
    if not path.is_file():
        raise VoiceError(f"{path}: expected an audio file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        pcm, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise VoiceError(f"{path}: expected an audio file (WAV, FLAC, OGG, MP3), could not read it: {error}") from None
    return pcm.mean(1, dtype=np.float32), int(rate_hz)


def first_audible_sample(pcm: np.ndarray) -> int | None:
    """Index of the first sample above -60 dBFS (`spec.AUDIBLE_DBFS`) in `pcm` (S,), None where there is none."""
    audible = np.abs(pcm) > 10 ** (AUDIBLE_DBFS / 20)
    first = int(audible.argmax()) if audible.size else 0
    return first if audible.size and audible[first] else None


def peak_dbfs(pcm: np.ndarray) -> float:
    """Level of the loudest sample in dB of full scale; -inf for silence or no samples."""
    return _dbfs(np.abs(pcm).max(initial=0.0))


def level_dbfs(pcm: np.ndarray) -> float:
    """Root-mean-square level in dB of full scale; -inf for silence or no samples."""
    return _dbfs(np.sqrt(np.mean(np.square(pcm, dtype=np.float64)))) if pcm.size else -np.inf


def _dbfs(amplitude: float) -> float:
    return float(20 * np.log10(amplitude)) if amplitude > 0 else -np.inf


def _checked(pcm: np.ndarray) -> np.ndarray:
    if not isinstance(pcm, np.ndarray) or pcm.ndim != 1 or pcm.dtype != np.float32:
        shape = f"{pcm.dtype} {pcm.shape}" if isinstance(pcm, np.ndarray) else type(pcm).__name__
        raise AudioError(f"PCM must be a float32 array (samples,), got {shape}")
    if not np.isfinite(pcm).all():
        raise AudioError(f"PCM must be finite, found NaN or infinity at sample {int(np.argmin(np.isfinite(pcm)))}")
    return pcm


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
