"""The agent's web application as a server of this process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from fastapi import FastAPI

from mktts.server import Limits, OrderlyServer, listen, refuse_open_address

_MAX_MESSAGE_BYTES = 256 * 1024  # eight seconds of a microphone


def bind(host: str, port: int, api_key: str | Sequence[str] | None) -> socket.socket:
    """A bound socket. Raises ServerError for a taken port, or an address that others reach and no key."""
    refuse_open_address(host, api_key)
    return listen(host, port, Limits())


class PageServer(OrderlyServer):
    """Ends conversations before it ends connections. on_started: called once connections are accepted."""

    def __init__(self, app: FastAPI, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(app, _MAX_MESSAGE_BYTES)
        self._app = app
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.state.sessions.close()
        await super().shutdown(sockets)
