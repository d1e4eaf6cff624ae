"""Ends a segment that has lost its end: the settings, and the count of one segment against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from mktts.common import whole_number
from mktts.errors import OptionsError
from mktts.spec import FRAME_RATE_HZ

FinishReason = Literal["eos", "max_frames", "cancelled", "runaway"]


@dataclass(frozen=True)
class Guard:
    """Ends a segment in which the talker has lost its end: about 0.4 % of real requests never say end-of-speech.

    repeat_frames: the same code 0 this many frames in a row. Real speech stays below 35 (measured by others on
        released checkpoints). None switches this off.
    frames_per_text_token, slack_frames: more frames than slack_frames + frames_per_text_token * text tokens so far.
        At 150 words a minute and 1.3 tokens a word, speech takes 3.8 frames a token; the defaults allow a second a
        token and six seconds for pauses.
        None switches this off.
    """

    repeat_frames: int | None = 40
    frames_per_text_token: float | None = FRAME_RATE_HZ  # a second
    slack_frames: int = 75

    def __post_init__(self) -> None:
        if self.repeat_frames is not None:
            whole_number("repeat_frames", self.repeat_frames, at_least=2)
        if self.frames_per_text_token is not None and not self.frames_per_text_token > 0:
            raise OptionsError(f"frames_per_text_token must be above 0 or None, got {self.frames_per_text_token!r}")
        whole_number("slack_frames", self.slack_frames, at_least=1)

    @classmethod
    def off(cls) -> Guard:
        """A guard that never ends anything."""
        return cls(repeat_frames=None, frames_per_text_token=None)

    def limit_frames(self, text_tokens: int) -> int | None:
        """Frames that a segment with this many text tokens may take."""
        if self.frames_per_text_token is None:
            return None
        return self.slack_frames + int(self.frames_per_text_token * text_tokens)


class GuardState:
    """Counts the frames of one segment against its limits and says why it must end."""

    def __init__(self, guard: Guard, max_frames: int) -> None:
        self.frames = 0
        self._guard = guard
        self._max_frames = max_frames
        self._last_code0: int | None = None
        self._repeats = 0

    def count(self, codes: Tensor | np.ndarray, text_tokens: int) -> FinishReason | None:
        """Takes the newest frame (16,) and the segment's text tokens so far."""
        self.frames += 1
        code0 = int(codes[0])
        self._repeats = self._repeats + 1 if code0 == self._last_code0 else 1
        self._last_code0 = code0
        if self._guard.repeat_frames is not None and self._repeats >= self._guard.repeat_frames:
            return "runaway"
        limit = self._guard.limit_frames(text_tokens)
        if limit is not None and self.frames >= limit:
            return "runaway"
        return "max_frames" if self.frames >= self._max_frames else None
