"""What a recorded conversation shows by itself: when each side sounds, and when both do. No clock but the samples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mktts.spec import SAMPLE_RATE_HZ

STEP_S = 0.01
_PAUSE_S = 0.3  # shorter silences lie within speech
_SOUNDS = 0.05  # of a side's own peak; a room's noise is far below, the first consonant above


def overlaps(user: np.ndarray, bot: np.ndarray) -> list[tuple[float, float]]:
    """(start, end) in s of each time in which both sides sound, of `user` and `bot` (S,) float32 at 24 kHz.

    An interruption is one: from the onset of the user's speech to the bot's silence.
    """
    found = []
    for user_start_s, user_end_s in _speech(user):
        for bot_start_s, bot_end_s in _speech(bot):
            start_s, end_s = max(user_start_s, bot_start_s), min(user_end_s, bot_end_s)
            if start_s < end_s:
                found.append((start_s, end_s))
    return found


def between(user: np.ndarray, bot: np.ndarray) -> list[np.ndarray]:
    """What the bot says after each stretch of the user's speech, to the end of the next one: (S_i,) float32 each."""
    ends = [round(end_s * SAMPLE_RATE_HZ) for _, end_s in _speech(user)]
    return [bot[begin:end] for begin, end in pairwise([*ends, len(bot)])]


def levels(pcm: np.ndarray) -> np.ndarray:
    """The peak of each step, (S / step,), the loudest being 1."""
    step = round(STEP_S * SAMPLE_RATE_HZ)
    peaks = np.abs(pcm[: len(pcm) // step * step]).reshape(-1, step).max(axis=1)
    return peaks / max(peaks.max(initial=0.0), 1e-9)


def _speech(pcm: np.ndarray) -> list[tuple[float, float]]:
    """(start, end) in s of each stretch without a pause."""
    steps = np.flatnonzero(levels(pcm) > _SOUNDS)
    if not steps.size:
        return []
    breaks = np.flatnonzero(np.diff(steps) > _PAUSE_S / STEP_S)
    starts, ends = steps[np.append(0, breaks + 1)], steps[np.append(breaks, steps.size - 1)] + 1
    return [(float(start * STEP_S), float(end * STEP_S)) for start, end in zip(starts, ends, strict=True)]
