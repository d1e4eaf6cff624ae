"""When the words of an utterance are heard: after an interruption the context holds about those that were."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


class Playout:
    """When pushed audio is heard: one piece after another, none before it was pushed."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def push(self, duration_s: float, now_s: float) -> float:
        """Adds a piece; returns when it begins to be heard."""
        begin_s = max(self._until_s, now_s)
        self._until_s = begin_s + duration_s
        return begin_s

    def drop(self) -> None:
        """Drops the audio that has not been heard."""
        self._until_s = 0.0


@dataclass
class AudioTimes:
    """When the audio of one utterance is heard, with the pauses of a slow engine."""

    made_s: float = 0.0
    _offsets_s: list[float] = field(default_factory=list)
    _begins_s: list[float] = field(default_factory=list)

    def add(self, duration_s: float, begin_s: float) -> None:
        self._offsets_s.append(self.made_s)
        self._begins_s.append(begin_s)
        self.made_s += duration_s

    @property
    def begin_s(self) -> float | None:
        return self._begins_s[0] if self._begins_s else None

    def at(self, offset_s: float) -> float:
        """When the sample `offset_s` into the utterance is heard."""
        piece = bisect_right(self._offsets_s, offset_s) - 1
        return self._begins_s[piece] + offset_s - self._offsets_s[piece]
