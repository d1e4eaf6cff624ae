"""Audio files, and streaming encoders: PCM goes in, encoded bytes come out as soon as they are ready. pcm and wav need
no encoder; the other formats use PyAV, that is, FFmpeg's libraries."""

import io
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np

from mktts.audio.pcm import to_pcm16
from mktts.common import checked_int, is_special, one_of, write_whole
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import SAMPLE_RATE_HZ

StreamFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "mulaw", "alaw"]
STREAM_FORMATS: tuple[StreamFormat, ...] = get_args(StreamFormat)
UNCODED: tuple[StreamFormat, ...] = ("wav", "pcm")  # plain samples, which need no encoder
MIN_SPEED, MAX_SPEED = 0.25, 4.0  # OpenAI's
_TELEPHONE: tuple[StreamFormat, ...] = ("mulaw", "alaw")  # ITU-T G.711, without a header
_TELEPHONE_RATE_HZ = 8_000
_WAV_HEADER = struct.Struct("<4s4s8sIHHIIHH4s4s")
_UNKNOWN = b"\xff" * 4  # the size written to pipes; readers then read to the end of the file
_FLUSHED = {"flush_packets": "1"}  # flush after each packet instead of when FFmpeg's buffer of 32 KiB is full
_TAIL_S = 0.2  # silence appended at the end, because atempo drops the last part of a window

# File name endings that can be written -> libsndfile's format and encoding.
FORMATS = {
    "wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}  # fmt: skip
ENDINGS = (*FORMATS, "aac")  # AAC needs PyAV, as libsndfile does not support it
_BLOCK_BYTES = 2**17


class Encoder:
    """Encodes PCM (S,) float32 at SAMPLE_RATE_HZ to a format. One thread at a time; not reusable after `finish`.

    takes_pcm16: the format stores 16-bit samples unchanged, so that `feed_pcm16` can take samples as they are."""

    def __init__(
        self, kind: StreamFormat, *, speed: float = 1.0, sample_rate_hz: int | None = None, whole: bool = False
    ) -> None:
        """speed: 0.25 to 4; 2 takes half the time, at the same pitch. sample_rate_hz: of the output (for Opus, of the
        encoder's input); None: 8 kHz for G.711, else the speech's rate. whole: return everything at the end, as a file
        whose header has its length, which is impossible for a stream. Raises AudioError for an unsupported rate, speed
        or format, BackendUnavailable if this needs the package av (PyAV) and it is missing."""
        one_of("format", kind, STREAM_FORMATS, AudioError)
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise AudioError(f"speed must be {MIN_SPEED} to {MAX_SPEED:g}, got {speed!r}")
        usual_hz = _TELEPHONE_RATE_HZ if kind in _TELEPHONE else SAMPLE_RATE_HZ
        self.kind, self.speed, self.rate_hz, self._whole = kind, speed, sample_rate_hz or usual_hz, whole
        self._kept: list[np.ndarray] = []
        self._is_file = whole and kind in ("wav", "flac")  # their headers contain the length
        self._av = None if self._is_file or kind in UNCODED else AvEncoder(kind, self.rate_hz)
        same = speed == 1 and self.rate_hz == SAMPLE_RATE_HZ
        self._tempo = None if same else Tempo(speed, self.rate_hz)
        self.takes_pcm16 = same and not whole and kind in UNCODED
        self._header = b""
        if kind == "wav":  # one channel, 16 bits
            layout = (16, 1, 1, self.rate_hz, 2 * self.rate_hz, 2, 16)
            self._header = _WAV_HEADER.pack(b"RIFF", _UNKNOWN, b"WAVEfmt ", *layout, b"data", _UNKNOWN)

    def feed(self, pcm: np.ndarray) -> bytes:
        """Encodes `pcm` and returns the bytes that are ready, perhaps none. Raises AudioError as `to_pcm16`."""
        pcm = pcm if self._tempo is None else self._tempo.feed(pcm)
        if self._whole:
            self._kept.append(pcm)
            return b""
        return self._encode(pcm)

    def feed_pcm16(self, samples: bytes) -> bytes:
        """As `feed`, for 16-bit samples; only if the encoder `takes_pcm16`."""
        header, self._header = self._header, b""
        return header + samples

    def finish(self) -> bytes:
        """Returns the remaining bytes."""
        rest = np.zeros(0, np.float32) if self._tempo is None else self._tempo.finish()
        pcm = np.concatenate([*self._kept, rest])
        if self._is_file:
            return encoded(pcm, self.kind, self.rate_hz)
        return self._encode(pcm) + (b"" if self._av is None else self._av.finish())

    def _encode(self, pcm: np.ndarray) -> bytes:
        return self.feed_pcm16(to_pcm16(pcm)) if self._av is None else self._av.feed(pcm)


def import_av() -> Any:
    """Imports the package av. Raises BackendUnavailable if it is missing."""
    try:
        import av
    except ImportError as error:
        what = "audio that is encoded while it is made, AAC, and another speed"
        raise BackendUnavailable(f"{what} need the package av: {error}; pip install av") from None
    return av


# FFmpeg's container and codec, options of the codec, options of the container. Bit rates (b) are for one channel at
# 24 kHz: 60 % of MP3's maximum there (160,000), and more than speech needs in the other formats.
_CODECS: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    # no tag and no Xing frame, which would state a length; no bit reservoir, so that every frame is self-contained
    "mp3": ("mp3", "libmp3lame", {"b": "96000", "reservoir": "0"}, {"write_xing": "0", "id3v2_version": "0"}),
    # one page for each packet of 20 ms; the default is pages of a second
    "opus": ("ogg", "libopus", {"b": "48000", "frame_duration": "20"}, {"page_duration": "20000"}),
    "aac": ("adts", "aac", {"b": "64000"}, {}),
    # without padding for tags, which would be 8 KiB before the first sound
    "flac": ("flac", "flac", {}, {"metadata_header_padding": "0"}),
    **{kind: (kind, f"pcm_{kind}", {}, {}) for kind in _TELEPHONE},
}


