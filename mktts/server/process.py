"""The server in a process: its socket, its life, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator

import uvicorn

from mktts.errors import ServerError
from mktts.server.app import make_app
from mktts.server.limits import Limits
from mktts.server.problems import RETRY_AFTER_S, Problem
from mktts.server.signals import OrderlyServer
from mktts.server.studio import Studio

_POLL_S = 0.02
_FLUSH_S = 1.0  # for the last bytes to connections whose streams have ended
_START_WAIT_S = 30.0

log = logging.getLogger(__name__)


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A bound socket (port 0: a free one) that refuses connections until it is served. Raises ServerError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_bytes)  # connections inherit both
    if sys.platform == "linux":  # ends a connection whose client is gone or reads no more, closed by us or not
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1_000))
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot listen on {host} port {port}: {error.strerror}; name another --port") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(OrderlyServer):
    """uvicorn, ending in order: refuse new streams, let open ones finish for a while, cancel the rest, go."""

    def __init__(self, studio: Studio, api_key: str | None = None, origins: Collection[str] = ()) -> None:
        limits = studio.limits
        super().__init__(
            uvicorn.Config(
                make_app(studio, api_key, origins),
                http="h11",  # with what is named here everything was tested, whatever else is installed
                ws="websockets-sansio",
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                ws_max_size=limits.max_body_bytes,
                # A client that plays as it reads has its pong behind minutes of audio; stall_s finds dead ones.
                ws_ping_timeout=None,
                timeout_graceful_shutdown=_FLUSH_S,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._studio = studio

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._studio.stopping = True
        if not await self._wait_for_streams(self._studio.limits.grace_s):
            self._studio.cancel_all(Problem(503, "stopping", "the server stopped", retry_after_s=RETRY_AFTER_S))
        await asyncio.sleep(_POLL_S)  # the last messages go out before uvicorn closes the connections
        await super().shutdown(sockets)

    async def _wait_for_streams(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while self._studio.streams_open and time.monotonic() < end_s and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        return not self._studio.streams_open


@contextlib.contextmanager
def serving(
    studio: Studio, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None, origins: Collection[str] = ()
) -> Iterator[str]:
    """Serves from a thread of this process, beside a notebook's kernel or a test; yields the base URL.

    Leaving the block stops the server as a signal would. Raises ServerError.
    """
    bound = listen(host, port, studio.limits)
    url = url_of(bound)
    server = Server(studio, api_key, origins)
    thread = threading.Thread(target=server.run, args=([bound],), name="mktts-server", daemon=True)
    thread.start()
    end_s = time.monotonic() + _START_WAIT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > end_s:
            raise ServerError("the server did not start: its log says why")
        time.sleep(_POLL_S)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()
