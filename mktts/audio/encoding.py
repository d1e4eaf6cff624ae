"""Audio files, and speech as the bytes of a format while it is made: PCM goes in, what is ready comes out. pcm and wav
need nothing; the others are made by PyAV, FFmpeg's libraries."""

import io
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np

from mktts.audio.pcm import to_pcm16
from mktts.common import is_special, one_of, write_whole
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import SAMPLE_RATE_HZ

StreamFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "mulaw", "alaw"]
STREAM_FORMATS: tuple[StreamFormat, ...] = get_args(StreamFormat)
UNCODED: tuple[StreamFormat, ...] = ("wav", "pcm")  # samples as they are: no work, no package
MIN_SPEED, MAX_SPEED = 0.25, 4.0  # OpenAI's
_TELEPHONE: tuple[StreamFormat, ...] = ("mulaw", "alaw")  # ITU-T G.711, without a header
_TELEPHONE_RATE_HZ = 8_000
_WAV_HEADER = struct.Struct("<4s4s8sIHHIIHH4s4s")
_UNKNOWN = b"\xff" * 4  # the size that writers into a pipe put; readers then go on to the end of the file
_FLUSHED = {"flush_packets": "1"}  # after each packet, instead of when FFmpeg's buffer of 32 KiB is full
_TAIL_S = 0.2  # of silence after the end: atempo leaves out the last part of a window

# Ends of names that can be written -> libsndfile's format and encoding.
FORMATS = {
    "wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}  # fmt: skip
ENDINGS = (*FORMATS, "aac")  # AAC is PyAV's: libsndfile does not have it
_BLOCK_SAMPLES = 2**16


class Encoder:
    """Bytes of a format from PCM (S,) float32 at SAMPLE_RATE_HZ. One thread at a time; not reusable after `finish`.

    takes_pcm16: its samples stay as they are, which is no work; `feed_pcm16` takes those that have 16 bits already."""

    def __init__(
        self, kind: StreamFormat, *, speed: float = 1.0, sample_rate_hz: int | None = None, whole: bool = False
    ) -> None:
        """speed: 0.25 to 4; 2 takes half the time, at the same pitch. sample_rate_hz: of what comes out (for Opus, of
        what its encoder is given); None takes G.711's only one, or that of the speech. whole: nothing comes before the
        end, and then a file that says how long it is, which a stream cannot. Raises AudioError for a rate, a speed or a
        format that there is not, BackendUnavailable without the package av (PyAV) where this needs it."""
        one_of("format", kind, STREAM_FORMATS, AudioError)
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise AudioError(f"speed must be {MIN_SPEED} to {MAX_SPEED:g}, got {speed!r}")
        usual_hz = _TELEPHONE_RATE_HZ if kind in _TELEPHONE else SAMPLE_RATE_HZ
        self.kind, self.speed, self.rate_hz, self._whole = kind, speed, sample_rate_hz or usual_hz, whole
        self._kept: list[np.ndarray] = []
        self._is_file = whole and kind in ("wav", "flac")  # their headers have a length
        self._av = None if self._is_file or kind in UNCODED else AvEncoder(kind, self.rate_hz)
        same = speed == 1 and self.rate_hz == SAMPLE_RATE_HZ
        self._tempo = None if same else Tempo(speed, self.rate_hz)
        self.takes_pcm16 = same and not whole and kind in UNCODED
        self._header = b""
        if kind == "wav":  # one channel of 16 bits
            layout = (16, 1, 1, self.rate_hz, 2 * self.rate_hz, 2, 16)
            self._header = _WAV_HEADER.pack(b"RIFF", _UNKNOWN, b"WAVEfmt ", *layout, b"data", _UNKNOWN)

    def feed(self, pcm: np.ndarray) -> bytes:
        """What is ready once `pcm` is in; may be nothing yet. Raises AudioError as `to_pcm16`."""
        pcm = pcm if self._tempo is None else self._tempo.feed(pcm)
        if self._whole:
            self._kept.append(pcm)
            return b""
        return self._encode(pcm)

    def feed_pcm16(self, samples: bytes) -> bytes:
        """As `feed`, where the encoder `takes_pcm16`."""
        header, self._header = self._header, b""
        return header + samples

    def finish(self) -> bytes:
        """The rest."""
        rest = np.zeros(0, np.float32) if self._tempo is None else self._tempo.finish()
        pcm = np.concatenate([*self._kept, rest])
        if self._is_file:
            return encoded(pcm, self.kind, self.rate_hz)
        return self._encode(pcm) + (b"" if self._av is None else self._av.finish())

    def _encode(self, pcm: np.ndarray) -> bytes:
        return self.feed_pcm16(to_pcm16(pcm)) if self._av is None else self._av.feed(pcm)


def import_av() -> Any:
    """The package av. Raises BackendUnavailable where it is missing."""
    try:
        import av
    except ImportError as error:
        what = "audio that is encoded while it is made, AAC, and another speed"
        raise BackendUnavailable(f"{what} need the package av: {error}; pip install av") from None
    return av


# FFmpeg's container and codec, options of the codec and of the container. Bit rates (b) of one channel at 24 kHz: two
# thirds of MP3's most there (160 000), more than speech needs in the others.
_CODECS: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    # no tag and no Xing frame: both would promise a length. No bit reservoir: a frame is whole when it is there.
    "mp3": ("mp3", "libmp3lame", {"b": "96000", "reservoir": "0"}, {"write_xing": "0", "id3v2_version": "0"}),
    # a page a packet of 20 ms; left alone, pages of a second
    "opus": ("ogg", "libopus", {"b": "48000", "frame_duration": "20"}, {"page_duration": "20000"}),
    "aac": ("adts", "aac", {"b": "64000"}, {}),
    # without room for tags, which is 8 KiB before the first sound
    "flac": ("flac", "flac", {}, {"metadata_header_padding": "0"}),
    **{kind: (kind, f"pcm_{kind}", {}, {}) for kind in _TELEPHONE},
}


