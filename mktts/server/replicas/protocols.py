"""The sockets of a replica, as those of `serve`: Ray Serve starts uvicorn itself, and with uvicorn's defaults."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from mktts.server.access.request_id import HEADER, id_of
from mktts.server.process import largest_message_bytes
from mktts.server.protocols import QuietWebSocket, TimedHttp
from mktts.server.studio import Studio

_ID = HEADER.lower().encode()
_POLL_S = 0.05


def serve_with(studio: Studio) -> None:
    """From now on, every uvicorn of this process speaks by our protocols, with the limits of `studio`.

    Without them a slow request's head would be waited for without end, text frames be logged at some levels, a client
    that plays as it reads be dropped for its late pong, and a draining replica cut WebSockets in mid-sentence.
    """
    limits = studio.limits
    http = type("Http", (_SmallBuffers, TimedHttp), {"head_s": limits.head_s, "buffer_bytes": limits.socket_bytes})
    ws = type("WebSocket", (DrainingWebSocket,), {"studio": studio})
    ours = {
        "http": http,
        "ws": ws,
        "ws_max_size": largest_message_bytes(studio),
        "ws_ping_timeout": None,
        "server_header": False,
        "proxy_headers": False,
    }
    theirs = uvicorn.Config

    class Config(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, app: Any, *arguments: Any, **settings: Any) -> None:
            made = (lambda: _OneId(app())) if settings.get("factory") else app
            super().__init__(made, *arguments, **{**settings, **ours})

    uvicorn.Config = Config  # type: ignore[misc]


class _OneId:
    """ASGI middleware: an answer keeps the id that the application gave it; Ray Serve puts its own beside it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def once(message: Any) -> None:
            headers = message.get("headers")
            if headers:
                found = [index for index, (name, _) in enumerate(headers) if name.lower() == _ID]
                message = {**message, "headers": [h for i, h in enumerate(headers) if i not in found[1:]]}
            await send(message)

        await self._app(scope, receive, once)


class _SmallBuffers:
    """Little audio lies in the kernel for a listener who may interrupt, or who reads no more."""

    buffer_bytes: int

    def connection_made(self, transport: asyncio.Transport) -> None:
        bound = transport.get_extra_info("socket")
        if bound is not None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer_bytes)
        super().connection_made(transport)  # type: ignore[misc]


class DrainingWebSocket(QuietWebSocket):
    """A WebSocket that, when its replica is to go, is closed as soon as nothing is being spoken on it.

    (1012, service restart: clients connect again, and reach another replica.) `studio` starts nothing new from then on.
    """

    studio: Studio
    _leaving: asyncio.Task[None] | None = None

    def shutdown(self) -> None:
        self.studio.stopping = True
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        while self.studio.speaks_for(id_of(self.scope)) and not self.transport.is_closing():
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_POLL_S)  # the message that the utterance has finished goes out before
        if not self.transport.is_closing():
            super().shutdown()
