"""The header of a WAV whose length is not known yet."""

from __future__ import annotations

import struct

_CHANNELS, _SAMPLE_BYTES = 1, 2
_PCM_TAG = 1  # WAVE_FORMAT_PCM
_UNKNOWN_BYTES = 2**32 - 1  # what writers into a pipe put; readers then go on to the end of the file


def streaming_wav_header(sample_rate_hz: int) -> bytes:
    """RIFF and WAVE headers (Microsoft/IBM, 1991) of 16-bit mono PCM, with unknown sizes: 44 bytes."""
    block = _CHANNELS * _SAMPLE_BYTES
    shape = struct.pack(
        "<HHIIHH", _PCM_TAG, _CHANNELS, sample_rate_hz, sample_rate_hz * block, block, 8 * _SAMPLE_BYTES
    )
    riff = struct.pack("<4sI4s", b"RIFF", _UNKNOWN_BYTES, b"WAVE")
    return riff + struct.pack("<4sI", b"fmt ", len(shape)) + shape + struct.pack("<4sI", b"data", _UNKNOWN_BYTES)
