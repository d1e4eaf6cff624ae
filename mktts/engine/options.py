"""What a caller sets for a stream, what a stream yields, and how its frames become chunks of PCM."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from mktts.audio import first_audible_sample, joined, to_pcm16
from mktts.common import checked_int, checked_number, one_of
from mktts.errors import OptionsError
from mktts.model.sampling import MAX_SEED, Sampling
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FinishReason = Literal["eos", "max_frames", "cancelled", "runaway"]
MIN_SEGMENT_CHARS = 20
_MOST_FRAMES = 2**62  # of a setting: tables of streams count in 64 bits
Markup = Literal["speak", "strip"]  # what happens to Markdown, HTML and TeX
# Frames of the first, second, ... chunk; the last entry repeats. For a stream that is made singly: small first for a
# fast start, then larger, because one codec call over eight frames costs less than eight calls.
SCHEDULE = (1, 1, 2, 4, 8)
# For streams whose frames are made and decoded together: chunks that cover the next 0.3 s cost the host less than
# single frames do, while larger ones would have to be made further ahead of the listener.
TOGETHER_SCHEDULE = (1, 1, 2, 2, 4)


@dataclass(frozen=True)
class Guard:
    """Ends a segment whose talker does not find its end: about 0.4 % of real requests never say end-of-speech.

    repeat_frames: ends it once so many frames in a row have the same code 0; None: never. Real speech has
        less than 35 (measured by others on released checkpoints).
    frames_per_text_token, slack_frames: end it at slack_frames + frames_per_text_token * text tokens so far, in
        frames; frames_per_text_token None: never. At 150 words a minute and 1.3 tokens a word, speech takes 3.8 frames
        a token; the defaults allow a second a token and six seconds for pauses."""

    repeat_frames: int | None = 40
    frames_per_text_token: float | None = FRAME_RATE_HZ  # the frames of one second
    slack_frames: int = 75

    def __post_init__(self) -> None:
        if self.repeat_frames is not None:
            checked_int("repeat_frames", self.repeat_frames, at_least=2)
        if self.frames_per_text_token is not None:
            checked_number("frames_per_text_token", self.frames_per_text_token, 0, _MOST_FRAMES)
        checked_int("slack_frames", self.slack_frames, at_least=1)

    @classmethod
    def off(cls) -> Guard:
        return cls(repeat_frames=None, frames_per_text_token=None)

    def limit_frames(self, text_tokens: int) -> float:
        """The most frames of a segment with this many text tokens, inf for no limit."""
        if self.frames_per_text_token is None:
            return math.inf
        return self.slack_frames + int(self.frames_per_text_token * text_tokens)


@dataclass
class GuardState:
    """Counts the frames of one segment, and says when and why it must end."""

    guard: Guard
    max_frames: int
    frames: int = 0
    last_code0: int | None = None
    repeats: int = 0

    def count(self, codes: Tensor | np.ndarray, text_tokens: int) -> FinishReason | None:
        """Counts a frame (16,) and returns why it is the last, or None. text_tokens: of the segment so far."""
        self.frames += 1
        code0 = int(codes[0])
        self.repeats = self.repeats + 1 if code0 == self.last_code0 else 1
        self.last_code0 = code0
        if self.guard.repeat_frames is not None and self.repeats >= self.guard.repeat_frames:
            return "runaway"
        if self.frames >= self.guard.limit_frames(text_tokens):
            return "runaway"
        return "max_frames" if self.frames >= self.max_frames else None


@dataclass(frozen=True)
class StreamOptions:
    """How the frames of one utterance become chunks.

    schedule: frames of the first, second, ... chunk; the last entry repeats. None: what suits the engine that serves
        the stream: SCHEDULE, or for streams made together that of `mktts.engine.scheduler.TickSettings`.
    trim_lead: leave out the silence before the first audible 10 ms, all but its last 40 ms (the first frame is silent
        in practice).
    guard: see `Guard`.
    max_chars_per_segment: a longer text is spoken in segments, cut at sentence ends; the speaking rate drifts when
        one generation takes too much text. None: what suits the checkpoint (`text.segment_chars`).
    buffer_frames: at most this many frames are made ahead of the consumer; then the stream waits for it.
    markup: "speak" gives the model the text as it is written; "strip" first takes Markdown, HTML and TeX out.
    word_times: fill `Chunk.words` and `Stream.words`; takes a hundredth of a core for each stream that is heard."""

    schedule: tuple[int, ...] | None = None
    trim_lead: bool = False
    guard: Guard = Guard()
    max_chars_per_segment: int | None = None
    buffer_frames: int = 500
    markup: Markup = "speak"
    word_times: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.guard, Guard):
            raise OptionsError(f"guard must be a Guard, got {self.guard!r}: Guard.off() sets no limit")
        if self.schedule is not None:
            schedule = tuple(self.schedule) if isinstance(self.schedule, Iterable) else ()
            if not schedule:
                raise OptionsError(f"schedule must name chunk sizes in frames, as (1, 1, 2), got {self.schedule!r}")
            object.__setattr__(self, "schedule", schedule)
            for frames in schedule:
                checked_int("every entry of schedule", frames, at_least=1)
        one_of("markup", self.markup, get_args(Markup))
        if self.max_chars_per_segment is not None:
            checked_int("max_chars_per_segment", self.max_chars_per_segment, at_least=MIN_SEGMENT_CHARS)
        checked_int("buffer_frames", self.buffer_frames, max(self.schedule or SCHEDULE), _MOST_FRAMES)


@dataclass(frozen=True)
class Plan:
    """Everything that decides how one utterance is generated, apart from its text and voice. paced: a listener plays it
    in real time; otherwise its frames are made when listeners leave time for them."""

    sampling: Sampling
    seed: int
    max_frames: int | None
    options: StreamOptions
    paced: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            hint = "pass sampling=Sampling(talker=Choice(temperature=0.8)), or replace(synthesizer.sampling, ...)"
            raise OptionsError(f"sampling must be a Sampling, got {type(self.sampling).__name__}: {hint}")
        if not isinstance(self.options, StreamOptions):
            hint = "pass options=StreamOptions(schedule=(1, 1, 2, 4, 8))"
            raise OptionsError(f"options must be StreamOptions, got {type(self.options).__name__}: {hint}")
        checked_int("seed", self.seed, at_least=0, at_most=MAX_SEED)
        if self.max_frames is not None:
            checked_int("max_frames", self.max_frames, at_least=1)


@dataclass(frozen=True)
class Timings:
    """Wall-clock milliseconds (perf_counter).

    ready_ms: from the call (`stream`, or the first `feed` of a session) until this chunk's PCM is on the host.
    prefill_ms, talker_ms, predictor_ms, codec_ms: compute time since the previous chunk. On a CUDA device prefill
    returns before the device is done, and the rest of it counts as talker_ms. Where streams are served together, a
    stream's whole share of their ticks counts as talker_ms."""

    ready_ms: float
    prefill_ms: float
    talker_ms: float
    predictor_ms: float
    codec_ms: float


