"""One WebSocket to a server: its utterances one after another, what it says about them, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode

from mktts.errors import (
    AccessError,
    BusyError,
    ConnectionLost,
    EngineError,
    MkttsError,
    OptionsError,
    PromptError,
    SamplingError,
    TextError,
    VoiceError,
)
from mktts.speech.guard import FinishReason

_MOST_UNANSWERED = 4  # cancelled utterances whose end has not come; the server closes a connection with eight
_KEPT_MESSAGES = 4  # by the socket, before it stops reading
_CLOSE_S = 1.0
_ERRORS: dict[str, type[MkttsError]] = {
    "busy": BusyError,
    "stopping": ConnectionLost,
    "bad_text": TextError,
    "text_too_long": TextError,
    "instruct_too_long": PromptError,
    "idle": TextError,  # it stopped coming; the next utterance may do
    "bad_prompt": PromptError,
    "unknown_speaker": PromptError,
    "bad_voice": VoiceError,
    "bad_sampling": SamplingError,
    "bad_option": OptionsError,
    "duration_too_long": OptionsError,
    "invalid_value": OptionsError,
}  # codes of mktts.server.problems and .studio; any other is a failure of the server


async def dial(url: str, api_key: str | None, timeout_s: float) -> ClientConnection:
    """Opens a WebSocket. Raises ConnectionLost where no server answers, EngineError where what answers is none of ours,
    AccessError for a wrong key, BusyError."""
    try:
        return await connect(
            url,
            additional_headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S,
            max_queue=_KEPT_MESSAGES,
            compression=None,  # noise-like PCM does not shrink
            ping_interval=None,  # a pong waits behind audio that is not read: see _receive
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (401, 403):
            wanted = "it needs an api_key" if api_key is None else "it does not accept this api_key"
            raise AccessError(f"the server at {url} answers {status}: {wanted}") from None
        if status == 503:
            raise ConnectionLost(f"the server at {url} answers 503: it is stopping") from None
        if status == 429:
            raise BusyError(f"the server at {url} answers {status}: ask again later") from None
        raise EngineError(f"{url} answers {status}: expected an mktts server") from None
    except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
        raise ConnectionLost(f"no connection to {url}: {error}; is python -m mktts serve running there?") from None


class Receiver(Protocol):
    """An utterance, as far as its connection knows it: where audio and end of it go (see `RemoteSpeech`)."""

    async def take(self, pcm: bytes) -> None: ...

    def end(self, reason: FinishReason | None = None, error: Exception | None = None) -> None: ...


class Connection:
    """Belongs to one event loop. `on_end` is called once, when it can carry nothing more.

    The server answers utterances in the order of their starts, each up to its `finished` or `error`. One that is
    cancelled is still answered: the next may start, and what comes before its turn is dropped.
    """

    def __init__(self, socket: ClientConnection, silence_s: float, on_end: Callable[[Connection], None]) -> None:
        self._socket = socket
        self._silence_s = silence_s
        self._on_end = on_end
        self._outbox: asyncio.Queue[str] = asyncio.Queue()  # so that no caller waits, and a cancel keeps its place
        self._unanswered: deque[Receiver] = deque()
        self._speaking: Receiver | None = None  # the last of them, unless it was cancelled
        self._ended = False
        self._refusal: MkttsError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def free(self) -> bool:
        """Whether an utterance may start."""
        return not self._ended and self._speaking is None and len(self._unanswered) < _MOST_UNANSWERED

    def start(self, speech: Receiver, fields: dict[str, Any]) -> None:
        """Call only when `free`."""
        self._speaking = speech
        self._unanswered.append(speech)
        self.send(speech, "start", **fields)

    def send(self, speech: Receiver, type: str, **fields: Any) -> None:
        """Sends once all before it is sent; drops what belongs to an utterance that is over."""
        if speech is self._speaking:
            self._outbox.put_nowait(json.dumps({"type": type, **fields}))

    def cancel(self, speech: Receiver) -> None:
        """Asks for the end of an utterance, if it has not come."""
        self.send(speech, "cancel")
        self._release(speech)

    async def close(self) -> None:
        """Ends what is being spoken with EngineError."""
        self._end(EngineError("the source was disconnected in the middle of an utterance"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader sees it too, and says so
            while True:
                await self._socket.send(await self._outbox.get())

    async def _read(self) -> None:
        try:
            while True:
                await self._take(await self._receive())
        except ConnectionClosed as error:
            loss: MkttsError = _loss(error)
            code = None if error.rcvd is None else error.rcvd.code
            if code == CloseCode.POLICY_VIOLATION and self._refusal is not None:  # what made no sense to the server
                loss = self._refusal
            elif code == CloseCode.MESSAGE_TOO_BIG:
                loss = TextError("the text is too long for one message to the server: speak it in parts")
        except TimeoutError:
            loss = ConnectionLost(f"the server has not answered for {2 * self._silence_s:g} s: it is gone or hangs")
        except (ValueError, KeyError, TypeError, AttributeError):
            loss = EngineError("the server sends what is not of its protocol: is it of another version?")
        self._end(loss)
        self._tasks[1].cancel()
        await self._socket.close()

    async def _receive(self) -> str | bytes:
        """The next message. Raises ConnectionClosed, and TimeoutError when not even a ping is answered.

        Pings are sent only while nothing comes and nothing waits to be read.
        """
        pong: asyncio.Future[float] | None = None
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    return await self._socket.recv()
            except TimeoutError:
                if pong is not None and not pong.done():
                    raise
            async with asyncio.timeout(self._silence_s):
                pong = await self._socket.ping()

    async def _take(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            if self._unanswered:
                await self._unanswered[0].take(message)
            return
        said = json.loads(message)
        error = None if said.get("error") is None else _error(said["error"])
        if said["type"] == "finished":
            reason = said["finish_reason"]
            self._answered(reason if reason != "error" else None, error)
        elif said["type"] == "error":
            self._refusal = error
            self._answered(None, error)

    def _answered(self, reason: Any, error: MkttsError | None) -> None:
        if not self._unanswered:
            return
        speech = self._unanswered.popleft()
        if reason == "cancelled":  # by the server: what we cancel has ended here already
            error = error or EngineError("the server ended the utterance")
        speech.end(reason, error)
        self._release(speech)

    def _release(self, speech: Receiver) -> None:
        if self._speaking is speech:
            self._speaking = None

    def _end(self, loss: MkttsError) -> None:
        if self._ended:
            return
        self._ended = True
        self._speaking = None
        for speech in self._unanswered:
            speech.end(None, loss)
        self._unanswered.clear()
        self._on_end(self)


def _error(found: dict[str, Any]) -> MkttsError:
    """The error that a synthesizer in this process would have raised. `found`: mktts.server.schemas.ErrorDetail."""
    return _ERRORS.get(found["code"], EngineError)(f"the server says: {found['message']} ({found['code']})")


def _loss(closed: ConnectionClosed) -> ConnectionLost:
    why = f"{closed.rcvd.code} {closed.rcvd.reason}".strip() if closed.rcvd is not None else "without a word"
    return ConnectionLost(f"the connection to the server was lost ({why}): what it was speaking ends here")
