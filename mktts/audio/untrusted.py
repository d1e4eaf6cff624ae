"""Audio from somebody unknown, decoded in a process of its own.

FFmpeg reads many formats, and a file may be made to break it, to fill the memory, or to keep a processor busy. The
child has limits of all three, no environment of ours, and nothing but its standard input and output.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from mktts.audio.coding import import_av
from mktts.common import python_path
from mktts.errors import VoiceError

CHILD = "mktts.audio.untrusted_child"
HEADER = struct.Struct("<I")  # of its answer: the sample rate in Hz; then float32 samples
BAD_AUDIO, TOO_LONG = 3, 4  # exit statuses of the child; what is wrong is its only line on standard error


@dataclass(frozen=True)
class DecodingLimits:
    """data_bytes: of the encoded audio. audio_s: of sound in it. time_s: of the clock, and of the processor.
    memory_bytes: of the child's address space, on Linux.
    """

    data_bytes: int = 10 * 2**20
    audio_s: float = 60.0
    time_s: float = 10.0
    memory_bytes: int = 2**30


def decode_untrusted(data: bytes, limits: DecodingLimits | None = None) -> tuple[np.ndarray, int]:
    """Mono float32 (S,), channels averaged, and the sample rate in Hz, of a file of audio: WAV, FLAC, MP3, Ogg, AAC,
    MP4, WebM.

    Blocks until the child has ended. Raises VoiceError for what is no such audio or over a limit, BackendUnavailable
    without the package av.
    """
    import_av()
    limits = limits or DecodingLimits()
    if len(data) > limits.data_bytes:
        raise VoiceError(f"audio may have {limits.data_bytes} bytes, got {len(data)}: send a shorter recording")
    numbers = [limits.audio_s, limits.time_s, limits.memory_bytes]
    try:
        done = subprocess.run(
            [sys.executable, "-m", CHILD, *map(str, numbers)],
            input=data,
            capture_output=True,
            env={**python_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},  # threads take address space
            cwd=os.sep,
            timeout=limits.time_s,
        )
    except subprocess.TimeoutExpired:
        raise VoiceError(f"audio took more than {limits.time_s:g} s to decode: send a plain WAV") from None
    if done.returncode == TOO_LONG:
        raise VoiceError(f"audio may last {limits.audio_s:g} s, this is longer: send a shorter recording")
    if done.returncode == BAD_AUDIO:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise VoiceError(f"expected audio (WAV, FLAC, MP3, Ogg, AAC, MP4, WebM), could not decode it: {reason[0]}")
    if done.returncode or len(done.stdout) < HEADER.size:
        raise VoiceError(f"audio could not be decoded within its limits (the decoder ended with {done.returncode})")
    (rate_hz,) = HEADER.unpack_from(done.stdout)
    return np.frombuffer(done.stdout, np.float32, offset=HEADER.size).copy(), rate_hz