@dataclass(frozen=True, slots=True)
class WordTime:
    """A word of the text as it was given, with its punctuation, and when it is said: seconds from the first sample.

    estimated: it was found in the sound, since the model gives no alignment: see `mktts.engine.words`."""

    word: str
    start_s: float
    end_s: float
    estimated: bool = True


@dataclass(frozen=True, eq=False)
class Chunk:
    """A piece of speech.

    pcm: (S,) float32 in [-1, 1]. start_s: where it begins in the untrimmed utterance. frames: frames made for it, those
    that `trim_lead` left out included: their sum over an utterance is the length of its codes. ready_pcm16: the value
    of `pcm16`, if it was made with the samples. words: those whose times became known with this chunk, half a second
    after they were said, if `StreamOptions.word_times` is set."""

    pcm: np.ndarray
    start_s: float
    frames: int
    timings: Timings
    ready_pcm16: bytes | None = field(default=None, repr=False)
    words: tuple[WordTime, ...] = ()

    @property
    def pcm16(self) -> bytes:
        """The samples in 16 bits. Raises AudioError as `mktts.audio.to_pcm16`."""
        return to_pcm16(self.pcm) if self.ready_pcm16 is None else self.ready_pcm16

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / SAMPLE_RATE_HZ


KEPT_LEAD_SAMPLES = SAMPLE_RATE_HZ * 40 // 1_000  # before the first audible 10 ms: keeps the attack of a soft sound