class AvEncoder:
    """Encodes PCM with one of _CODECS and returns every packet at once. Raises BackendUnavailable without the package
    av or the codec in it, AudioError for a sample rate that the codec does not support."""

    def __init__(self, kind: str, sample_rate_hz: int) -> None:
        av, (container, name, options, container_options) = import_av(), _CODECS[kind]
        self._av, self._sample_rate_hz, self._samples = av, sample_rate_hz, 0
        self._made: list[bytes] = []
        try:
            rates_hz = av.Codec(name, "w").audio_rates
        except av.codec.codec.UnknownCodecError:
            raise BackendUnavailable(f"the installed PyAV cannot write {kind}: it has no {name}") from None
        rates_hz = (_TELEPHONE_RATE_HZ,) if kind in _TELEPHONE else rates_hz
        if rates_hz and sample_rate_hz not in rates_hz:
            known = ", ".join(str(rate_hz) for rate_hz in sorted(rates_hz))
            raise AudioError(f"{kind} can have sample rates of {known} Hz, got {sample_rate_hz}")
        out = SimpleNamespace(write=self._made.append)  # no `seek`, so FFmpeg knows that it cannot rewrite a header
        self._container = av.open(out, "w", format=container, options={**_FLUSHED, **container_options})
        self._stream = self._container.add_stream(name, rate=sample_rate_hz, options=options)
        self._stream.layout = "mono"
        self._stream.codec_context.thread_count = 1

    def feed(self, pcm: np.ndarray) -> bytes:
        samples = np.frombuffer(to_pcm16(pcm), "<i2").astype(np.int16)
        if not len(samples):
            return b""
        frame = self._av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._sample_rate_hz
        frame.pts = self._samples
        self._samples += len(samples)
        self._container.mux(self._stream.encode(frame))
        return self._taken()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._taken()

    def _taken(self) -> bytes:
        data = b"".join(self._made)
        self._made.clear()
        return data