class AvEncoder:
    """PCM to one of _CODECS, with every packet given out at once. Raises BackendUnavailable without the package av or
    the codec in it, AudioError for a rate that the codec does not have."""

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
        out = SimpleNamespace(write=self._made.append)  # no more: FFmpeg then knows that it cannot go back to a header
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
    """A filter of PCM (S,) float32 at SAMPLE_RATE_HZ: FFmpeg's atempo (WSOLA), then aresample. What comes out is as
    long as what goes in over `speed`, to a sample; up to 0.25 s of it are held back until `finish`."""

    def __init__(self, speed: float, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
        self._av = import_av()
        self._samples = self._given = 0
        self._ratio = sample_rate_hz / SAMPLE_RATE_HZ / speed
        # Below 0.5 atempo does not go, and above 2 it skips samples instead of blending them.
        steps = 0 if speed == 1 else 1 if 0.5 <= speed <= 2 else 2
        filters: list[tuple[str, str | None]] = [("atempo", repr(speed ** (1 / max(1, steps))))] * steps
        if sample_rate_hz != SAMPLE_RATE_HZ:
            filters.append(("aresample", str(sample_rate_hz)))
        self._graph = self._av.filter.Graph()
        filters += [("aformat", "sample_fmts=flt:channel_layouts=mono"), ("abuffersink", None)]
        begin = self._graph.add_abuffer(sample_rate=SAMPLE_RATE_HZ, format="flt", layout="mono")
        self._graph.link_nodes(begin, *(self._graph.add(name, setting) for name, setting in filters)).configure()

    def feed(self, pcm: np.ndarray) -> np.ndarray:
        """What is ready once `pcm` is in, (T,) float32; may be nothing yet."""
        if len(pcm):
            self._push(pcm)
            self._samples += len(pcm)
        ready = self._ready()
        self._given += len(ready)
        return ready

    def finish(self) -> np.ndarray:
        """The rest, (T,) float32."""
        if not self._samples:  # without a frame there is nothing to end, and FFmpeg says so by an error
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
            except (BlockingIOError, EOFError):  # as PyAV says: not yet, and no more
                return np.concatenate(pieces)


def write_audio(path: Path | str, pcm: np.ndarray, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Path:
    """Writes `pcm` (S,) float32 as a mono audio file, whole or not at all; returns its path. The end of its name is the
    format: .wav and .flac (16 bits), .ogg (Vorbis), .opus (at 8, 12, 16, 24 or 48 kHz), .mp3, .aac (ADTS). A device or
    FIFO without one of them gets WAV. Raises AudioError for another name, and as `encoded`."""
    return write_whole(path, encoded(pcm, format_of(path), sample_rate_hz))


def format_of(path: Path | str) -> str:
    """Which of ENDINGS `write_audio` gives a file of this name. Raises AudioError for another name."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind in ENDINGS:
        return kind
    if is_special(path):
        return "wav"
    raise AudioError(f"{path}: expected a name that ends in .{', .'.join(ENDINGS)}")


def encoded(pcm: np.ndarray, kind: str, sample_rate_hz: int = SAMPLE_RATE_HZ) -> bytes:
    """`pcm` (S,) float32 as the bytes of a file of `kind`, one of ENDINGS. Raises AudioError as `to_pcm16` and for a
    rate that the format does not have, BackendUnavailable without PyAV for AAC."""
    if kind == "aac":
        encoder = AvEncoder(kind, sample_rate_hz)
        return encoder.feed(pcm) + encoder.finish()
    import soundfile

    (container, subtype), file = FORMATS[kind], io.BytesIO()
    samples = np.frombuffer(to_pcm16(pcm), "<i2").astype(np.int16)
    try:
        with soundfile.SoundFile(file, "w", sample_rate_hz, 1, subtype, format=container) as out:
            for start in range(0, len(samples), _BLOCK_SAMPLES):  # at once, libsndfile's Vorbis crashes on 20 minutes
                out.write(samples[start : start + _BLOCK_SAMPLES])
    except soundfile.SoundFileError as error:
        raise AudioError(f"cannot write {kind} at {sample_rate_hz} Hz: {error}") from None
    return file.getvalue()


def read_audio(path: Path | str) -> tuple[np.ndarray, int]:
    """Mono float32 (S,), channels averaged, and the sample rate in Hz. Raises VoiceError for what is no audio file."""
    import soundfile

    path = Path(path)
    if not path.is_file():
        raise VoiceError(f"{path}: expected an audio file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        pcm, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise VoiceError(f"{path}: expected an audio file (WAV, FLAC, OGG, MP3), could not read it: {error}") from None
    return pcm.mean(1, dtype=np.float32), int(rate_hz)
