"""Servers in a thread of the test."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from mktts.server import Limits, listen, url_of

START_WAIT_S = 60.0


@contextlib.contextmanager
def running(server: uvicorn.Server, bound: socket.socket) -> Iterator[str]:
    """Serves on `bound`; yields the base URL. Leaving the block stops the server as a signal would."""
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    end_s = time.monotonic() + START_WAIT_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end_s, "the server did not start: its log says why"
        time.sleep(0.02)
    try:
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def running_app(app: Any) -> Iterator[str]:
    """An ASGI application on a free port; yields the base URL."""
    with listen("127.0.0.1", 0, Limits()) as bound:
        with running(uvicorn.Server(uvicorn.Config(app, log_config=None)), bound) as url:
            yield url


@contextlib.contextmanager
def running_agent(settings: Any, api_key: str | None = None) -> Iterator[str]:
    """The agent's page and its sockets, for `AgentSettings`; yields the base URL."""
    from mktts.agent.web import PageServer, create_app

    with listen("127.0.0.1", 0, Limits()) as bound, running(PageServer(create_app(settings, api_key)), bound) as url:
        yield url
