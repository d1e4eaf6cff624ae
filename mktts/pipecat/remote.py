"""Speech from an `mktts serve` somewhere else, over its WebSocket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from loguru import logger

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import BusyError, ConnectionLost, OptionsError, PromptError
from mktts.pipecat.connection import Connection, dial
from mktts.pipecat.health import ServerHealth, ask_health
from mktts.pipecat.remote_speech import PATIENCE_S, RemoteFedSpeech, RemoteSpeech
from mktts.pipecat.source import Style
from mktts.spec import SAMPLE_RATE_HZ

T = TypeVar("T")
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class RemoteSource:
    """Speech from a server: `MkttsTTSService(source=RemoteSource("http://127.0.0.1:8000"))`.

    A connection carries one utterance at a time, so each service gets its own. One that is lost is replaced at the
    next utterance. What it was speaking begins again on another one if nothing of it was heard yet, and so does what a
    server has no place for; otherwise it ends with ConnectionLost, which leaves a service usable. Errors are those of
    a source in the same process, and also BusyError, ConnectionLost and AccessError. Belongs to one event loop at a
    time.

    name: of the server's checkpoint, once connected. random_weights: whether its audio is noise; None: not known yet.
    """

    default_voice: str | None = None  # the server's own first

    def __init__(
        self,
        url: str | Sequence[str],
        api_key: str | None = None,
        *,
        name: str | None = None,
        max_frames: int | None = None,
        trim_lead: bool = False,
        connect_s: float = 5.0,
        silence_s: float = 5.0,
    ) -> None:
        """Connects to nothing yet.

        url: where the server listens, as it prints it; a path before /tts/ws is kept. Several take turns, one a
        connection; who does not answer is passed over. They must serve the same checkpoint. max_frames, trim_lead: of
        every utterance, as in a request. connect_s: for an answer to a handshake. silence_s: without a message until
        the server is asked whether it is there, and again until it counts as gone.

        Raises OptionsError for a url or key that cannot be one.
        """
        urls = [url] if isinstance(url, str) else list(url)
        if not urls:
            raise OptionsError("url must name a server, got an empty list")
        self._servers = deque(_addresses(one) for one in urls)
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise OptionsError("api_key must be printable ASCII and not empty; leave it out for a server without one")
        self._named = name is not None
        self.name = name or urlsplit(self._servers[0][0]).netloc
        self.sample_rate_hz = SAMPLE_RATE_HZ
        self.random_weights: bool | None = None
        self._api_key = api_key
        self._limits = {"max_frames": max_frames, "trim_lead": trim_lead or None}
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._health: ServerHealth | None = None
        self._connections: list[Connection] = []
        self._users = 0

    async def connect(self) -> None:
        """Asks what the server has, and opens a connection for one more service.

        Raises ConnectionLost where no server answers, EngineError where what answers is none of ours, AccessError for
        a wrong key.
        """
        await self._in_turn(lambda http, ws: self._ask(http))
        if sum(connection.free for connection in self._connections) <= self._users:
            await self._dial()
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
        health = self._health
        if health is None:
            return
        if style.language.lower() not in health.languages:
            raise PromptError(f"language must be one of {', '.join(health.languages)}; got {style.language!r}")
        if style.voice is not None and style.voice.lower() not in health.speakers:
            known = ", ".join(health.speakers) or f"none: a {health.model_type} checkpoint without saved voices"
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
        connection = await self._patient()
        return RemoteSpeech(connection, {"text": text, **self._start(style)}, self._free)

    async def open(self, style: Style) -> RemoteFedSpeech:
        """As `SpeechSource.open`; raises as `speak`."""
        connection = await self._patient()
        return RemoteFedSpeech(connection, self._start(style), self._free)

    def _start(self, style: Style) -> dict[str, Any]:
        """The keys of a start message (mktts.server.schemas.Start)."""
        wishes = {
            "language": style.language,
            "speaker": style.voice,
            "instruct": style.instruct or None,
            "seed": style.seed,
            **self._limits,
        }
        if style.sampling is not None:
            wishes |= style.sampling.flat()
        return {key: value for key, value in wishes.items() if value is not None}

    async def _ask(self, http: str) -> None:
        """Takes in what the server at `http` says about itself."""
        health = await ask_health(http, self._connect_s)
        if health.status == "stopping":
            raise ConnectionLost(f"the server at {http} is stopping: start it again")
        if health.status != "ok":
            logger.warning(f"the server at {http} says about itself: {health.status}")
        if health.random_weights and self.random_weights is None:
            logger.warning(f"the server at {http} has {RANDOM_WEIGHTS}")
        if not self._named:
            self.name = health.checkpoint
        self._health = health
        self.sample_rate_hz = health.sample_rate_hz
        self.random_weights = health.random_weights

    async def _patient(self) -> Connection:
        """`_free`, tried again for a moment: nobody has heard anything yet."""
        for wait_s in PATIENCE_S:
            try:
                return await self._free()
            except (ConnectionLost, BusyError) as error:
                logger.warning(f"{error}; trying again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
        return await self._free()

    async def _free(self) -> Connection:
        """A connection for one utterance. Nothing may be awaited between this and the utterance's start."""
        free = next((connection for connection in self._connections if connection.free), None)
        return free or await self._dial()

    async def _dial(self) -> Connection:
        socket = await self._in_turn(lambda http, ws: dial(ws, self._api_key, self._connect_s))
        connection = Connection(socket, self._silence_s, self._connections.remove)
        self._connections.append(connection)
        return connection

    async def _in_turn(self, ask: Callable[[str, str], Awaitable[T]]) -> T:
        """What the next server answers, or the first after it that does. Raises what the last one raised."""
        for left in reversed(range(len(self._servers))):
            http, ws = self._servers[0]
            self._servers.rotate(-1)
            try:
                return await ask(http, ws)
            except (ConnectionLost, BusyError) as error:
                if not left:
                    raise
                logger.warning(f"{error}; asking the next server")
        raise AssertionError("there is a server")


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
