"""Audio: samples, levels and files; `encoding` encodes speech as a stream, `untrusted` decodes uploaded audio."""

from mktts.audio.encoding import encoded, format_of, read_audio, write_audio
from mktts.audio.pcm import first_audible_sample, from_pcm16, joined, resample, rows_to_pcm16, to_pcm16

__all__ = [
    "encoded", "first_audible_sample", "format_of", "from_pcm16", "joined", "read_audio", "resample", "rows_to_pcm16",
    "to_pcm16", "write_audio",
]  # fmt: skip
