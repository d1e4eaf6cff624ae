"""PCM of one utterance at the pipeline's sample rate."""

from __future__ import annotations

from pipecat.audio.utils import create_stream_resampler

BYTES_PER_SAMPLE = 2


class PcmConverter:
    """Resamples one utterance, to the sample: `finish` gives what the filter still holds.

    Pipecat's own resampler of a service forgets its state after 0.2 s without a call, which is shorter than an engine
    may take for one chunk: samples would be lost in the middle of a word. This one never forgets, and ends with its
    utterance.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._from_hz = from_hz
        self._to_hz = to_hz
        self._filter = create_stream_resampler(clear_after_secs=None)

    async def convert(self, pcm: bytes) -> bytes:
        """PCM that is ready; it may be empty while the filter fills."""
        return await self._filter.resample(pcm, self._from_hz, self._to_hz) if pcm else b""

    async def finish(self) -> bytes:
        """The rest."""
        return await self._filter.flush()


def silence(seconds: float, rate_hz: int) -> bytes:
    return bytes(BYTES_PER_SAMPLE * round(seconds * rate_hz))
