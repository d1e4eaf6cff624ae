"""`/tts/ws`: receives text while it is being written and sends audio and timings, for one utterance after another.

Each connection has a receiving task, which only waits for messages and so notices a `cancel` or a closed connection at
once, and a sending task, which a slow client may block. The former sends only the error that closes the connection."""

import asyncio
import contextlib
import json
import logging
from dataclasses import asdict
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect, status
from pydantic import TypeAdapter, ValidationError

from mktts.server.access import ApiError, from_validation
from mktts.server.schemas import ClientMessage, Start, Text
from mktts.server.service import ServedStream, SpeechService
from mktts.spec import SAMPLE_RATE_HZ

_MESSAGES: TypeAdapter[Any] = TypeAdapter(ClientMessage)
_MAX_WAITING = 8  # utterances started and cancelled before the client has read how the earlier ones ended
_GONE = (RuntimeError, WebSocketDisconnect, TimeoutError)  # raised by a send if the client is gone or reads nothing

log = logging.getLogger(__name__)


class SpeechSocket:
    """One connection. Only the latest utterance takes text; cancelled ones before it may still be ending."""

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        self._socket, self._service, self._limits = socket, service, service.limits
        self._stream: ServedStream | None = None  # the latest
        self._begun = False  # a `start` was received
        self._writing = False  # more text may follow
        # Streams to send, each with whether more text may follow, and errors that refused a `start`.
        self._answers: asyncio.Queue[tuple[ServedStream, bool] | ApiError] = asyncio.Queue(_MAX_WAITING)

    async def run(self) -> None:
        await self._socket.accept()
        answering = asyncio.create_task(self._answer())
        try:
            while True:
                await self._take_message()
        except WebSocketDisconnect:
            pass
        except ApiError as error:  # an invalid message
            self._end()
            with contextlib.suppress(*_GONE):
                await self._refuse(error)
                await self._socket.close(status.WS_1008_POLICY_VIOLATION, error.code)
        finally:
            self._end()
            answering.cancel()

    async def _answer(self) -> None:
        with contextlib.suppress(*_GONE):  # the receiving task notices a disconnect
            while True:
                answer = await self._answers.get()
                if isinstance(answer, ApiError):
                    await self._refuse(answer)
                else:
                    await self._send_all(*answer)

    async def _take_message(self) -> None:
        """Receives and handles one message. Raises ApiError for an invalid one, and WebSocketDisconnect."""
        try:
            async with asyncio.timeout(self._limits.idle_s if self._takes_text() else None):
                text = await self._socket.receive_text()
            message = _MESSAGES.validate_json(text)
        except TimeoutError:
            self._writing = False
            self._stream.fail(ApiError(408, "idle", f"no text for {self._limits.idle_s:g} s"))
            return
        except RuntimeError:  # a failed send has already closed the connection
            raise WebSocketDisconnect from None
        except KeyError:
            raise ApiError(422, "not_text", "expected a JSON message, got a binary one") from None
        except ValidationError as error:
            raise from_validation(error.errors(include_input=False), tagged=True) from None
        if isinstance(message, Start):
            self._start(message)
        elif not self._begun:
            raise ApiError(422, "not_started", "expected start before anything else")
        elif message.type == "cancel":
            self._end()
        elif self._takes_text():  # otherwise the utterance ended or was refused before the client knew: ignored
            self._writing = isinstance(message, Text)
            self._stream.feed(message.text if self._writing else None)

    def _start(self, message: Start) -> None:
        if self._stream is not None and not self._stream.closed:
            raise ApiError(422, "not_finished", "expected cancel, or the message finished, before another start")
        if self._answers.full():
            raise ApiError(422, "too_many_starts", f"{_MAX_WAITING} utterances have unread ends: read them first")
        self._begun = True
        try:
            self._stream = self._service.speak("tts_ws", message, message.text, owner=self._socket.state.owner)
        except ApiError as error:
            self._answers.put_nowait(error)
            return
        self._writing = message.text is None
        self._answers.put_nowait((self._stream, self._writing))

    def _takes_text(self) -> bool:
        return self._writing and not self._stream.closed

    def _end(self) -> None:
        """Stops taking text and cancels the stream."""
        self._writing = False
        if self._stream is not None:
            self._stream.close()

    async def _send_all(self, stream: ServedStream, begun: bool) -> None:
        """Sends a stream. begun: send `started` at once, as text may still follow; otherwise `started` is sent with the
        first audio or at the end, and a stream that is not admitted gets an error instead."""
        about = {"sample_rate_hz": SAMPLE_RATE_HZ, "sample_format": "s16le", "channels": 1}
        about |= {"id": stream.id, "seed": stream.state.seed, "random_weights": self._service.model.random_weights}
        try:
            if begun:
                await self._send("started", **about)
            try:
                async for chunk in stream.chunks():
                    if not begun:
                        begun = True
                        await self._send("started", **about)
                    words = {} if stream.state.words is None else {"words": [asdict(word) for word in chunk.words]}
                    when = {"start_s": chunk.start_s, "duration_s": chunk.duration_s, "frames": chunk.frames}
                    async with stream.sending(chunk.duration_s):
                        await self._send("chunk", id=stream.id, **when, timings=asdict(chunk.timings), **words)
                        await self._socket.send_bytes(chunk.pcm16)
            except ApiError as error:  # `finished` reports errors other than busy
                if error.code == "busy":
                    if not begun:
                        await self._refuse(error)
                        return
                    self._service.meters.refuse(error.code)
            if not begun:
                await self._send("started", **about)
            stream.close()
            await self._send("finished", **stream.state.model_dump())
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", stream.id, self._limits.stall_s)
            with contextlib.suppress(*_GONE):
                async with asyncio.timeout(1):
                    await self._socket.close(status.WS_1008_POLICY_VIOLATION, "stalled")
        finally:
            stream.close()

    async def _send(self, type: str, **fields: Any) -> None:
        """Sends a JSON message, escaped to ASCII, as a text it quotes may contain a lone surrogate."""
        async with asyncio.timeout(self._limits.stall_s):
            await self._socket.send_text(json.dumps({"type": type, **fields}))

    async def _refuse(self, error: ApiError) -> None:
        """Sends an error: a `start` was refused, or a message was invalid and the connection will be closed."""
        self._service.meters.refuse(error.code)
        await self._send("error", error=error.detail().model_dump(), retry_after_s=error.retry_after_s)
