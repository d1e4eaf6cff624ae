"""One listener: takes chunks as they come, plays them in real time from the first on. Times are given; no clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mktts.audio import first_audible_sample
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, SAMPLE_RATE_HZ
from mktts.speech.player import Player


class Gap(NamedTuple):
    """The player ran dry at dry_s and went on late_s later."""

    dry_s: float
    late_s: float


class Listener(Player):
    """What came to one listener and when; seconds of one clock, None for what did not happen.

    planned_s: the arrival that the plan names. opened_s: `stream` was called. byte_s: a server has begun to answer.
    first_s: the first PCM was consumed.
    audible_s: the first audible 10 ms sounds. dry_s: all PCM so far has been played. ended_s: the stream was over, for
    whatever reason. refused: by CapacityError before any PCM. error: what else ended the stream. timed: it counts in
    the figures; one that takes no chunks, or whose text comes late, does not. left: it went by itself before the end.
    tail: silence of less than an audible window, which comes in pieces of any length.
    """

    __slots__ = (
        "planned_s", "opened_s", "byte_s", "first_s", "audible_s", "ended_s", "frames", "gaps", "refused", "error",
        "engine", "timed", "left", "tail",
    )  # fmt: skip

    def __init__(self, planned_s: float, timed: bool = True) -> None:
        super().__init__()
        self.planned_s = planned_s
        self.opened_s: float | None = None
        self.byte_s: float | None = None
        self.first_s: float | None = None
        self.audible_s: float | None = None
        self.ended_s: float | None = None
        self.frames = 0
        self.gaps: tuple[Gap, ...] = ()
        self.refused = False
        self.error: str | None = None
        self.engine: str | None = None
        self.timed = timed
        self.left = False
        self.tail = np.zeros(0, np.float32)

    def hear(self, now_s: float, pcm: np.ndarray, frames: int) -> None:
        """A chunk was consumed at `now_s`: `pcm` (S,) float32 of so many frames. Without a sample it changes nothing
        but the frames."""
        self.frames += frames
        if not len(pcm):
            return
        if self.first_s is None:
            self.first_s = now_s
        starts_s, late_s = self.play(now_s, len(pcm) / SAMPLE_RATE_HZ)
        if late_s > 0:
            self.gaps += (Gap(now_s - late_s, late_s),)
        if self.audible_s is None:
            whole = np.concatenate((self.tail, pcm))
            sample = first_audible_sample(whole)
            if sample is not None:
                self.audible_s = starts_s + (sample - len(self.tail)) / SAMPLE_RATE_HZ
            self.tail = whole[len(whole) // AUDIBLE_WINDOW_SAMPLES * AUDIBLE_WINDOW_SAMPLES :]

    def waits_since(self, now_s: float) -> float | None:
        """When the player ran dry that still waits at `now_s`; None where it plays, never began, or is over."""
        dry = self.dry_s is not None and self.ended_s is None and self.timed and self.dry_s < now_s
        return self.dry_s if dry else None
