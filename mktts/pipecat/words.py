"""When the words of an utterance are heard: after an interruption the context holds about those that were."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter


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


class AudioTimes:
    """When the audio of one utterance is heard, with the pauses of a slow engine."""

    def __init__(self) -> None:
        self.made_s = 0.0
        self._pieces: list[tuple[float, float]] = []  # how far into the utterance each begins, and when it is heard

    def add(self, duration_s: float, begin_s: float) -> None:
        self._pieces.append((self.made_s, begin_s))
        self.made_s += duration_s

    @property
    def begin_s(self) -> float | None:
        return self._pieces[0][1] if self._pieces else None

    def at(self, offset_s: float) -> float:
        """When the sample `offset_s` into the utterance is heard."""
        piece_s, begin_s = self._pieces[bisect_right(self._pieces, offset_s, key=itemgetter(0)) - 1]
        return begin_s + offset_s - piece_s
