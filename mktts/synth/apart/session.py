"""Streams whose text is written here and spoken in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mktts.errors import EngineError, TextError
from mktts.speech.job import Job
from mktts.speech.stream import Stream
from mktts.speech.text import check_length, clean_piece


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


class ApartSession(Stream):
    """As `mktts.speech.stream.Session`."""

    def __init__(self, engine: Any, job: Job, seed: int, say: Callable[[str | None], None]) -> None:
        super().__init__(engine, job, seed)
        self._say = say
        self._writing = threading.Lock()
        self._chars, self._visible, self._finished = 0, False, False

    def feed(self, piece: str) -> None:
        """As `Session.feed`; what a front end has no words for ends the stream with its TextError."""
        piece = clean_piece(piece)
        with self._writing:
            if self._finished:
                raise EngineError("feed after finish: open another session for more text")
            if self._job.over:
                return
            check_length(self._chars + len(piece))
            self._chars += len(piece)
            self._visible = self._visible or bool(piece.strip())
            self._say(piece)

    def finish(self) -> None:
        """As `Session.finish`."""
        with self._writing:
            if self._finished:
                return
            self._finished = True
            if self._job.over:
                return
            if not self._visible:
                self._job.cancel()
                raise TextError("expected text to speak before finish, got none")
            self._say(None)
