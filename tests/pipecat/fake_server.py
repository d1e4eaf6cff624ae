"""A server of `/tts/ws` and `/health` under a test's control, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Self

from pipecat_fakes import PIECE
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from mktts.spec import SAMPLE_RATE_HZ

Script = Callable[["Client"], Awaitable[None]]


class Client:
    """One connection, as the server sees it. `got`: what has been read of it."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.got: list[dict[str, Any]] = []

    async def read(self, *types: str) -> dict[str, Any]:
        """Reads up to the next message of one of these types."""
        while True:
            self.got.append(json.loads(await self.socket.recv()))
            if self.got[-1]["type"] in types:
                return self.got[-1]

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type, "error": None, **fields}))

    async def started(self) -> None:
        await self.say("started", sample_rate_hz=SAMPLE_RATE_HZ)

    async def audio(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self.say("chunk")
            await self.socket.send(piece)

    async def finished(self, reason: str = "eos", code: str | None = None) -> None:
        await self.say("finished", finish_reason=reason, error=code and failure(code))

    def break_off(self) -> None:
        """Ends the connection without a word."""
        self.socket.transport.abort()


def failure(code: str) -> dict[str, Any]:
    return {"message": "told by the server", "type": "server_error", "param": None, "code": code}


class FakeServer:
    """Plays `script` for each connection, which ends with it. health: what `GET /health` says beside the usual."""

    def __init__(self, script: Script, **health: Any) -> None:
        self.clients: list[Client] = []
        self._script = script
        self._health = {
            "status": "ok",
            "model": {"checkpoint": "fake", "type": "custom_voice", "random_weights": True},
            "sample_rate_hz": SAMPLE_RATE_HZ,
            "speakers": ["vivian"],
            "languages": ["auto"],
            **health,
        }

    async def __aenter__(self) -> Self:
        self._server = await serve(self._play, "127.0.0.1", 0, process_request=self._answer, close_timeout=0.1)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/health":
            return None
        status = HTTPStatus.OK if self._health["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return connection.respond(status, json.dumps(self._health))

    async def _play(self, socket: ServerConnection) -> None:
        self.clients.append(Client(socket))
        try:
            await self._script(self.clients[-1])
        except ConnectionClosed:
            pass


async def forever(client: Client) -> None:
    """Reads on and says nothing."""
    await asyncio.wait_for(client.socket.wait_closed(), 60)


async def one_piece(client: Client) -> None:
    """Speaks once, and breaks off."""
    await client.read("start")
    await client.audio(PIECE)
    await client.finished()
    client.break_off()
