"""The child of `mktts.audio.untrusted`: audio from standard input, samples to standard output.

Arguments: seconds of sound, seconds of the processor, bytes of address space.
"""

from __future__ import annotations

import io
import resource
import sys
from math import ceil

import numpy as np

from mktts.audio.untrusted import BAD_AUDIO, HEADER, TOO_LONG

# Of FFmpeg's: files that hold sound. Its playlists (hls, concat, dash) would open other files and addresses.
_FORMATS = "aac,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,ogg,wav"
_MAX_RATE_HZ, _MAX_CHANNELS = 192_000, 8


class _TooLong(Exception):
    pass


def main(words: list[str]) -> int:
    """0, or one of the exit statuses of `mktts.audio.untrusted`."""
    audio_s, time_s, memory_bytes = float(words[0]), float(words[1]), int(words[2])
    seconds = ceil(time_s)
    if sys.platform == "linux":  # others have the constant and no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pcm, rate_hz = decoded(sys.stdin.buffer.read(), audio_s)
    except _TooLong:
        return TOO_LONG
    except Exception as error:  # whatever FFmpeg makes of it
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        print(reason.splitlines()[0], file=sys.stderr)
        return BAD_AUDIO
    sys.stdout.buffer.write(HEADER.pack(rate_hz) + pcm.tobytes())
    sys.stdout.buffer.flush()
    return 0


def decoded(data: bytes, audio_s: float) -> tuple[np.ndarray, int]:
    """Mono float32 (S,) and the rate of the first sound track in `data`; _TooLong beyond `audio_s` seconds of it."""
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
                    raise _TooLong
                pieces.append(plain.to_ndarray().mean(0, dtype=np.float32))
    pcm = np.concatenate(pieces)
    if not len(pcm):
        raise ValueError("it holds no sound")
    return pcm, rate_hz


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
