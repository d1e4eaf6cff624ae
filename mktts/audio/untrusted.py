"""Decodes untrusted audio in a process of its own: `python -m mktts.audio.untrusted`.

A file may be crafted to crash FFmpeg, exhaust memory, or keep a processor busy. The child process therefore has limits,
none of our environment, and only standard input and output: audio in; sample rate and float32 samples out."""

import io
import os
import struct
import subprocess
import sys
from math import ceil

import numpy as np

from mktts.audio.encoding import import_av
from mktts.common import python_path
from mktts.errors import VoiceError

_HEADER = struct.Struct("<I")  # the sample rate in Hz
_BAD_AUDIO, _TOO_LONG = 3, 4  # exit statuses of the child; the reason is its only line on standard error
# FFmpeg's formats that contain audio. Its playlists (hls, concat, dash) could open other files and addresses.
_FORMATS = "aac,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,ogg,wav"
_MAX_RATE_HZ, _MAX_CHANNELS = 192_000, 8


def decode_untrusted(
    data: bytes, data_bytes: int = 10 * 2**20, audio_s: float = 60.0, time_s: float = 10.0, memory_bytes: int = 2**30
) -> tuple[np.ndarray, int]:
    """Decodes an audio file (WAV, FLAC, MP3, Ogg, AAC, MP4, WebM) to mono float32 (S,), channels averaged, and its
    sample rate in Hz.

    data_bytes: limit of the encoded size. audio_s: limit of the duration. time_s: limit of elapsed and of processor
    time. memory_bytes: limit of the child's address space, on Linux. Raises VoiceError if `data` cannot be decoded or
    exceeds a limit, BackendUnavailable without the package av."""
    import_av()
    if len(data) > data_bytes:
        raise VoiceError(f"audio may have {data_bytes} bytes, got {len(data)}: send a shorter recording")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mktts.audio.untrusted", *map(str, (audio_s, time_s, memory_bytes))],
            input=data,
            capture_output=True,
            env={**python_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # threads use address space
            cwd=os.sep,
            timeout=time_s,
        )
    except subprocess.TimeoutExpired:
        raise VoiceError(f"audio took more than {time_s:g} s to decode: send a plain WAV") from None
    if done.returncode == _TOO_LONG:
        raise VoiceError(f"audio may last {audio_s:g} s, this is longer: send a shorter recording")
    if done.returncode == _BAD_AUDIO:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise VoiceError(f"expected audio (WAV, FLAC, MP3, Ogg, AAC, MP4, WebM), could not decode it: {reason[0]}")
    if done.returncode or len(done.stdout) < _HEADER.size:
        raise VoiceError(f"audio could not be decoded within its limits (the decoder ended with {done.returncode})")
    (rate_hz,) = _HEADER.unpack_from(done.stdout)
    return np.frombuffer(done.stdout, np.float32, offset=_HEADER.size).copy(), rate_hz


def main(words: list[str]) -> int:
    """The child process; returns its exit status. words: limits of audio (s), processor time (s), memory (bytes)."""
    import resource

    audio_s, time_s, memory_bytes = float(words[0]), float(words[1]), int(words[2])
    seconds = ceil(time_s)
    if sys.platform == "linux":  # other systems have the constant, but not the limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pcm, rate_hz = _decoded(sys.stdin.buffer.read(), audio_s)
    except Exception as error:  # any error of FFmpeg
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        print(reason.splitlines()[0], file=sys.stderr)
        return _BAD_AUDIO
    if pcm is None:
        return _TOO_LONG
    sys.stdout.buffer.write(_HEADER.pack(rate_hz) + pcm.tobytes())
    sys.stdout.buffer.flush()
    return 0


def _decoded(data: bytes, audio_s: float) -> tuple[np.ndarray | None, int]:
    """Mono float32 (S,) and the rate of the first audio track in `data`; None if it is longer than `audio_s`."""
    import av

    av.logging.set_level(None)
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), options=options) as container:
        if not container.streams.audio:
            raise ValueError("it holds no sound")
        stream = container.streams.audio[0]
        stream.thread_count = 1
        rate_hz, channels = stream.rate, stream.codec_context.channels
        if not (0 < rate_hz <= _MAX_RATE_HZ and 0 < channels <= _MAX_CHANNELS):
            raise ValueError(f"{channels} channels at {rate_hz} Hz")
        to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate_hz)
        pieces, samples = [np.zeros(0, np.float32)], 0
        for frame in container.decode(stream):
            for plain in to_float.resample(frame):
                samples += plain.samples
                if samples > audio_s * rate_hz:
                    return None, rate_hz
                pieces.append(plain.to_ndarray().mean(0, dtype=np.float32))
    pcm = np.concatenate(pieces)
    if not len(pcm):
        raise ValueError("it holds no sound")
    return pcm, rate_hz


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
