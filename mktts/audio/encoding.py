"""Speech as the bytes of a format while it is made: PCM goes in chunk by chunk, what is ready comes out.

    encoder = encoder_of("mp3")
    for chunk in stream:
        send(encoder.feed(chunk.pcm))
    send(encoder.finish())

`StreamFormat` lists the formats. pcm and wav need nothing; the others are made by PyAV, FFmpeg's libraries. A file
that is written whole, whose header can say how long it is, is `mktts.audio.encoded`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np

from mktts.audio.files import encoded
from mktts.audio.headers import streaming_wav_header
from mktts.audio.pcm import to_pcm16
from mktts.errors import AudioError
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.audio.tempo import Tempo

StreamFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
STREAM_FORMATS: tuple[StreamFormat, ...] = get_args(StreamFormat)
UNCODED: tuple[StreamFormat, ...] = ("wav", "pcm")  # samples as they are: no work, no package
MIN_SPEED, MAX_SPEED = 0.25, 4.0  # OpenAI's


class Encoder(Protocol):
    """Bytes of a format from PCM (S,) float32 at SAMPLE_RATE_HZ. One thread at a time; not reusable after `finish`."""

    def feed(self, pcm: np.ndarray) -> bytes:
        """What is ready once `pcm` is in; may be nothing yet. Raises AudioError as `to_pcm16`."""

    def finish(self) -> bytes:
        """The rest."""


def encoder_of(
    kind: StreamFormat, *, speed: float = 1.0, sample_rate_hz: int = SAMPLE_RATE_HZ, whole: bool = False
) -> Encoder:
    """An encoder into `kind`.

    speed: 0.25 to 4; 2 takes half the time, at the same pitch. sample_rate_hz: of what comes out (Opus is always
    decoded at 48 kHz: it is then what the encoder is given). whole: nothing comes before the end, and then a file that
    says how long it is, which a stream cannot.

    Raises AudioError for a rate that the format lacks, a speed or a format that there is not; BackendUnavailable where
    the package av (PyAV) is missing that this needs.
    """
    if kind not in STREAM_FORMATS:
        raise AudioError(f"format must be one of {', '.join(STREAM_FORMATS)}, got {kind!r}")
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise AudioError(f"speed must be {MIN_SPEED} to {MAX_SPEED:g}, got {speed!r}")
    encoder = _encoder(kind, sample_rate_hz, whole)
    if speed == 1 and sample_rate_hz == SAMPLE_RATE_HZ:
        return encoder
    from mktts.audio.tempo import Tempo

    return _Changed(Tempo(speed, sample_rate_hz), encoder)


def _encoder(kind: StreamFormat, sample_rate_hz: int, whole: bool) -> Encoder:
    if whole:
        return _Whole(kind, sample_rate_hz)
    if kind in UNCODED:
        return Samples(streaming_wav_header(sample_rate_hz) if kind == "wav" else b"")
    from mktts.audio.coding import Coder

    return Coder(kind, sample_rate_hz)


class Samples:
    """16-bit samples behind a header. An `Encoder` that has no work to do."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def feed(self, pcm: np.ndarray) -> bytes:
        return self.feed_pcm16(to_pcm16(pcm))

    def feed_pcm16(self, samples: bytes) -> bytes:
        """As `feed`, of samples that have 16 bits already."""
        header, self._header = self._header, b""
        return header + samples

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Whole:
    """Keeps what it is fed until the end."""

    def __init__(self, kind: str, sample_rate_hz: int) -> None:
        self._kind = kind
        self._sample_rate_hz = sample_rate_hz
        self._pcm = [np.zeros(0, np.float32)]

    def feed(self, pcm: np.ndarray) -> bytes:
        self._pcm.append(pcm)
        return b""

    def finish(self) -> bytes:
        pcm = np.concatenate(self._pcm)
        return to_pcm16(pcm) if self._kind == "pcm" else encoded(pcm, self._kind, self._sample_rate_hz)


class _Changed:
    """An encoder behind a filter."""

    def __init__(self, tempo: Tempo, encoder: Encoder) -> None:
        self._tempo = tempo
        self._encoder = encoder

    def feed(self, pcm: np.ndarray) -> bytes:
        changed = self._tempo.feed(pcm)
        return self._encoder.feed(changed) if len(changed) else b""

    def finish(self) -> bytes:
        rest = self._tempo.finish()
        return (self._encoder.feed(rest) if len(rest) else b"") + self._encoder.finish()
