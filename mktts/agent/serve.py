"""The agent's web application in a process: until a signal, or beside a notebook's kernel."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

import uvicorn
from fastapi import FastAPI

from mktts.agent.settings import AgentSettings
from mktts.agent.web import create_app
from mktts.errors import ServerError
from mktts.server.command import refuse_open_address
from mktts.server.limits import Limits
from mktts.server.process import listen, url_of
from mktts.server.signals import OrderlyServer

_POLL_S = 0.02
_START_WAIT_S = 30.0
_FLUSH_S = 1.0
_MAX_MESSAGE_BYTES = 256 * 1024  # eight seconds of a microphone


def bind(host: str, port: int, api_key: str | None) -> socket.socket:
    """A bound socket. Raises ServerError for a taken port, or an address that others reach and no key."""
    refuse_open_address(host, api_key)
    return listen(host, port, Limits())


class PageServer(OrderlyServer):
    """uvicorn, ending conversations before it ends connections.

    on_started: called once connections are accepted. stopped_by: the signal, None without one.
    """

    def __init__(self, app: FastAPI, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="websockets-sansio",
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                ws_max_size=_MAX_MESSAGE_BYTES,
                timeout_graceful_shutdown=_FLUSH_S,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._app = app
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.state.sessions.close()
        await super().shutdown(sockets)


@contextlib.contextmanager
def serving(
    settings: AgentSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    origins: Collection[str] = (),
) -> Iterator[str]:
    """Serves from a thread of this process, beside a notebook's kernel or a test; yields the base URL.

    Leaving the block ends every conversation. Raises ServerError, and what loading the voice raises.
    """
    with bind(host, port, api_key) as bound:
        server = PageServer(create_app(settings, api_key, origins))
        thread = threading.Thread(target=server.run, args=([bound],), name="mktts-agent", daemon=True)
        thread.start()
        end_s = time.monotonic() + _START_WAIT_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end_s:
                raise ServerError("the agent's server did not start: its log says why")
            time.sleep(_POLL_S)
        try:
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join()
