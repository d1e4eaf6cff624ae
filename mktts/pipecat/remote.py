"""Speech from an `mktts serve` somewhere else, over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self
from urllib.parse import urlsplit

from loguru import logger
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import one_of
from mktts.engine.options import FinishReason
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
from mktts.pipecat.source import Style
from mktts.spec import SAMPLE_RATE_HZ
from mktts.text.split import clean_piece

PATIENCE_S = (0.1, 0.4, 1.0)  # between the tries of an utterance of which nothing was heard yet
KEPT_PIECES = 8  # read ahead of the consumer, 5 s of audio at most; the rest waits in the socket, then in the server
_MOST_UNANSWERED = 4  # cancelled utterances whose end has not come; the server closes a connection with eight
_KEPT_MESSAGES = 4  # by the socket, before it stops reading
_CLOSE_S = 1.0
_MAX_HEALTH_BYTES = 1 << 20
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
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
}  # codes of the server's errors; any other is a failure of the server


class RemoteSource:
    """Speech from a server: `MkttsTTSService(source=RemoteSource("http://127.0.0.1:8000"))`.

    A connection carries one utterance at a time, so each service gets its own. One that is lost is replaced at the
    next utterance. What it was speaking begins again on another one if nothing of it was heard yet, and so does what a
    server has no place for; otherwise it ends with ConnectionLost, which leaves a service usable. Errors are those of
    a source in the same process, and also BusyError, ConnectionLost and AccessError. Belongs to one event loop at a
    time.

    name: of the server's checkpoint, once connected.
    """

    default_voice: str | None = None  # the server's own first

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        max_frames: int | None = None,
        trim_lead: bool = False,
        connect_s: float = 5.0,
        silence_s: float = 5.0,
    ) -> None:
        """Connects to nothing yet. Raises OptionsError for a url or key that cannot be one.

        url: where the server listens, as it prints it; a path before /tts/ws is kept.
        max_frames, trim_lead: of every utterance, as in a request.
        connect_s: for an answer to a handshake.
        silence_s: without a message until the server is asked whether it is there, and again until it counts as gone.
        """
        self._http, self._ws = _addresses(url)
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise OptionsError("api_key must be printable ASCII and not empty; leave it out for a server without one")
        self.name = urlsplit(self._http).netloc
        self.sample_rate_hz = SAMPLE_RATE_HZ
        self._api_key = api_key
        self._limits = {"max_frames": max_frames, "trim_lead": trim_lead or None, "markup": "strip"}
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._model_type = ""
        self._speakers: list[str] = []
        self._languages: list[str] = []  # empty until connected
        self._connections: list[_Connection] = []
        self._users = 0

    async def connect(self) -> None:
        """Asks what the server has, and opens a connection for one more service.

        Raises ConnectionLost where no server answers, EngineError where what answers is none of ours, AccessError for
        a wrong key.
        """
        await self._read_health()
        if sum(connection.free for connection in self._connections) <= self._users:
            await self._open_connection()
        self._users += 1

    async def disconnect(self) -> None:
        """Closes one service's connection, and with the last service all of them."""
        self._users = max(0, self._users - 1)
        idle = [connection for connection in self._connections if connection.free]
        surplus = idle[: max(0, len(self._connections) - self._users)]
        closing = surplus if self._users else [*self._connections]
        await asyncio.gather(*(connection.close() for connection in closing))

    def check(self, style: Style) -> None:
        """Raises PromptError for a voice or language that the server, once connected, is known not to have."""
        if not self._languages:
            return
        one_of("language", style.language.lower(), self._languages, PromptError)
        if style.voice is not None and style.voice.lower() not in self._speakers:
            known = ", ".join(self._speakers) or f"none: a {self._model_type} checkpoint without saved voices"
            raise PromptError(
                f"the server's voices are {known}; got {style.voice!r} (a saved voice is given to the server, "
                "--voice NAME=FILE, and asked for by that name)"
            )

    def spoken(self, word: str, style: Style) -> str:
        """As it is written: the server does not say how it reads."""
        return word

    async def speak(self, text: str, style: Style) -> RemoteSpeech:
        """As `SpeechSource.speak`. Raises ConnectionLost, BusyError, EngineError and AccessError; the rest comes from
        the speech."""
        return await self._started({"text": text, **self._start(style)})

    async def open(self, style: Style) -> RemoteSpeech:
        """As `SpeechSource.open`; raises as `speak`."""
        return await self._started(self._start(style))

    async def _started(self, start: dict[str, Any]) -> RemoteSpeech:
        speech = RemoteSpeech(self._free_connection, start)
        await speech.begin()
        return speech

    def _start(self, style: Style) -> dict[str, Any]:
        """The keys of a start message."""
        fields = {
            "language": style.language,
            "speaker": style.voice,
            "instruct": style.instruct or None,
            "seed": style.seed,
            **self._limits,
        }
        if style.sampling is not None:
            fields |= style.sampling.flat()
        return {key: value for key, value in fields.items() if value is not None}

    async def _read_health(self) -> None:
        """Takes in what the server says about itself at GET /health."""
        http = self._http
        found = await asyncio.to_thread(_get_health, f"{http}/health", self._connect_s)
        try:
            status, model = found["status"], found["model"]
            name, kind, random_weights = model["checkpoint"], model["type"], model["random_weights"]
            speakers, languages = ([one.lower() for one in found[key]] for key in ("speakers", "languages"))
            rate_hz = int(found["sample_rate_hz"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EngineError(f"{http} does not answer as an mktts server of this version does") from None
        if status == "stopping":
            raise ConnectionLost(f"the server at {http} is stopping: start it again")
        if status != "ok":
            logger.warning(f"the server at {http} says about itself: {status}")
        if random_weights:
            logger.warning(f"the server at {http} has {RANDOM_WEIGHTS}")
        self.name, self.sample_rate_hz = name, rate_hz
        self._model_type, self._speakers, self._languages = kind, speakers, languages

    async def _free_connection(self) -> _Connection:
        """A connection for one utterance. Nothing may be awaited between this and the utterance's start."""
        free = next((connection for connection in self._connections if connection.free), None)
        return free or await self._open_connection()

    async def _open_connection(self) -> _Connection:
        socket = await _open_socket(self._ws, self._api_key, self._connect_s)
        connection = _Connection(socket, self._silence_s, self._connections.remove)
        self._connections.append(connection)
        return connection


class RemoteSpeech:
    """A `Speech`; text that is fed to it is kept until something of it was heard. The connection calls `take` and
    `end`; all methods belong to the event loop.

    Where no connection is found, or it is lost, or its server has no place free, before anything was heard, the
    utterance begins again on another one, after the waits of PATIENCE_S; later, a loss is its end.
    """

    def __init__(self, find: Callable[[], Awaitable[_Connection]], start: dict[str, Any]) -> None:
        """find: gives a connection that is free. start: the fields of the start message."""
        self.finish_reason: FinishReason | None = None
        self._find = find
        self._start = start
        self._connection: _Connection | None = None
        self._fed: list[str] = []
        self._finished = False
        self._waits_s = iter(PATIENCE_S)
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()  # pieces or the end: for the consumer or the connection, which never wait both
        self._heard = False
        self._ended = False
        self._error: Exception | None = None
        self._cancelled = False

    async def begin(self) -> None:
        """Starts on a connection, and sends what was fed already. Raises what the last try to find one raised."""
        while not self._cancelled:
            try:
                connection = await self._find()
            except (ConnectionLost, BusyError) as error:
                if not await self._waited(error):
                    raise
                continue
            self._connection, self._ended, self._error = connection, False, None
            connection.start(self, self._start)
            for text in self._fed:
                connection.send(self, "text", text=text)
            if self._finished:
                connection.send(self, "finish")
            return

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

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._pieces.clear()
        if self._error is not None:  # that was not raised yet: it waits for another try
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
            self._changed.set()
            return self._pieces.popleft()
        error, self._error = self._error, None
        raise error or StopAsyncIteration

    async def take(self, pcm: bytes) -> None:
        """Adds a piece; waits while the consumer is too far behind. Drops it when no piece is wanted."""
        while len(self._pieces) >= KEPT_PIECES and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._ended:
            self._pieces.append(pcm)
            self._changed.set()

    def end(self, reason: FinishReason | None = None, error: Exception | None = None) -> None:
        """No piece comes any more. Idempotent: the first reason holds."""
        if not self._ended:
            self._ended = True
            self.finish_reason, self._error = reason, error
        self._changed.set()

    async def _again(self) -> bool:
        """Begins the utterance anew where that may help and nothing of it was heard; False: it is over."""
        error = self._error
        if not isinstance(error, (ConnectionLost, BusyError)) or self._heard or not await self._waited(error):
            return False
        await self.begin()
        return True

    async def _waited(self, error: Exception) -> bool:
        """Waits before another try; False: there is none."""
        wait_s = next(self._waits_s, None)
        if wait_s is None:
            return False
        logger.warning(f"{error}; nothing was heard yet: trying again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        return True


class _Connection:
    """One WebSocket. Belongs to one event loop. `on_end` is called once, when it can carry nothing more.

    The server answers utterances in the order of their starts, each up to its `finished` or `error`. One that is
    cancelled is still answered: the next may start, and what comes before its turn is dropped.
    """

    def __init__(self, socket: ClientConnection, silence_s: float, on_end: Callable[[_Connection], None]) -> None:
        self._socket = socket
        self._silence_s = silence_s
        self._on_end = on_end
        self._outbox: asyncio.Queue[str] = asyncio.Queue()  # so that no caller waits, and a cancel keeps its place
        self._unanswered: deque[RemoteSpeech] = deque()
        self._speaking: RemoteSpeech | None = None  # the last of them, unless it was cancelled
        self._ended = False
        self._refusal: MkttsError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def free(self) -> bool:
        """Whether an utterance may start."""
        return not self._ended and self._speaking is None and len(self._unanswered) < _MOST_UNANSWERED

    def start(self, speech: RemoteSpeech, fields: dict[str, Any]) -> None:
        """Call only when `free`."""
        self._speaking = speech
        self._unanswered.append(speech)
        self.send(speech, "start", **fields)

    def send(self, speech: RemoteSpeech, type: str, **fields: Any) -> None:
        """Sends once all before it is sent; drops what belongs to an utterance that is over."""
        if speech is self._speaking:
            self._outbox.put_nowait(json.dumps({"type": type, **fields}))

    def cancel(self, speech: RemoteSpeech) -> None:
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
        loss: MkttsError
        try:
            while True:
                await self._take(await self._receive())
        except ConnectionClosed as error:
            closed = error.rcvd
            why = f"{closed.code} {closed.reason}".strip() if closed is not None else "without a word"
            loss = ConnectionLost(f"the connection to the server was lost ({why}): what it was speaking ends here")
            code = None if closed is None else closed.code
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
        error: MkttsError | None = None
        if (found := said.get("error")) is not None:  # as a synthesizer in this process would have raised it
            kind = _ERRORS.get(found["code"], EngineError)
            error = kind(f"the server says: {found['message']} ({found['code']})")
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

    def _release(self, speech: RemoteSpeech) -> None:
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


async def _open_socket(url: str, api_key: str | None, timeout_s: float) -> ClientConnection:
    """Raises ConnectionLost where no server answers, EngineError where what answers is none of ours, AccessError for a
    wrong key, BusyError."""
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


def _get_health(url: str, timeout_s: float) -> Any:
    """The JSON at `url`. Raises as `_open_socket`."""
    try:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                body = answer.read(_MAX_HEALTH_BYTES)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise AccessError(f"{url} answers {error.code}: this machine may not ask") from None
            if error.code != 503:  # an unhealthy server's status, with the same body
                raise
            body = error.read(_MAX_HEALTH_BYTES)
        return json.loads(body)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConnectionLost(
            f"no answer from {url}: {reason}; start a server there with python -m mktts serve"
        ) from None
    except ValueError:
        raise EngineError(f"{url} does not answer as an mktts server of this version does") from None


def _addresses(url: str) -> tuple[str, str]:
    """(the server's base as http, the WebSocket's address). Raises OptionsError."""
    try:
        parts = urlsplit(url.strip())
        scheme, host, _ = _SCHEMES.get(parts.scheme), parts.hostname, parts.port
    except (ValueError, AttributeError):
        scheme = host = None
    if scheme is None or not host or parts.query or parts.fragment or parts.username is not None:
        raise OptionsError(f"url must be like http://127.0.0.1:8000 or https://host, got {url!r}")
    where = f"{parts.netloc}{parts.path.rstrip('/')}"
    return f"{scheme.replace('ws', 'http')}://{where}", f"{scheme}://{where}/tts/ws"
