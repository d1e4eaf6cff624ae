"""Streams whose text is written here and spoken in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mktts.speech.job import Job
from mktts.speech.stream import WrittenStream


class Elsewhere:
    """What makes a stream, as its job here knows it. See `mktts.speech.job.Work`."""

    finish_reason = None
    pending_frames = 0

    def __init__(self) -> None:
        self.codes: list[Any] = []
        self.cancelled = False

    def ready(self) -> bool:
        """Nothing is made here."""
        return False

    def close(self) -> None:
        """Nothing is held here."""


class ApartSession(WrittenStream):
    """As `mktts.speech.stream.Session`; what a front end has no words for ends the stream with its TextError."""

    _begun = False

    def __init__(self, engine: Any, job: Job, seed: int, say: Callable[[str | None], None]) -> None:
        """say: tells the other process a piece, or with None the end."""
        super().__init__(engine, job, seed)
        self._say = say

    def _take(self, words: str, visible: bool) -> None:
        self._begun = self._begun or visible
        self._say(words)

    def _end(self) -> None:
        if not self._job.over:
            self._say(None)
