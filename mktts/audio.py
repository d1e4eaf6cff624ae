"""PCM in and out: float32 mono in [-1, 1] inside the package, 16 bits or an audio file outside."""

from __future__ import annotations

import io
import math
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mktts.common import is_special, write_whole
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import AUDIBLE_DBFS, AUDIBLE_WINDOW_MS, SAMPLE_RATE_HZ

# Ends of names that can be written -> libsndfile's format and encoding.
FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
_BLOCK_SAMPLES = 2**16
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


def write_audio(path: Path | str, pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Path:
    """Writes `pcm` (S,) float32 as a mono audio file, whole or not at all; returns its path.

    The end of its name is the format: .wav and .flac (16 bits), .ogg (Vorbis), .opus (Opus, at 8, 12, 16, 24 or
    48 kHz), .mp3. A device or FIFO without one of them gets WAV.
    Raises AudioError for another name and as `encoded`, BackendUnavailable without soundfile for all but WAV.
    """
    return write_whole(path, encoded(pcm, format_of(path), sample_rate_hz))


def format_of(path: Path | str) -> str:
    """The key of FORMATS that `write_audio` gives a file of this name. Raises AudioError for another name."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind in FORMATS:
        return kind
    if is_special(path):
        return "wav"
    raise AudioError(f"{path}: expected a name that ends in .{', .'.join(FORMATS)}")


def require_format(kind: str) -> None:
    """Raises BackendUnavailable where this machine cannot make files of `kind`, a key of FORMATS."""
    if kind == "wav":
        return
    soundfile, (container, subtype) = _soundfile(), FORMATS[kind]
    if subtype not in soundfile.available_subtypes(container):
        raise BackendUnavailable(f"the installed libsndfile {soundfile.__libsndfile_version__} cannot write {kind}")


def encoded(pcm: np.ndarray, kind: str, sample_rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """`pcm` (S,) float32 as the bytes of a file of `kind`, a key of FORMATS.

    Raises AudioError as `to_pcm16` and for a rate that the format does not have, BackendUnavailable as
    `require_format`.
    """
    samples, file = to_pcm16(pcm), io.BytesIO()
    if kind == "wav":
        with wave.open(file, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(sample_rate_hz)
            out.writeframes(samples)
        return file.getvalue()
    require_format(kind)
    soundfile, (container, subtype) = _soundfile(), FORMATS[kind]
    try:
        with soundfile.SoundFile(file, "w", sample_rate_hz, 1, subtype, format=container) as out:
            whole = np.frombuffer(samples, "<i2").astype(np.int16)
            for start in range(0, len(whole), _BLOCK_SAMPLES):  # all at once, libsndfile's Vorbis crashes on 20 minutes
                out.write(whole[start : start + _BLOCK_SAMPLES])
    except soundfile.SoundFileError as error:
        raise AudioError(f"cannot write {kind} at {sample_rate_hz} Hz: {error}") from None
    return file.getvalue()


def read_audio(path: Path | str) -> tuple[np.ndarray, int]:
    """Reads an audio file: mono float32 (S,), channels averaged, and its sample rate in Hz.

    Raises VoiceError where there is no file or it is not audio, BackendUnavailable without soundfile.
    """
    soundfile, path = _soundfile(), Path(path)
    if not path.is_file():
        raise VoiceError(f"{path}: expected an audio file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        pcm, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise VoiceError(f"{path}: expected an audio file (WAV, FLAC, OGG, MP3), could not read it: {error}") from None
    return pcm.mean(1, dtype=np.float32), int(rate_hz)


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise BackendUnavailable(f"audio files other than written WAV need the package soundfile: {error}") from None
    return soundfile


def first_audible_sample(pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> int | None:
    """Where the first audible window of `pcm` (S,) begins; None where there is none.

    A window is 10 ms and is audible if its RMS is above -45 dB of full scale (`spec.AUDIBLE_DBFS`): a click of a few
    samples is not. Windows stand side by side from sample 0 on; what is left at the end and is shorter is none.
    """
    window = sample_rate_hz * AUDIBLE_WINDOW_MS // 1_000
    windows = pcm[: len(pcm) // window * window].reshape(-1, window)
    (audible,) = np.nonzero(np.mean(np.square(windows, dtype=np.float64), axis=1) > 10 ** (AUDIBLE_DBFS / 10))
    return int(audible[0]) * window if len(audible) else None


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
