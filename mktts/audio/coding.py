"""Encoders of PyAV (FFmpeg), set up for somebody who already listens: every packet is given out at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mktts.audio.pcm import to_pcm16
from mktts.errors import AudioError, BackendUnavailable

_FLUSHED = {"flush_packets": "1"}  # after each packet, instead of when FFmpeg's buffer of 32 KiB is full


@dataclass(frozen=True)
class _Codec:
    """container, name, options: FFmpeg's. bit_rate: bits per second; 0 where there is no such thing.

    sample_format: that the encoder is given; None takes its first.
    """

    container: str
    name: str
    bit_rate: int = 0
    sample_format: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)


# Bit rates of one channel at 24 kHz: two thirds of MP3's most there (160 000), more than speech needs in the others.
_CODECS = {
    # no tag and no Xing frame: both would promise a length. No bit reservoir: a frame is whole when it is there.
    "mp3": _Codec("mp3", "libmp3lame", 96_000, None, {"reservoir": "0"}, {"write_xing": "0", "id3v2_version": "0"}),
    # a page a packet of 20 ms; left alone, pages of a second
    "opus": _Codec("ogg", "libopus", 48_000, "s16", {"frame_duration": "20"}, {"page_duration": "20000"}),
    "aac": _Codec("adts", "aac", 64_000),
    # without room for tags, which is 8 KiB before the first sound
    "flac": _Codec("flac", "flac", 0, "s16", {}, {"metadata_header_padding": "0"}),
}


class Coder:
    """An `Encoder` (mktts.audio.encoding) of mp3, opus (in Ogg), aac (as ADTS) or flac.

    Raises BackendUnavailable without the package av or without the codec in it, AudioError for a rate that the codec
    does not have.
    """

    def __init__(self, kind: str, sample_rate_hz: int) -> None:
        av, codec = import_av(), _CODECS[kind]
        self._av = av
        self._out = _Out()
        self._sample_rate_hz = sample_rate_hz
        self._samples = 0
        try:
            rates_hz = av.Codec(codec.name, "w").audio_rates
        except av.codec.codec.UnknownCodecError:
            raise BackendUnavailable(f"the installed PyAV cannot write {kind}: it has no {codec.name}") from None
        if rates_hz and sample_rate_hz not in rates_hz:
            known = ", ".join(str(rate_hz) for rate_hz in sorted(rates_hz))
            raise AudioError(f"{kind} can have sample rates of {known} Hz, got {sample_rate_hz}")
        options = {**_FLUSHED, **codec.container_options}
        self._container = av.open(self._out, "w", format=codec.container, options=options)
        self._stream = self._container.add_stream(codec.name, rate=sample_rate_hz, options=codec.options)
        self._stream.layout = "mono"
        self._stream.codec_context.thread_count = 1
        if codec.sample_format:
            self._stream.format = codec.sample_format
        if codec.bit_rate:
            self._stream.bit_rate = codec.bit_rate

    def feed(self, pcm: np.ndarray) -> bytes:
        """What is ready once `pcm` (S,) float32 is in, and `sample_rate_hz` of them are a second."""
        samples = np.frombuffer(to_pcm16(pcm), "<i2").astype(np.int16)
        if not len(samples):
            return b""
        frame = self._av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._sample_rate_hz
        frame.pts = self._samples
        self._samples += len(samples)
        self._container.mux(self._stream.encode(frame))
        return self._out.taken()

    def finish(self) -> bytes:
        """The last packets and the container's end."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._out.taken()


class _Out:
    """A file that can only be written to: FFmpeg then knows that it cannot go back to a header."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: Any) -> int:
        self._data += bytes(data)
        return len(data)

    def taken(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


def import_av() -> Any:
    """The package av. Raises BackendUnavailable where it is missing."""
    try:
        import av
    except ImportError as error:
        raise BackendUnavailable(
            f"audio that is encoded while it is made, AAC, and another speed need the package av: {error}; "
            "pip install av"
        ) from None
    return av
