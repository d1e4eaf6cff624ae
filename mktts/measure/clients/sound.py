"""What a client has received, heard by something else than what made it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from mktts.audio import from_pcm16, peak_dbfs
from mktts.errors import MetricsError
from mktts.spec import SAMPLE_RATE_HZ

_SILENT_DBFS = -45.0
_FFMPEGS = ("aac", "flac")  # libsndfile has no AAC, and reads no FLAC that does not say how long it is, as streams do
_TOLERANCE_S = 0.1  # what the frames of MP3, AAC and Opus add


@dataclass(frozen=True)
class Heard:
    """seconds: of sound. by: what decoded it."""

    seconds: float
    by: str


def heard(data: bytes, kind: str) -> Heard:
    """kind: pcm, or what a file holds: wav, mp3, opus (libsndfile hears them), flac or aac (FFmpeg).

    Raises MetricsError for what is no such sound, or is silent.
    """
    if kind == "pcm":
        return Heard(_checked(from_pcm16(data), SAMPLE_RATE_HZ), "nobody: it is raw")
    try:
        pcm, rate_hz, by = _by_ffmpeg(data, kind) if kind in _FFMPEGS else _by_libsndfile(data, kind)
    except Exception as error:  # whatever a decoder makes of it
        raise MetricsError(f"expected {kind}, could not decode {len(data)} bytes: {error}") from None
    return Heard(_checked(pcm, rate_hz), by)


def check_length(found: Heard, expected_s: float) -> str:
    """What was heard, in words. Raises MetricsError where it is not as long as it should be."""
    words = f"{found.seconds:.2f} s of {expected_s:.2f} s, decoded by {found.by}"
    if abs(found.seconds - expected_s) > _TOLERANCE_S:
        raise MetricsError(words)
    return words


def _by_libsndfile(data: bytes, kind: str) -> tuple[np.ndarray, int, str]:
    import soundfile

    names = {"wav": "WAV", "mp3": "MP3", "opus": "OGG"}
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format != names[kind]:
            raise MetricsError(f"it holds {file.format}")
        return file.read(dtype="float32"), file.samplerate, f"libsndfile {soundfile.__libsndfile_version__}"


def _by_ffmpeg(data: bytes, kind: str) -> tuple[np.ndarray, int, str]:
    import av

    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.audio
        if stream.codec_context.codec.name != kind:
            raise MetricsError(f"it holds {stream.codec_context.codec.name}")
        to_float = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [plain for frame in container.decode(stream) for plain in to_float.resample(frame)]
        pcm = np.concatenate([frame.to_ndarray()[0] for frame in frames])
        return pcm, stream.rate, f"FFmpeg (PyAV {av.__version__})"


def _checked(pcm: np.ndarray, rate_hz: int) -> float:
    if not len(pcm) or peak_dbfs(pcm) < _SILENT_DBFS:
        raise MetricsError(f"expected sound, got {len(pcm)} samples with a peak of {peak_dbfs(pcm):.0f} dBFS")
    return len(pcm) / rate_hz