class Chunker:
    """Collects the frames of one utterance and hands out chunks."""

    def __init__(self, options: StreamOptions, started_s: float, schedule: tuple[int, ...] = SCHEDULE) -> None:
        """started_s: perf_counter of the call from which timings count. schedule: used if the options have none."""
        self._started_s, self._trimming = started_s, options.trim_lead
        self._schedule = options.schedule or schedule
        self.undecoded: list[Any] = []  # for each frame, what the `decode` of `take` needs
        self.decoding: list[tuple[Any, int]] = []  # chunks whose PCM is not on the host yet, with their frames
        self._lead = np.zeros(0, dtype=np.float32)  # the newest part of the silence so far, while trimming
        self._chunks = 0
        self._samples = 0  # decoded so far, trimmed ones included
        self._silent_frames = 0  # trimmed away since the last chunk
        self.pending_frames = 0  # made, but in no chunk yet
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0  # since the last chunk

    @property
    def missing_frames(self) -> int:
        """Frames that the next chunk still lacks."""
        wanted = self._schedule[min(self._chunks + len(self.decoding), len(self._schedule) - 1)]
        return wanted - len(self.undecoded)

    def take(self, decode: Callable[[list[Any]], Any], flush: bool = False, ahead: bool = False) -> Chunk | None:
        """Returns the next chunk once it is whole by the schedule, or with `flush` what there is; None for none yet.

        decode: begins to turn `undecoded` into PCM (T * SAMPLES_PER_FRAME,) float32, which its result waits for. ahead:
        only begins to decode a chunk that has become whole; the next call returns it."""
        whole = bool(self.undecoded) if flush else self.missing_frames <= 0
        if not whole and not self.decoding:
            return None
        begun_s, taken = time.perf_counter(), len(self.decoding)
        if whole:
            self.decoding.append((decode(self.undecoded), len(self.undecoded)))
            self.undecoded = []
            taken += not ahead
        if not taken:
            return None
        frames = sum(count for _, count in self.decoding[:taken])
        parts = [pending.result() for pending, _ in self.decoding[:taken]]
        pcm = parts[0] if taken == 1 else joined(parts)  # (S,)
        pcm16 = self.decoding[0][0].pcm16 if taken == 1 else None
        del self.decoding[:taken]
        self._samples += len(pcm)
        if self._trimming:
            pcm, pcm16 = self._trimmed(pcm), None
        ready_s = time.perf_counter()
        self.codec_ms += 1e3 * (ready_s - begun_s)
        if not len(pcm):
            self._silent_frames += frames
            return None
        spent_ms = self.prefill_ms, self.talker_ms, self.predictor_ms, self.codec_ms
        timings = Timings(1e3 * (ready_s - self._started_s), *spent_ms)
        frames += self._silent_frames
        chunk = Chunk(pcm, (self._samples - len(pcm)) / SAMPLE_RATE_HZ, frames, timings, pcm16)
        self._chunks += 1
        self._silent_frames = 0
        self.pending_frames -= frames
        self.prefill_ms = self.talker_ms = self.predictor_ms = self.codec_ms = 0.0
        return chunk

    def silence(self, samples: int) -> Iterator[Chunk]:
        """Chunks of exact silence, no longer than those of speech, which follow all that was taken so far."""
        longest = SAMPLES_PER_FRAME * SCHEDULE[-1]
        for start in range(0, samples, longest):
            count = min(longest, samples - start)
            timings = Timings(1e3 * (time.perf_counter() - self._started_s), 0.0, 0.0, 0.0, 0.0)
            yield Chunk(np.zeros(count, np.float32), self._samples / SAMPLE_RATE_HZ, 0, timings, bytes(2 * count))
            self._samples += count

    def _trimmed(self, pcm: np.ndarray) -> np.ndarray:
        whole = joined((self._lead, pcm))
        audible = first_audible_sample(whole)
        if audible is None:
            self._lead = whole[-(KEPT_LEAD_SAMPLES + len(whole) % AUDIBLE_WINDOW_SAMPLES) :]  # begins at a window
            return whole[:0]
        self._trimming = False
        return whole[max(0, audible - KEPT_LEAD_SAMPLES) :]
