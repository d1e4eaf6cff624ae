"""What a caller sets about a stream, and what a stream gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mktts.audio import to_pcm16
from mktts.common import whole_number
from mktts.engine.guard import Guard
from mktts.errors import OptionsError
from mktts.model.sampling import MAX_SEED, Sampling
from mktts.spec import SAMPLE_RATE_HZ

MIN_SEGMENT_CHARS = 20
# Frames of the first, second, ... chunk; the last entry repeats. For a stream that makes its own frames: small first
# for a fast start, then larger, because one codec call over eight frames costs less than eight calls.
SCHEDULE = (1, 1, 2, 4, 8)
# Of a stream whose frames are decoded as they are made, together with others': chunks of the next 0.3 s cost the host
# less than single frames, while larger ones would have to be made further ahead of the listener.
TOGETHER_SCHEDULE = (1, 1, 2, 2, 4)


@dataclass(frozen=True)
class StreamOptions:
    """How the frames of one utterance become chunks.

    schedule: frames of the first, second, ... chunk; the last entry repeats. None takes what suits the engine that
        serves the stream: SCHEDULE, or of streams made together what `mktts.engine.scheduler.TickSettings` says.
    trim_lead: leave out the silence before the first audible 10 ms, all but its last 40 ms (the first frame is silent
        in practice).
    guard: see `Guard`.
    max_chars_per_segment: a longer text is spoken in segments, cut at sentence ends; the speaking rate drifts when
        one generation takes too much text. None takes what suits the checkpoint (`text.segment_chars`).
    buffer_frames: at most this many frames are made ahead of the consumer; then the stream waits for it.
    markup: "speak" gives the model the text as it is written; "strip" takes Markdown, HTML and TeX out before.
    """

    schedule: tuple[int, ...] | None = None
    trim_lead: bool = False
    guard: Guard = field(default_factory=Guard)
    max_chars_per_segment: int | None = None
    buffer_frames: int = 500
    markup: str = "speak"

    def __post_init__(self) -> None:
        if self.schedule is not None:
            object.__setattr__(self, "schedule", tuple(self.schedule))
            if not self.schedule:
                raise OptionsError("schedule must name at least one chunk size in frames, got ()")
        if self.markup not in ("speak", "strip"):
            raise OptionsError(f'markup must be "speak" or "strip", got {self.markup!r}')
        for frames in self.schedule or ():
            whole_number("every entry of schedule", frames, at_least=1)
        if self.max_chars_per_segment is not None:
            whole_number("max_chars_per_segment", self.max_chars_per_segment, at_least=MIN_SEGMENT_CHARS)
        whole_number("buffer_frames", self.buffer_frames, at_least=max(self.schedule or SCHEDULE))


@dataclass(frozen=True)
class Plan:
    """Everything that decides how one utterance is generated, apart from its text and voice."""

    sampling: Sampling
    seed: int
    max_frames: int | None
    options: StreamOptions

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            kind = type(self.sampling).__name__
            raise OptionsError(
                f"sampling must be a Sampling, got {kind}: pass sampling=Sampling(talker=Choice(temperature=0.8)), or "
                "replace(synthesizer.sampling, ...) to change one setting"
            )
        if not isinstance(self.options, StreamOptions):
            kind = type(self.options).__name__
            raise OptionsError(
                f"options must be StreamOptions, got {kind}: pass options=StreamOptions(schedule=(1, 1, 2, 4, 8))"
            )
        whole_number("seed", self.seed, at_least=0, at_most=MAX_SEED)
        if self.max_frames is not None:
            whole_number("max_frames", self.max_frames, at_least=1)


@dataclass(frozen=True)
class Timings:
    """Wall-clock milliseconds (perf_counter).

    ready_ms: from the call (`stream`, or the first `feed` of a session) to this chunk's PCM on the host.
    prefill_ms, talker_ms, predictor_ms, codec_ms: compute time since the previous chunk. On a CUDA device prefill
    returns before the device is done, and the rest of it shows in talker_ms. Where streams are served together, all of
    a stream's part of their ticks shows in talker_ms.
    """

    ready_ms: float
    prefill_ms: float
    talker_ms: float
    predictor_ms: float
    codec_ms: float


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of speech.

    pcm: (S,) float32 in [-1, 1]. start_s: where it begins in the untrimmed utterance. frames: frames made for it,
    those that `trim_lead` left out included, so that the sum over an utterance is the length of its codes. ready_pcm16:
    what `pcm16` gives, where it was made with the samples.
    """

    pcm: np.ndarray
    start_s: float
    frames: int
    timings: Timings
    ready_pcm16: bytes | None = field(default=None, repr=False)

    @property
    def pcm16(self) -> bytes:
        """The samples in 16 bits, as `mktts.audio.to_pcm16`, whose AudioError this raises."""
        return to_pcm16(self.pcm) if self.ready_pcm16 is None else self.ready_pcm16

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / SAMPLE_RATE_HZ
