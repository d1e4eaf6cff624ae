"""Sound: samples, levels, files, and encodings that are made while somebody listens.

The names below are the room's face; what encodes and decodes by PyAV lies in modules of its own.
"""

from mktts.audio.files import FORMATS, encoded, format_of, read_audio, require_format, write_audio
from mktts.audio.pcm import (
    first_audible_sample,
    from_pcm16,
    joined,
    level_dbfs,
    peak_dbfs,
    rows_to_pcm16,
    to_pcm16,
)
from mktts.audio.resampling import resample

__all__ = [
    "FORMATS",
    "encoded",
    "first_audible_sample",
    "format_of",
    "from_pcm16",
    "joined",
    "level_dbfs",
    "peak_dbfs",
    "read_audio",
    "require_format",
    "resample",
    "rows_to_pcm16",
    "to_pcm16",
    "write_audio",
]
