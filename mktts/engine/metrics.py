"""Metrics of one stream, from what its chunks say. The terms mean the same everywhere.

TTFC: time from the `stream()` call to the first PCM in host memory, on a warm model. Audible TTFC: time to the first
audible 10 ms for a listener whose player starts with the first chunk; None if nothing is audible. RTF: seconds from the
call to the last PCM, divided by seconds of audio; it counts all that happens between, so it means something only for a
stream that has the machine to itself. Stage times: by the clocks of backend and codec. Underrun: that player runs dry.
Prebuffer: how much later it would have to start to never run dry."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mktts.audio import first_audible_sample
from mktts.engine.options import Chunk
from mktts.errors import MetricsError
from mktts.spec import SAMPLE_RATE_HZ


@dataclass(frozen=True)
class Playback:
    """A player that starts with the first chunk and plays in real time; times in ms from the `stream()` call."""

    starts_ms: tuple[float, ...]  # when each chunk begins to sound
    underruns: int
    stalled_ms: float
    prebuffer_ms: float


@dataclass(frozen=True)
class StreamMetrics:
    """Metrics of one utterance, in the terms of the module docstring; `audible_ttfc_ms` is None if all is silent."""

    ttfc_ms: float
    audible_ttfc_ms: float | None
    rtf: float
    audio_s: float
    frames: int
    prefill_ms: float
    talker_ms_per_frame: float
    predictor_ms_per_frame: float
    codec_ms_per_frame: float
    underruns: int
    stalled_ms: float
    prebuffer_ms: float


def play(ready_ms: Sequence[float], samples: Sequence[int]) -> Playback:
    """Simulates a player: chunk i has `samples[i]` samples and is ready at `ready_ms[i]`."""
    player, lengths_ms = Player(), [1_000 * count / SAMPLE_RATE_HZ for count in samples]
    played = [player.play(ready, length) for ready, length in zip(ready_ms, lengths_ms, strict=True)]  # in ms
    starts_ms, late_ms = zip(*played, strict=True)
    wanted_ms = accumulate(lengths_ms[:-1], initial=ready_ms[0])
    prebuffer_ms = max(ready - wanted for ready, wanted in zip(ready_ms, wanted_ms, strict=True))
    return Playback(starts_ms, sum(late > 0 for late in late_ms), sum(late_ms), prebuffer_ms)


@dataclass(slots=True)
class Player:
    """A listener's player, which starts with the first PCM and plays in real time; the caller gives the time, always of
    one clock. dry_s: when all PCM so far will have been played; None before the first."""

    dry_s: float | None = None

    def play(self, now_s: float, duration_s: float) -> tuple[float, float]:
        """Adds PCM of `duration_s` seconds at `now_s`. Returns when it begins to sound, and for how many seconds before
        that the listener had nothing to hear; 0 for the first PCM."""
        dry_s = now_s if self.dry_s is None else self.dry_s
        starts_s = max(now_s, dry_s)
        self.dry_s = starts_s + duration_s
        return starts_s, max(0.0, now_s - dry_s)

    def lead_s(self, now_s: float) -> float:
        """Seconds until the player runs dry, negative once it has; 0 before the first PCM."""
        return 0.0 if self.dry_s is None else self.dry_s - now_s

    def pause(self, until_s: float) -> None:
        """PCM that comes before `until_s` is not late: the listener, or whoever writes the text, caused the pause."""
        if self.dry_s is not None:
            self.dry_s = max(self.dry_s, until_s)


def summarise(chunks: Iterable[Chunk]) -> StreamMetrics:
    """Metrics of one utterance from its chunks, in order. Raises MetricsError where they hold no audio."""
    chunks = [chunk for chunk in chunks if len(chunk.pcm)]
    if not chunks:
        raise MetricsError(
            "expected at least one chunk with audio, found none: the stream was cancelled or stayed empty"
        )
    timings = [chunk.timings for chunk in chunks]
    playback = play([t.ready_ms for t in timings], [len(chunk.pcm) for chunk in chunks])
    audible_ms = None
    if (audible := first_audible_sample(np.concatenate([chunk.pcm for chunk in chunks]))) is not None:
        firsts = list(accumulate((len(chunk.pcm) for chunk in chunks[:-1]), initial=0))  # first sample of each chunk
        heard = bisect_right(firsts, audible) - 1
        audible_ms = playback.starts_ms[heard] + 1_000 * (audible - firsts[heard]) / SAMPLE_RATE_HZ
    audio_s = sum(len(chunk.pcm) for chunk in chunks) / SAMPLE_RATE_HZ
    frames = sum(chunk.frames for chunk in chunks)
    per_frame = 1 / max(frames, 1)  # a text may consist of pauses alone
    return StreamMetrics(
        ttfc_ms=timings[0].ready_ms,
        audible_ttfc_ms=audible_ms,
        rtf=timings[-1].ready_ms / 1_000 / audio_s,
        audio_s=audio_s,
        frames=frames,
        prefill_ms=sum(t.prefill_ms for t in timings),
        talker_ms_per_frame=sum(t.talker_ms for t in timings) * per_frame,
        predictor_ms_per_frame=sum(t.predictor_ms for t in timings) * per_frame,
        codec_ms_per_frame=sum(t.codec_ms for t in timings) * per_frame,
        underruns=playback.underruns,
        stalled_ms=playback.stalled_ms,
        prebuffer_ms=playback.prebuffer_ms,
    )
