"""Sentences through a synthesizer: as many as fit at once, again with another seed where the end was missed."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mktts.errors import EngineError, MkttsError, VoiceError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.options import StreamOptions
from mktts.synth.many import Asked, Said
from mktts.synth.speak_all.sentences import Sentence

if TYPE_CHECKING:
    from mktts.model.voice import Voice
    from mktts.synth.synthesizer import Synthesizer

Status = Literal["ok", "unfinished", "failed", "bad"]
MAX_RETRIES = 3
_SEED_BITS = 32  # short enough to read and type again
_SILENCE = np.zeros(0, np.float32)
_UNREAD = StreamOptions(buffer_frames=1 << 40)  # nobody reads before the end; the text and the guard bound it
_LOST_CAUSE = 20  # failures in a row, beside those that were open together, that are the engine's and not a sentence's


@dataclass(frozen=True)
class Manner:
    """How every sentence is spoken whose line does not say otherwise.

    seed: that those of sentences follow from. beside: the table's folder, where relative names of voice files begin.
    retries: how often a sentence is tried again, 0 to MAX_RETRIES.
    """

    seed: int
    beside: Path
    voice: str | None = None
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None
    layout: Any = None
    max_frames: int | None = None
    greedy: bool = False
    retries: int = MAX_RETRIES

    def digest(self, sentence: Sentence) -> str:
        """Of all in a sentence's line that its sound follows from. Raises VoiceError where its voice cannot be read."""
        voice = None if sentence.voice is None else self.voice_of(sentence).digest
        content = [sentence.text, voice, sentence.speaker, sentence.language, sentence.instruct, sentence.max_frames]
        return hashlib.sha256(json.dumps([*content, self.seed_of(sentence)]).encode()).hexdigest()[:16]

    def seed_of(self, sentence: Sentence, attempt: int = 0) -> int:
        """The one in its line, or one that follows from the folder's and its id; others for further attempts. None of
        them depends on what was spoken before, or where."""
        if attempt:
            return _derived(f"{self.seed_of(sentence)} {attempt}")
        return _derived(f"{self.seed} {sentence.id}") if sentence.seed is None else sentence.seed

    def voice_of(self, sentence: Sentence) -> Voice | None:
        """Raises VoiceError."""
        named = sentence.voice or self.voice
        if named is None:
            return None
        return _voice(str(self.beside / named) if sentence.voice else named)

    def settings(self, sentence: Sentence, seed: int, synthesizer: Synthesizer) -> dict[str, Any]:
        """The keyword arguments of `Synthesizer.stream`. Raises VoiceError."""
        return {
            "voice": self.voice_of(sentence),
            "speaker": sentence.speaker or self.speaker,
            "language": sentence.language or self.language or "auto",
            "instruct": sentence.instruct or self.instruct,
            "layout": self.layout,
            "sampling": synthesizer.sampling.greedy() if self.greedy else None,
            "max_frames": sentence.max_frames or self.max_frames,
            "seed": seed,
            "options": _UNREAD,
        }


class Attempt(NamedTuple):
    """One that was not kept. reason: why it ended, or the error."""

    seed: int
    reason: str


@dataclass(frozen=True)
class Take:
    """What is kept of a sentence. status: "ok"; "unfinished": no attempt came to its end, this is the last one;
    "failed" inside; "bad" input. pcm: (S,) float32, empty without an utterance. earlier: attempts that were not kept.
    """

    sentence: Sentence
    status: Status
    seed: int
    pcm: np.ndarray = field(repr=False)
    reason: str | None = None
    error: str | None = None
    earlier: tuple[Attempt, ...] = ()

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / SAMPLE_RATE_HZ


def takes(
    synthesizer: Synthesizer, sentences: Iterable[Sentence], manner: Manner, at_once: int | None = None
) -> Iterator[Take]:
    """A take of every sentence, each as soon as it is over; `sentences` are taken as there is room.

    One that runs away, misses its end or fails inside is tried again before new ones begin. at_once: as of
    `Synthesizer.say_each`. Raises EngineError where so many fail in a row that it cannot be the sentences.
    """
    source = iter(sentences)
    again: deque[tuple[Sentence, tuple[Attempt, ...]]] = deque()
    unheard: list[Take] = []  # whose voice cannot be had
    failures = opened = most_open = 0

    def ask() -> Asked | None:
        nonlocal opened
        while True:
            sentence, earlier = again.popleft() if again else (next(source, None), ())
            if sentence is None:
                return None
            seed = manner.seed_of(sentence, len(earlier))
            try:
                asked = Asked(sentence.text, manner.settings(sentence, seed, synthesizer), (sentence, seed, earlier))
            except VoiceError as error:
                unheard.append(Take(sentence, "bad", seed, _SILENCE, None, _line(error), earlier))
                continue
            opened += 1
            return asked

    for said in synthesizer.say_each(ask, at_once=at_once):
        yield from unheard
        unheard.clear()
        most_open, opened = max(most_open, opened), opened - 1
        sentence, seed, earlier = said.asked.name
        status, reason = _judged(said, sentence, manner)
        inside = said.error is not None and status == "failed"
        failures = failures + 1 if inside else 0
        if failures > _LOST_CAUSE + most_open:
            raise EngineError(f"{failures} sentences failed one after the other, the last one by {reason}")
        if status in ("unfinished", "failed") and len(earlier) < manner.retries:
            again.append((sentence, (*earlier, Attempt(seed, reason))))
            continue
        finish = None if said.stream is None or said.error is not None else said.stream.finish_reason
        error = None if said.error is None else _line(said.error)
        yield Take(sentence, status, seed, said.pcm, finish, error, earlier)
    yield from unheard


def _judged(said: Said, sentence: Sentence, manner: Manner) -> tuple[Status, str]:
    """What a text that is over is worth, and why it ended."""
    if said.error is not None:
        bad = isinstance(said.error, MkttsError) and said.error.exit_status == 2
        return "bad" if bad else "failed", _line(said.error)
    reason = said.stream.finish_reason
    if reason == "eos":
        return ("ok", reason) if len(said.pcm) else ("unfinished", "nothing was spoken")
    asked_for = reason == "max_frames" and (sentence.max_frames or manner.max_frames) is not None
    return "ok" if asked_for else "unfinished", str(reason)


@lru_cache(maxsize=256)
def _voice(path: str) -> Voice:
    from mktts.model.voice import Voice

    return Voice.load(path)


def _derived(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[: _SEED_BITS // 8])


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, MkttsError) else f"{type(error).__name__}: {text}"
