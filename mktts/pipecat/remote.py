"""Speech from an `mktts serve` somewhere else, over its WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from http.client import HTTPException
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

PATIENCE_S = (0.1, 0.4, 1.0)  # between the tries of an utterance of which nothing was heard yet
_KEPT_MESSAGES = 16  # read ahead of the consumer, half of them audio; the rest waits in the sockets, then in the server
_CLOSE_S = 1.0
_MAX_HEALTH_BYTES = 1 << 20
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_CODES: dict[type[MkttsError], tuple[str, ...]] = {
    errors.BusyError: ("busy",),
    errors.ConnectionLost: ("stopping",),
    errors.TextError: ("bad_text", "text_too_long", "idle"),  # idle: it stopped coming; the next utterance may do
    errors.PromptError: ("bad_prompt", "unknown_speaker", "instruct_too_long"),
    errors.VoiceError: ("bad_voice",),
    errors.SamplingError: ("bad_sampling",),
    errors.OptionsError: ("bad_option", "duration_too_long", "invalid_value"),
}  # of the server's errors; any other is a failure of the server


class RemoteSource(SpeechSource):
    """Speech from a server: `MkttsTTSService(source=RemoteSource("http://127.0.0.1:8000"))`.

    An utterance has a WebSocket of its own; each service finds one open for its next utterance. Where one is lost
    before anything was heard, the utterance begins again on another one, and so does what a server has no place for;
    otherwise it ends with ConnectionLost, which leaves a service usable. Errors are those of a source in the same
    process, and also BusyError, ConnectionLost and AccessError. Belongs to one event loop at a time.

    name: of the server's checkpoint, once connected."""

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
        silence_s: without a message until the server is asked for an answer, and again until it counts as gone."""
        self._http, self._ws = _addresses(url)
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise OptionsError("api_key must be printable ASCII and not empty; leave it out for a server without one")
        self.name = urlsplit(self._http).netloc
        self.sample_rate_hz = SAMPLE_RATE_HZ
        self.silence_s = silence_s
        self._api_key = api_key
        self._limits = {"max_frames": max_frames, "trim_lead": trim_lead or None, "markup": "strip"}
        self._connect_s = connect_s
        self._model_type = ""
        self._speakers: list[str] = []
        self._aliases: list[str] | None = None  # None: the server may have voices that it does not tell of
        self._languages: list[str] = []  # empty until connected
        self._spares: list[asyncio.Task[ClientConnection]] = []  # connections for utterances to come
        self._speeches: set[RemoteSpeech] = set()  # under way
        self._closing: set[asyncio.Task[None]] = set()
        self._users = 0

    async def connect(self) -> None:
        """Asks what the server has, and opens a connection for one more service. Raises ConnectionLost where no server
        answers, EngineError where what answers is none of ours, AccessError for a wrong key."""
        await self._read_health()
        spare = asyncio.create_task(self._open_socket())
        await spare
        self._spares.append(spare)
        self._users += 1

    async def disconnect(self) -> None:
        """Closes one service's connection, and with the last service all of them."""
        self._users = max(0, self._users - 1)
        if not self._users:
            for speech in [*self._speeches]:
                speech.fail(EngineError("the source was disconnected in the middle of an utterance"))
            await asyncio.gather(*self._closing, return_exceptions=True)
        surplus, self._spares = self._spares[self._users :], self._spares[: self._users]
        opened = await asyncio.gather(*surplus, return_exceptions=True)
        await asyncio.gather(*(socket.close() for socket in opened if isinstance(socket, ClientConnection)))

    def check(self, style: Style) -> None:
        """Raises PromptError for a voice or language that the server, once connected, is known not to have."""
        if not self._languages:
            return
        one_of("language", language_named(style.language), self._languages, errors.PromptError)
        if style.voice is None or self._aliases is None:
            return
        if style.voice.lower() not in (*self._speakers, *self._aliases):
            known = ", ".join(self._speakers) or f"none: a {self._model_type} checkpoint without saved voices"
            raise errors.PromptError(
                f"the server's voices are {known}; got {style.voice!r} (a saved voice is given to the server, "
                "--voice NAME=FILE, and asked for by that name)"
            )

    async def speak(self, text: str, style: Style) -> RemoteSpeech:
        """As `open`, of a text that is known."""
        return await self.open(style, text)

    async def open(self, style: Style, text: str | None = None) -> RemoteSpeech:
        """Raises EngineError and AccessError; the rest comes from the speech."""
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
        except (ConnectionLost, BusyError) as error:  # who waits for the first piece tries again
            speech.fail(error)
        return speech

    async def take(self, speech: RemoteSpeech) -> ClientConnection:
        """An open connection for an utterance. Raises as `connect`, and BusyError."""
        while self._spares:
            with contextlib.suppress(MkttsError):  # that it could not be opened then says nothing of now
                if (socket := await self._spares.pop()).state is State.OPEN:
                    break
        else:
            socket = await self._open_socket()
        self._speeches.add(speech)
        return socket

    def close(self, speech: RemoteSpeech, socket: ClientConnection | None) -> None:
        """Closes an utterance, which ends its generation."""
        self._speeches.discard(speech)
        if socket is not None:
            closing = asyncio.create_task(socket.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self.prepare()

    def prepare(self) -> None:
        """Opens a connection for the next utterance, if there is none."""
        if len(self._spares) < self._users:
            self._spares.append(asyncio.create_task(self._open_socket()))

    async def _read_health(self) -> None:
        """Takes in what the server says about itself at GET /health. Raises as `connect`."""
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
            logger.warning(f"the server at {http} says about itself: {status}")
        if random_weights:
            logger.warning(f"the server at {http} has {RANDOM_WEIGHTS}")

    async def _open_socket(self) -> ClientConnection:
        """Raises as `connect`, and BusyError."""
        url, api_key = self._ws, self._api_key
        try:
            return await connect(
                url,
                additional_headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                open_timeout=self._connect_s,
                close_timeout=_CLOSE_S,
                max_queue=_KEPT_MESSAGES,
                compression=None,  # noise-like PCM does not shrink
                ping_interval=None,  # a pong waits behind audio that is not read: see RemoteSpeech._receive
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
    """A `Speech`; what it sends is kept, so that it can begin again: after the waits of PATIENCE_S, where no
    connection is found, or it is lost, or its server has no place free, before anything was heard."""

    def __init__(self, source: RemoteSource, start: dict[str, Any]) -> None:
        """start: the fields of the start message."""
        self.finish_reason: FinishReason | None = None
        self._source = source
        self._socket: ClientConnection | None = None
        self._said: list[str] = []  # all messages
        self._unsent: asyncio.Queue[str] = asyncio.Queue()  # so that no caller waits
        self._writing: asyncio.Task[None] | None = None
        self._fed = ""
        self._finished = False  # no more text comes
        self._waits_s = iter(PATIENCE_S)
        self._heard = self._over = False
        self._error: MkttsError | None = None  # that the source ended it with
        self._send("start", **start)

    async def begin(self) -> None:
        """Starts on a connection, and sends what was said already. Raises as `RemoteSource.take`."""
        self._socket = await self._source.take(self)
        if self._over:  # meanwhile
            self._let_go()
            return
        self._unsent = asyncio.Queue()
        for message in self._said:
            self._unsent.put_nowait(message)
        self._writing = asyncio.create_task(_write(self._socket, self._unsent))

    def feed(self, text: str) -> None:
        """Raises TextError when `text` is not a str, EngineError after `finish`."""
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
        else:  # nothing to say, and no failure in a conversation
            self.cancel()

    def cancel(self) -> None:
        self._end("cancelled")

    def fail(self, error: MkttsError) -> None:
        """`error`: what the consumer gets."""
        self._error = error
        self._let_go()

    async def __anext__(self) -> bytes:
        try:
            while not self._over:
                try:
                    if self._socket is None and self._error is None:
                        await self.begin()
                    piece = await self._next()
                except (ConnectionLost, BusyError) as error:
                    self._let_go()
                    wait_s = None if self._heard else next(self._waits_s, None)
                    if wait_s is None:
                        raise
                    logger.warning(f"{error}; nothing was heard yet: trying again in {wait_s:g} s")
                    await asyncio.sleep(wait_s)
                    continue
                if not self._over:
                    if not self._heard:
                        self._source.prepare()  # not before: it would make this utterance's first sound later
                    self._heard = True
                    return piece
        except BaseException as error:  # cancelling the task that waits cancels the generation
            self._end(None if isinstance(error, Exception) else "cancelled")
            raise
        raise StopAsyncIteration

    async def _next(self) -> bytes:
        """The next piece; b"" where the utterance is over. Raises what ended it."""
        socket, silence_s = self._socket, self._source.silence_s
        try:
            while not self._over and self._error is None:
                message = await self._receive(socket, silence_s)
                if isinstance(message, bytes):
                    return message
                said = json.loads(message)
                found = said.get("error")
                if found is not None and found["code"] == "bad_text" and self._finished and not _has_words(self._fed):
                    self.cancel()  # as `finish` does
                elif found is not None:  # as a synthesizer in this process would have raised it
                    kind = next((kind for kind, codes in _CODES.items() if found["code"] in codes), EngineError)
                    self._error = kind(f"the server says: {found['message']} ({found['code']})")
                elif said["type"] == "finished":
                    if said["finish_reason"] == "cancelled":  # by the server: what we cancel has ended here already
                        self._error = EngineError("the server ended the utterance")
                    else:
                        self._end(said["finish_reason"])
        except ConnectionClosed as error:
            if not self._over and self._error is None:
                closed = error.rcvd
                why = f"{closed.code} {closed.reason}".strip() if closed is not None else "without a word"
                self._error = ConnectionLost(f"the connection to the server was lost ({why}): this utterance ends here")
                if closed is not None and closed.code == CloseCode.MESSAGE_TOO_BIG:
                    self._error = TextError("the text is too long for one message to the server: speak it in parts")
        except TimeoutError:
            self._error = ConnectionLost(f"the server has not answered for {2 * silence_s:g} s: it is gone or hangs")
        except (ValueError, KeyError, TypeError, AttributeError):
            self._error = EngineError("the server sends what is not of its protocol: is it of another version?")
        if self._over:
            return b""
        error, self._error = self._error, None
        raise error

    @staticmethod
    async def _receive(socket: ClientConnection, silence_s: float) -> str | bytes:
        """The next message. Raises ConnectionClosed, and TimeoutError when not even a ping is answered. Pings are sent
        only while nothing comes and nothing waits to be read."""
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
        self._said.append(json.dumps({"type": type, **fields}))
        self._unsent.put_nowait(self._said[-1])

    def _end(self, reason: FinishReason | None) -> None:
        """No piece comes any more; the first reason holds."""
        if not self._over:
            self._over, self.finish_reason = True, reason
            self._let_go()

    def _let_go(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        socket, self._socket = self._socket, None
        self._source.close(self, socket)


def _has_words(text: str) -> bool:
    """Whether a text has a letter or a digit beside its markup."""
    try:
        return any(map(str.isalnum, MarkupFeed().take(text, final=True)))
    except TextError:
        return False


async def _write(socket: ClientConnection, messages: asyncio.Queue[str]) -> None:
    with contextlib.suppress(ConnectionClosed):  # the reader sees it too, and says so
        while True:
            await socket.send(await messages.get())


def _get_health(url: str, timeout_s: float) -> bytes:
    """What is answered at `url`. Raises OSError, HTTPException and AccessError."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read(_MAX_HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise AccessError(f"{url} answers {error.code}: this machine may not ask") from None
        if error.code != 503:  # an unhealthy server's status, with the same body
            raise
        return error.read(_MAX_HEALTH_BYTES)


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
