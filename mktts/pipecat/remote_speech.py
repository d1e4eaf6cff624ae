"""One utterance that a server speaks, as its consumer sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from mktts.errors import EngineError
from mktts.speech.guard import FinishReason
from mktts.speech.text import clean_piece

if TYPE_CHECKING:
    from mktts.pipecat.connection import Connection

KEPT_PIECES = 8  # read ahead of the consumer, 5 s of audio at most; the rest waits in the socket, then in the server


class RemoteSpeech:
    """A `Speech`. The connection calls `take`, `end`; all methods belong to the event loop."""

    def __init__(self, connection: Connection, start: dict[str, Any]) -> None:
        self.finish_reason: FinishReason | None = None
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()  # for the consumer: a piece, or the end
        self._room = asyncio.Event()  # for the connection
        self._ended = False
        self._error: Exception | None = None
        self._cancelled = False
        connection.start(self, start)

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._pieces.clear()
        self._error = None
        self._connection.cancel(self)
        self.end("cancelled")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            while not self._pieces and not self._ended:
                self._changed.clear()
                await self._changed.wait()
        except BaseException:  # cancelling the task that waits cancels the generation
            self.cancel()
            raise
        if self._pieces:
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


class RemoteFedSpeech(RemoteSpeech):
    """A `FedSpeech`."""

    def __init__(self, connection: Connection, start: dict[str, Any]) -> None:
        super().__init__(connection, start)
        self._visible = False
        self._finished = False

    def feed(self, text: str) -> None:
        """Raises TextError when `text` is not a str, EngineError after `finish`."""
        text = clean_piece(text)
        if self._finished:
            raise EngineError("feed after finish: open another utterance for more text")
        if text:
            self._visible |= bool(text.strip())
            self._connection.send(self, "text", text=text)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._visible:
            self._connection.send(self, "finish")
        else:  # nothing to say, and no failure in a conversation
            self.cancel()
