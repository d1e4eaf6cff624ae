"""Audio files."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio.pcm import to_pcm16
from mktts.common import is_special, write_whole
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import SAMPLE_RATE_HZ

# Ends of names that can be written -> libsndfile's format and encoding.
FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}
ENDINGS = (*FORMATS, "aac")  # AAC is PyAV's: libsndfile does not have it
_BLOCK_SAMPLES = 2**16


def write_audio(path: Path | str, pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Path:
    """Writes `pcm` (S,) float32 as a mono audio file, whole or not at all; returns its path.

    The end of its name is the format: .wav and .flac (16 bits), .ogg (Vorbis), .opus (Opus, at 8, 12, 16, 24 or
    48 kHz), .mp3, .aac (ADTS). A device or FIFO without one of them gets WAV.
    Raises AudioError for another name and as `encoded`, BackendUnavailable without soundfile for all but WAV, and
    without PyAV for AAC.
    """
    return write_whole(path, encoded(pcm, format_of(path), sample_rate_hz))


def format_of(path: Path | str) -> str:
    """Which of ENDINGS `write_audio` gives a file of this name. Raises AudioError for another name."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind in ENDINGS:
        return kind
    if is_special(path):
        return "wav"
    raise AudioError(f"{path}: expected a name that ends in .{', .'.join(ENDINGS)}")


def require_format(kind: str) -> None:
    """Raises BackendUnavailable where this machine cannot make files of `kind`, one of ENDINGS."""
    if kind == "wav":
        return
    if kind == "aac":
        from mktts.audio.encoding import import_av

        import_av()
        return
    soundfile, (container, subtype) = _soundfile(), FORMATS[kind]
    if subtype not in soundfile.available_subtypes(container):
        raise BackendUnavailable(f"the installed libsndfile {soundfile.__libsndfile_version__} cannot write {kind}")


def encoded(pcm: np.ndarray, kind: str, sample_rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """`pcm` (S,) float32 as the bytes of a file of `kind`, one of ENDINGS.

    Raises AudioError as `to_pcm16` and for a rate that the format does not have, BackendUnavailable as
    `require_format`.
    """
    samples, file = to_pcm16(pcm), io.BytesIO()
    if kind == "wav":
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, sample_rate_hz, 0, "NONE", ""))
            out.writeframes(samples)
        return file.getvalue()
    if kind == "aac":
        from mktts.audio.encoding import AvEncoder

        encoder = AvEncoder(kind, sample_rate_hz)
        return encoder.feed(pcm) + encoder.finish()
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
