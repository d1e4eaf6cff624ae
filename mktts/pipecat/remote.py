"""Speech from an `mktts serve` somewhere else, over its WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from loguru import logger

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import EngineError, OptionsError, PromptError
from mktts.pipecat.connection import Connection, dial
from mktts.pipecat.health import ServerHealth, ask_health
from mktts.pipecat.remote_speech import RemoteFedSpeech, RemoteSpeech
from mktts.pipecat.source import Style
from mktts.spec import SAMPLE_RATE_HZ

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class RemoteSource:
    """Speech from a server: `MkttsTTSService(source=RemoteSource("http://127.0.0.1:8000"))`.

    A connection carries one utterance at a time, so each service gets its own. One that is lost is
    replaced at the next utterance; what it was speaking ends with EngineError, and is not tried again. Errors are
    those of a source in the same process, and also BusyError and AccessError. Belongs to one event loop at a time.

    name: of the server's checkpoint, once connected. random_weights: whether its audio is noise; None: not known yet.
    """

    default_voice: str | None = None  # the server's own first

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        name: str | None = None,
        max_frames: int | None = None,
        trim_lead: bool = False,
        connect_s: float = 5.0,
        silence_s: float = 5.0,
    ) -> None:
        """Connects to nothing yet.

        url: where the server listens, as it prints it; a path before /tts/ws is kept. max_frames, trim_lead: of every
        utterance, as in a request. connect_s: for an answer to a handshake. silence_s: without a message until the
        server is asked whether it is there, and again until it counts as gone.

        Raises OptionsError for a url or key that cannot be one.
        """
        self._http, self._ws = _addresses(url)
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise OptionsError("api_key must be printable ASCII and not empty; leave it out for a server without one")
        self._named = name is not None
        self.name = name or urlsplit(self._http).netloc
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

        Raises EngineError where no server answers, AccessError for a wrong key.
        """
        health = await ask_health(self._http, self._connect_s)
        self._take(health)
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
        """As `SpeechSource.speak`. Raises EngineError and AccessError; the rest comes from the speech."""
        connection = await self._free()
        return RemoteSpeech(connection, {"text": text, **self._start(style)})

    async def open(self, style: Style) -> RemoteFedSpeech:
        """As `SpeechSource.open`; raises as `speak`."""
        connection = await self._free()
        return RemoteFedSpeech(connection, self._start(style))

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

    def _take(self, health: ServerHealth) -> None:
        if health.status == "stopping":
            raise EngineError(f"the server at {self._http} is stopping: start it again")
        if health.status != "ok":
            logger.warning(f"the server at {self._http} says about itself: {health.status}")
        if health.random_weights and self.random_weights is None:
            logger.warning(f"the server at {self._http} has {RANDOM_WEIGHTS}")
        if not self._named:
            self.name = health.checkpoint
        self._health = health
        self.sample_rate_hz = health.sample_rate_hz
        self.random_weights = health.random_weights

    async def _free(self) -> Connection:
        """A connection for one utterance. Nothing may be awaited between this and the utterance's start."""
        free = next((connection for connection in self._connections if connection.free), None)
        return free or await self._dial()

    async def _dial(self) -> Connection:
        socket = await dial(self._ws, self._api_key, self._connect_s)
        connection = Connection(socket, self._silence_s, self._connections.remove)
        self._connections.append(connection)
        return connection


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
