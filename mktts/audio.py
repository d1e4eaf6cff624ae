"""PCM in and out: float32 mono in [-1, 1] inside the package, 16-bit or WAV outside."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.files import write_whole
from mktts.spec import AUDIBLE_DBFS, SAMPLE_RATE_HZ

_FULL_SCALE = 2**15 - 1


def to_pcm16(pcm: np.ndarray) -> bytes:
    """Signed 16-bit little-endian samples of `pcm` (S,) float32; values beyond [-1, 1] are clipped.

    Raises AudioError unless `pcm` is one-dimensional, float32 and finite.
    """
    return np.rint(np.clip(_checked(pcm), -1, 1) * _FULL_SCALE).astype("<i2").tobytes()


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
