"""What a caller sets about a stream, and what a stream gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

import numpy as np

from mktts.errors import OptionsError
from mktts.sampling import Sampling
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ

MIN_SEGMENT_CHARS = 20
MAX_SEED = 2**62  # torch takes 64 bits; every segment after the first adds one
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
            _whole("repeat_frames", self.repeat_frames, at_least=2)
        if self.frames_per_text_token is not None and not self.frames_per_text_token > 0:
            raise OptionsError(f"frames_per_text_token must be above 0 or None, got {self.frames_per_text_token!r}")
        _whole("slack_frames", self.slack_frames, at_least=1)

    @classmethod
    def off(cls) -> Guard:
        """A guard that never ends anything."""
        return cls(repeat_frames=None, frames_per_text_token=None)

    def limit_frames(self, text_tokens: int) -> int | None:
        """Frames that a segment with this many text tokens may take."""
        if self.frames_per_text_token is None:
            return None
        return self.slack_frames + int(self.frames_per_text_token * text_tokens)


@dataclass(frozen=True)
class StreamOptions:
    """How the frames of one utterance become chunks.

    schedule: frames of the first, second, ... chunk; the last entry repeats. Small first for a fast start, then
        larger, because one codec call over eight frames costs less than eight calls.
    trim_lead: leave out the silence before the first audible sample (the first frame is silent in practice).
    guard: see `Guard`.
    max_chars_per_segment: a longer text is spoken in segments, cut at sentence ends; the speaking rate drifts when
        one generation takes too much text. None takes what suits the checkpoint (`Checkpoint.segment_chars`).
    buffer_frames: at most this many frames are made ahead of the consumer; then the stream waits for it.
    """

    schedule: tuple[int, ...] = (1, 1, 2, 4, 8)
    trim_lead: bool = False
    guard: Guard = field(default_factory=Guard)
    max_chars_per_segment: int | None = None
    buffer_frames: int = 500

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", tuple(self.schedule))
        if not self.schedule:
            raise OptionsError("schedule must name at least one chunk size in frames, got ()")
        for frames in self.schedule:
            _whole("every entry of schedule", frames, at_least=1)
        if self.max_chars_per_segment is not None:
            _whole("max_chars_per_segment", self.max_chars_per_segment, at_least=MIN_SEGMENT_CHARS)
        _whole("buffer_frames", self.buffer_frames, at_least=max(self.schedule))


@dataclass(frozen=True)
class Plan:
    """Everything that decides how one utterance is generated, apart from its text and voice."""

    sampling: Sampling
    seed: int
    max_frames: int | None
    options: StreamOptions

    def __post_init__(self) -> None:
        _whole("seed", self.seed, at_least=0)
        if self.seed > MAX_SEED:
            raise OptionsError(f"seed must be at most {MAX_SEED}, got {self.seed}")
        if self.max_frames is not None:
            _whole("max_frames", self.max_frames, at_least=1)


@dataclass(frozen=True)
class Timings:
    """Wall-clock milliseconds (perf_counter).

    ready_ms: from the call (`stream`, or the first `feed` of a session) to this chunk's PCM on the host.
    prefill_ms, talker_ms, predictor_ms, codec_ms: compute time since the previous chunk. On a CUDA device prefill
    returns before the device is done, and the rest of it shows in talker_ms.
    """

    ready_ms: float
    prefill_ms: float
    talker_ms: float
    predictor_ms: float
    codec_ms: float

    @property
    def compute_ms(self) -> float:
        return self.prefill_ms + self.talker_ms + self.predictor_ms + self.codec_ms


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of speech.

    pcm: (S,) float32 in [-1, 1]. start_s: where it begins in the untrimmed utterance. frames: frames made for it,
    those that `trim_lead` left out included, so that the sum over an utterance is the length of its codes.
    """

    pcm: np.ndarray
    start_s: float
    frames: int
    timings: Timings

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / SAMPLE_RATE_HZ


def _whole(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise OptionsError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
