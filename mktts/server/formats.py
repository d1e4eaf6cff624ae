"""16-bit PCM on the wire: raw, or after a WAV header that does not know its length yet."""

from __future__ import annotations

import struct
from typing import Literal

from mktts.spec import SAMPLE_RATE_HZ

Format = Literal["pcm", "wav"]
MEDIA_TYPES: dict[Format, str] = {
    "pcm": f"audio/pcm;rate={SAMPLE_RATE_HZ};channels=1;format=s16le",
    "wav": "audio/wav",
}
_CHANNELS, _SAMPLE_BYTES = 1, 2
_PCM_TAG = 1  # WAVE_FORMAT_PCM
_UNKNOWN_BYTES = 2**32 - 1  # what writers into a pipe put; readers then go on to the end of the file


def header(format: Format) -> bytes:
    """What comes before the samples: nothing, or RIFF and WAVE headers (Microsoft/IBM, 1991) with unknown sizes."""
    if format == "pcm":
        return b""
    rate = SAMPLE_RATE_HZ * _CHANNELS * _SAMPLE_BYTES
    block = _CHANNELS * _SAMPLE_BYTES
    shape = struct.pack("<HHIIHH", _PCM_TAG, _CHANNELS, SAMPLE_RATE_HZ, rate, block, 8 * _SAMPLE_BYTES)
    riff = struct.pack("<4sI4s", b"RIFF", _UNKNOWN_BYTES, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", len(shape)) + shape + struct.pack("<4sI", b"data", _UNKNOWN_BYTES)
