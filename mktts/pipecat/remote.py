"""Speech from an mktts server, over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from itertools import chain, repeat
from typing import Any
from urllib.parse import urlsplit

from loguru import logger
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.protocol import State

from mktts import errors
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import one_of
from mktts.engine.options import FinishReason
from mktts.errors import AccessError, BusyError, ConnectionLost, EngineError, MkttsError, OptionsError, TextError
from mktts.pipecat.source import Speech, SpeechSource, Style
from mktts.spec import SAMPLE_RATE_HZ, language_named
from mktts.text.markup import MarkupFeed
from mktts.text.split import clean_piece

PATIENCE_S = (0.1, 0.4, 1.0)  # delays between attempts at an utterance that has produced no audio yet; the last repeats
_KEPT_MESSAGES = 16  # read ahead of the consumer, half of them audio; more stays in the sockets and then in the server
_CLOSE_S = 1.0
_MAX_HEALTH_BYTES = 1 << 20
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_CODES: dict[type[MkttsError], tuple[str, ...]] = {
    errors.BusyError: ("busy",),
    errors.ConnectionLost: ("stopping",),
    errors.TextError: ("bad_text", "text_too_long", "idle"),  # idle: text stopped coming; the next utterance may work
    errors.PromptError: ("bad_prompt", "unknown_speaker", "instruct_too_long"),
    errors.VoiceError: ("bad_voice",),
    errors.SamplingError: ("bad_sampling",),
    errors.OptionsError: ("bad_option", "duration_too_long", "invalid_value"),
}  # codes of the server by error; any other code means that the server failed


class RemoteSource(SpeechSource):
    """Speech from a server: `MkttsTTSService(source=RemoteSource("http://127.0.0.1:8000"))`.

    Each utterance has its own WebSocket, and one is kept open in advance per service. If the connection is lost or the
    server is busy before any audio arrived, the utterance is retried on new connections for `retry_s`, in which a
    server can restart; a connection lost later ends it with ConnectionLost, which leaves the service usable. Errors are
    those of a `LocalSource`, and also BusyError, ConnectionLost and AccessError. Use it on one event loop at a time.

    name: the server's checkpoint, once connected; before that, its address."""

    default_voice: str | None = None  # the server chooses its first voice

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        max_frames: int | None = None,
        trim_lead: bool = False,
        connect_s: float = 5.0,
        silence_s: float = 5.0,
        retry_s: float = 9.0,
    ) -> None:
        """Does not connect yet. Raises OptionsError for an invalid url or key.

        url: the address that the server prints; may have a path, to which /tts/ws is appended.
        max_frames, trim_lead: of every utterance, as in a request.
        connect_s: time limit of a handshake.
        silence_s: time without a message until a ping is sent, and then until the server counts as gone.
        retry_s: how long after its start an utterance without audio is retried; Pipecat gives it up after 10 s."""
        self._http, self._ws = _addresses(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise OptionsError("api_key must be printable ASCII and not empty; leave it out for a server without one")
        self.name = urlsplit(self._http).netloc
        self.sample_rate_hz = SAMPLE_RATE_HZ
        self.silence_s, self.retry_s = silence_s, retry_s
        self._api_key = api_key
        self._limits = {"max_frames": max_frames, "trim_lead": trim_lead or None, "markup": "strip"}
        self._connect_s = connect_s
        self._model_type = ""
        self._speakers: list[str] = []
        self._aliases: list[str] | None = None  # None: the server may have voices that it does not list
        self._languages: list[str] = []  # empty until connected
        self._spares: list[asyncio.Task[ClientConnection]] = []  # connections opened in advance
        self._speeches: set[RemoteSpeech] = set()  # active utterances
        self._closing: set[asyncio.Task[None]] = set()
        self._users = 0

    async def connect(self) -> None:
        """Reads the server's state and opens a connection for one more service. Raises ConnectionLost if no server
        answers, EngineError if it is not an mktts server, AccessError for a wrong key."""
        await self._read_health()
        spare = asyncio.create_task(self._open_socket())
        await spare
        self._spares.append(spare)
        self._users += 1

    async def disconnect(self) -> None:
        """Closes one service's connection; with the last service, ends all utterances."""
        self._users = max(0, self._users - 1)
        if not self._users:
            for speech in [*self._speeches]:
                speech.fail(EngineError("the source was disconnected in the middle of an utterance"))
            await asyncio.gather(*self._closing, return_exceptions=True)
        surplus, self._spares = self._spares[self._users :], self._spares[: self._users]
        opened = await asyncio.gather(*surplus, return_exceptions=True)
        await asyncio.gather(*(socket.close() for socket in opened if isinstance(socket, ClientConnection)))

    def check(self, style: Style) -> None:
        """Raises PromptError for a voice or language that the server does not have; knows nothing before `connect`."""
        if not self._languages:
            return
        one_of("language", language_named(style.language), self._languages, errors.PromptError)
        if style.voice is None or self._aliases is None:
            return
        if style.voice.lower() not in (*self._speakers, *self._aliases):
            known = ", ".join(self._speakers) or f"none: a {self._model_type} checkpoint without saved voices"
            raise errors.PromptError(
                f"the server's voices are {known}; got {style.voice!r} (to use a saved voice, start the server with "
                "--voice NAME=FILE, and request it by that name)"
            )

    async def speak(self, text: str, style: Style) -> RemoteSpeech:
        """Starts an utterance whose text is complete. Raises as `open`."""
        return await self.open(style, text)

    async def open(self, style: Style, text: str | None = None) -> RemoteSpeech:
        """Starts an utterance. Raises EngineError and AccessError; other errors are raised by the `RemoteSpeech`."""
        fields = {
            "text": text,
            "language": style.language,
            "speaker": style.voice,
            "instruct": style.instruct or None,
            "seed": style.seed,
            **self._limits,
            **({} if style.sampling is None else style.sampling.flat()),
        }
        speech = RemoteSpeech(self, {key: value for key, value in fields.items() if value is not None})
        try:
            await speech.begin()
        except (ConnectionLost, BusyError) as error:  # retried by RemoteSpeech.__anext__
            speech.fail(error)
        return speech

    async def take(self, speech: RemoteSpeech) -> ClientConnection:
        """Takes an open connection for an utterance, or opens one. Raises as `connect`, and BusyError."""
        while self._spares:
            with contextlib.suppress(MkttsError):  # it could not be opened earlier, but may be now
                if (socket := await self._spares.pop()).state is State.OPEN:
                    break
        else:
            socket = await self._open_socket()
        self._speeches.add(speech)
        return socket

    def close(self, speech: RemoteSpeech, socket: ClientConnection | None) -> None:
        """Closes an utterance's connection, which ends its generation."""
        self._speeches.discard(speech)
        if socket is not None:
            closing = asyncio.create_task(socket.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self.prepare()

    def prepare(self) -> None:
        """Opens a connection for the next utterance, if fewer are ready than there are services."""
        if len(self._spares) < self._users:
            self._spares.append(asyncio.create_task(self._open_socket()))

    async def _read_health(self) -> None:
        """Reads the server's model, voices and state from GET /health. Raises as `connect`."""
        http = self._http
        try:
            found = json.loads(await asyncio.to_thread(_get_health, f"{http}/health", self._connect_s))
            status, model = found["status"], found["model"]
            self.name, self._model_type, random_weights = model["checkpoint"], model["type"], model["random_weights"]
            self.sample_rate_hz = int(found["sample_rate_hz"])
            self._aliases = None if found.get("uploads", True) else found["aliases"]  # an older server has neither
            self._speakers, self._languages = ([one.lower() for one in found[key]] for key in ("speakers", "languages"))
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            message = f"no answer from {http}: {reason}; start a server there with python -m mktts serve"
            raise ConnectionLost(message) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EngineError(f"{http} does not answer as an mktts server of this version does") from None
        if status == "stopping":
            raise ConnectionLost(f"the server at {http} is stopping: start it again")
        if status != "ok":
            logger.warning(f"the server at {http} reports the status {status}")
        if random_weights:
            logger.warning(f"the server at {http} has {RANDOM_WEIGHTS}")

    async def _open_socket(self) -> ClientConnection:
        """Opens a WebSocket. Raises as `connect`, and BusyError."""
        url, api_key = self._ws, self._api_key
        try:
            return await connect(
                url,
                additional_headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                open_timeout=self._connect_s,
                close_timeout=_CLOSE_S,
                max_queue=_KEPT_MESSAGES,
                compression=None,  # noise-like PCM does not shrink
                ping_interval=None,  # a pong would be queued behind unread audio: see RemoteSpeech._receive
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


class RemoteSpeech(Speech):
    """An utterance on a server. It keeps its messages to start over, after the delays of PATIENCE_S, if there is no
    connection, it is lost, or the server is busy, before any audio arrived."""

    def __init__(self, source: RemoteSource, start: dict[str, Any]) -> None:
        """start: the fields of the start message."""
        self.finish_reason: FinishReason | None = None
        self._source = source
        self._socket: ClientConnection | None = None
        self._messages: list[str] = []  # all messages so far
        self._unsent: asyncio.Queue[str] = asyncio.Queue()  # so that callers never block
        self._writing: asyncio.Task[None] | None = None
        self._fed = ""
        self._finished = False  # the text is complete
        self._waits_s = chain(PATIENCE_S, repeat(PATIENCE_S[-1]))
        self._retries_until_s = time.monotonic() + source.retry_s
        self._heard = self._over = False
        self._error: MkttsError | None = None  # the error that ended it
        self._send("start", **start)

    async def begin(self) -> None:
        """Takes a connection and sends all messages so far. Raises as `RemoteSource.take`."""
        self._socket = await self._source.take(self)
        if self._over:  # cancelled meanwhile
            self._release_socket()
            return
        self._unsent = asyncio.Queue()
        for message in self._messages:
            self._unsent.put_nowait(message)
        self._writing = asyncio.create_task(_write(self._socket, self._unsent))

    def feed(self, text: str) -> None:
        """Adds text. Raises TextError if `text` is not a str, EngineError after `finish`."""
        text = clean_piece(text)
        if self._finished:
            raise EngineError("feed after finish: open another utterance for more text")
        if text:
            self._fed += text
            self._send("text", text=text)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._fed.strip():
            self._send("finish")
        else:  # nothing to say, which is no failure in a conversation
            self.cancel()

    def cancel(self) -> None:
        self._end("cancelled")

    def fail(self, error: MkttsError) -> None:
        """Closes the connection and lets the consumer handle `error`."""
        self._error = error
        self._release_socket()

    async def __anext__(self) -> bytes:
        try:
            while not self._over:
                try:
                    if self._socket is None and self._error is None:
                        await self.begin()
                    piece = await self._next()
                except (ConnectionLost, BusyError) as error:
                    self._release_socket()
                    wait_s = next(self._waits_s)
                    if self._heard or time.monotonic() + wait_s > self._retries_until_s:
                        raise
                    logger.warning(f"{error}; nothing was heard yet: trying again in {wait_s:g} s")
                    await asyncio.sleep(wait_s)
                    continue
                if not self._over:
                    if not self._heard:
                        self._source.prepare()  # only now, as it would delay this utterance's first audio
                    self._heard = True
                    return piece
        except BaseException as error:  # cancelling the consumer's task cancels the generation
            self._end(None if isinstance(error, Exception) else "cancelled")
            raise
        raise StopAsyncIteration

    async def _next(self) -> bytes:
        """The next chunk of PCM, or b"" at the end of the utterance. Raises the error that ended it."""
        socket, silence_s = self._socket, self._source.silence_s
        try:
            while not self._over and self._error is None:
                message = await self._receive(socket, silence_s)
                if isinstance(message, bytes):
                    return message
                said = json.loads(message)
                found = said.get("error")
                if found is not None and found["code"] == "bad_text" and self._finished and not _has_words(self._fed):
                    self.cancel()  # nothing to say, as in `finish`
                elif found is not None:  # the class that a synthesizer in this process would raise
                    kind = next((kind for kind, codes in _CODES.items() if found["code"] in codes), EngineError)
                    self._error = kind(f"the server says: {found['message']} ({found['code']})")
                elif said["type"] == "finished":
                    if said["finish_reason"] == "cancelled":  # by the server: our own cancel has set `_over` already
                        self._error = EngineError("the server ended the utterance")
                    else:
                        self._end(said["finish_reason"])
        except ConnectionClosed as error:
            if not self._over and self._error is None:
                self._error = ConnectionLost(f"the server's connection was lost: {error}; this utterance ends here")
                if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
                    self._error = TextError("the text is too long for one message to the server: speak it in parts")
        except TimeoutError:
            self._error = ConnectionLost(f"the server has not answered for {2 * silence_s:g} s: it is gone or hangs")
        except (ValueError, KeyError, TypeError, AttributeError):
            self._error = EngineError("the server sent an unexpected message: is it a different version of mktts?")
        if self._over:
            return b""
        error, self._error = self._error, None
        raise error

    @staticmethod
    async def _receive(socket: ClientConnection, silence_s: float) -> str | bytes:
        """Receives a message. Raises ConnectionClosed, and TimeoutError if a ping is not answered either. Pings are
        sent only after `silence_s` without messages, when no audio is queued before the pong."""
        pong: asyncio.Future[float] | None = None
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    return await socket.recv()
            except TimeoutError:
                if pong is not None and not pong.done():
                    raise
            async with asyncio.timeout(silence_s):
                pong = await socket.ping()

    def _send(self, type: str, **fields: Any) -> None:
        self._messages.append(json.dumps({"type": type, **fields}))
        self._unsent.put_nowait(self._messages[-1])

    def _end(self, reason: FinishReason | None) -> None:
        """Ends the utterance; the first call's reason is kept."""
        if not self._over:
            self._over, self.finish_reason = True, reason
            self._release_socket()

    def _release_socket(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        socket, self._socket = self._socket, None
        self._source.close(self, socket)


def _has_words(text: str) -> bool:
    """Whether a text has a letter or a digit outside its markup."""
    try:
        return any(map(str.isalnum, MarkupFeed().take(text, final=True)))
    except TextError:
        return False


async def _write(socket: ClientConnection, messages: asyncio.Queue[str]) -> None:
    with contextlib.suppress(ConnectionClosed):  # the reader raises it
        while True:
            await socket.send(await messages.get())


def _get_health(url: str, timeout_s: float) -> bytes:
    """The body of the answer at `url`. Raises OSError, HTTPException and AccessError."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read(_MAX_HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise AccessError(f"{url} answers {error.code}: access is refused") from None
        if error.code != 503:  # the status of an unhealthy server, which sends the same body
            raise
        return error.read(_MAX_HEALTH_BYTES)


def _addresses(url: str) -> tuple[str, str]:
    """The server's HTTP base URL and the URL of its WebSocket. Raises OptionsError."""
    try:
        parts = urlsplit(url.strip())
        scheme, host, _ = _SCHEMES.get(parts.scheme), parts.hostname, parts.port
    except (ValueError, AttributeError):
        scheme = host = None
    if scheme is None or not host or parts.query or parts.fragment or parts.username is not None:
        raise OptionsError(f"url must be like http://127.0.0.1:8000 or https://host, got {url!r}")
    where = f"{parts.netloc}{parts.path.rstrip('/')}"
    return f"{scheme.replace('ws', 'http')}://{where}", f"{scheme}://{where}/tts/ws"