class Tempo:
    """Changes speed and rate of PCM (S,) at SAMPLE_RATE_HZ with FFmpeg's atempo (WSOLA) and aresample. The output
    has the duration of the input over `speed`, to a sample; up to 0.25 s of it are held back until `finish`."""

    def __init__(self, speed: float, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
        self._av = import_av()
        self._samples = self._given = 0
        self._ratio = sample_rate_hz / SAMPLE_RATE_HZ / speed
        # atempo does not support less than 0.5, and above 2 it skips samples instead of blending them.
        steps = 0 if speed == 1 else 1 if 0.5 <= speed <= 2 else 2
        filters: list[tuple[str, str | None]] = [("atempo", repr(speed ** (1 / max(1, steps))))] * steps
        if sample_rate_hz != SAMPLE_RATE_HZ:
            filters.append(("aresample", str(sample_rate_hz)))
        self._graph = self._av.filter.Graph()
        filters += [("aformat", "sample_fmts=flt:channel_layouts=mono"), ("abuffersink", None)]
        begin = self._graph.add_abuffer(sample_rate=SAMPLE_RATE_HZ, format="flt", layout="mono")
        self._graph.link_nodes(begin, *(self._graph.add(name, setting) for name, setting in filters)).configure()

    def feed(self, pcm: np.ndarray) -> np.ndarray:
        """Filters `pcm` and returns the samples that are ready, (T,) float32, perhaps none."""
        if len(pcm):
            self._push(pcm)
            self._samples += len(pcm)
        ready = self._ready()
        self._given += len(ready)
        return ready

    def finish(self) -> np.ndarray:
        """Returns the remaining samples, (T,) float32."""
        if not self._samples:  # FFmpeg would raise an error at the end of a stream without frames
            return np.zeros(0, np.float32)
        self._push(np.zeros(int(_TAIL_S * SAMPLE_RATE_HZ), np.float32))
        self._graph.push(None)
        return self._ready()[: max(0, round(self._samples * self._ratio) - self._given)]

    def _push(self, pcm: np.ndarray) -> None:
        frame = self._av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm)[None], format="flt", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.pts = self._samples
        self._graph.push(frame)

    def _ready(self) -> np.ndarray:
        pieces: list[Any] = [np.zeros(0, np.float32)]
        while True:
            try:
                pieces.append(self._graph.pull().to_ndarray()[0])
            except (BlockingIOError, EOFError):  # PyAV: no output yet; end of the stream
                return np.concatenate(pieces)


def write_audio(path: Path | str, pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Path:
    """Writes `pcm` (S,) float32 as a mono audio file, completely or not at all; returns its path. The name's ending
    selects the format: .wav and .flac (16 bits), .ogg (Vorbis), .opus (at 8, 12, 16, 24 or 48 kHz), .mp3, .aac (ADTS).
    A device or FIFO without such an ending gets WAV. Raises AudioError for another name, and as `encoded`."""
    return write_whole(path, encoded(pcm, format_of(path), sample_rate_hz))


def format_of(path: Path | str) -> str:
    """The format, one of ENDINGS, that `write_audio` uses for a file name. Raises AudioError for an unknown one."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind in ENDINGS:
        return kind
    if is_special(path):
        return "wav"
    raise AudioError(f"{path}: expected a name that ends in .{', .'.join(ENDINGS)}")


def encoded(pcm: np.ndarray, kind: str, sample_rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """Encodes `pcm` (S,) float32 as a file of `kind`, one of ENDINGS. Raises AudioError as `to_pcm16` and for a sample
    rate that the format does not support, BackendUnavailable for AAC without PyAV."""
    if kind == "aac":
        encoder = AvEncoder(kind, sample_rate_hz)
        return encoder.feed(pcm) + encoder.finish()
    import soundfile

    checked_int("sample_rate_hz", sample_rate_hz, 1, 200_000, AudioError)  # libsndfile's Vorbis crashes at others
    (container, subtype), file, samples = FORMATS[kind], io.BytesIO(), io.BytesIO(to_pcm16(pcm))
    try:
        with soundfile.SoundFile(file, "w", sample_rate_hz, 1, subtype, format=container) as out:
            while block := samples.read(_BLOCK_BYTES):  # and on 20 minutes at once
                out.buffer_write(block, "int16")
    except soundfile.SoundFileError as error:
        raise AudioError(f"cannot write {kind} at {sample_rate_hz} Hz: {error}") from None
    return file.getvalue()


def read_audio(path: Path | str) -> tuple[np.ndarray, int]:
    """Reads mono float32 (S,), channels averaged, and the sample rate in Hz. Raises VoiceError for other files."""
    import soundfile

    path = Path(path)
    if not path.is_file():
        raise VoiceError(f"{path}: expected an audio file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        pcm, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise VoiceError(f"{path}: expected an audio file (WAV, FLAC, OGG, MP3), could not read it: {error}") from None
    return pcm.mean(1, dtype=np.float32), int(rate_hz)
