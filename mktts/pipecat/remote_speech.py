"""One utterance that a server speaks, as its consumer sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from loguru import logger

from mktts.errors import BusyError, ConnectionLost, EngineError
from mktts.speech.guard import FinishReason
from mktts.speech.text import clean_piece

if TYPE_CHECKING:
    from mktts.pipecat.connection import Connection

KEPT_PIECES = 8  # read ahead of the consumer, 5 s of audio at most; the rest waits in the socket, then in the server
PATIENCE_S = (0.1, 0.4, 1.0)  # between the tries of an utterance of which nothing was heard yet


class RemoteSpeech:
    """A `Speech`. The connection calls `take`, `end`; all methods belong to the event loop.

    redial: finds a connection that is free, when this one is lost, or its server has no place free, before anything of
    the utterance was heard. Then it begins again there; later, a loss is its end.
    """

    def __init__(
        self, connection: Connection, start: dict[str, Any], redial: Callable[[], Awaitable[Connection]]
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._connection = connection
        self._start = start
        self._redial = redial
        self._waits_s = iter(PATIENCE_S)
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()  # for the consumer: a piece, or the end
        self._room = asyncio.Event()  # for the connection
        self._heard = False
        self._ended = False
        self._error: Exception | None = None
        self._cancelled = False
        connection.start(self, start)

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._pieces.clear()
        if self._error is not None:  # that nobody was told of: it waits for another try
            self._error, self.finish_reason = None, "cancelled"
        self._connection.cancel(self)
        self.end("cancelled")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            while True:
                while not self._pieces and not self._ended:
                    self._changed.clear()
                    await self._changed.wait()
                if self._pieces or not await self._again():
                    break
        except BaseException:  # cancelling the task that waits cancels the generation
            self.cancel()
            raise
        if self._pieces:
            self._heard = True
            self._room.set()
            return self._pieces.popleft()
        error, self._error = self._error, None
        raise error or StopAsyncIteration

    async def take(self, pcm: bytes) -> None:
        """Adds a piece; waits while the consumer is too far behind. Drops it when no piece is wanted."""
        while len(self._pieces) >= KEPT_PIECES and not self._ended:
            self._room.clear()
            await self._room.wait()
        if not self._ended:
            self._pieces.append(pcm)
            self._changed.set()

    def end(self, reason: FinishReason | None = None, error: Exception | None = None) -> None:
        """No piece comes any more. Idempotent: the first reason holds."""
        if not self._ended:
            self._ended = True
            self.finish_reason, self._error = reason, error
        self._changed.set()
        self._room.set()

    async def _again(self) -> bool:
        """Begins the utterance anew where that may help and nobody has heard of it; False: it is over."""
        while isinstance(self._error, (ConnectionLost, BusyError)) and not self._heard and not self._cancelled:
            wait_s = next(self._waits_s, None)
            if wait_s is None:
                return False
            logger.warning(f"{self._error}; nothing was heard yet: trying again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            if self._cancelled:
                return False
            try:
                connection = await self._redial()
            except (ConnectionLost, BusyError) as error:
                self._error = error
                continue
            self._connection, self._ended, self._error = connection, False, None
            connection.start(self, self._start)
            self._resume()
            return True
        return False

    def _resume(self) -> None:
        """Sends what followed the start, on another connection."""


class RemoteFedSpeech(RemoteSpeech):
    """A `FedSpeech`. Its text is kept until something of it was heard."""

    def __init__(
        self, connection: Connection, start: dict[str, Any], redial: Callable[[], Awaitable[Connection]]
    ) -> None:
        self._fed: list[str] = []
        self._finished = False
        super().__init__(connection, start, redial)

    def feed(self, text: str) -> None:
        """Raises TextError when `text` is not a str, EngineError after `finish`."""
        text = clean_piece(text)
        if self._finished:
            raise EngineError("feed after finish: open another utterance for more text")
        if text:
            self._fed.append(text)
            self._connection.send(self, "text", text=text)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if any(text.strip() for text in self._fed):
            self._connection.send(self, "finish")
        else:  # nothing to say, and no failure in a conversation
            self.cancel()

    def _resume(self) -> None:
        for text in self._fed:
            self._connection.send(self, "text", text=text)
        if self._finished:
            self._connection.send(self, "finish")
