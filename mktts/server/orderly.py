"""A uvicorn server that ends in order on a signal, and leaves the rest of the process to who called."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from mktts.server.protocols import QuietWebSocket, TimedHttp

_FLUSH_S = 1.0  # for the last bytes to connections whose work has ended


class OrderlyServer(uvicorn.Server):
    """Serves an ASGI application. stopped_by: the signal that ended it; None while none has.

    max_message_bytes: of a WebSocket message from a client. head_s: within which the head of a request must come.
    settings: more of `uvicorn.Config`.
    """

    stopped_by: int | None = None

    def __init__(self, app: Any, max_message_bytes: int, *, head_s: float = TimedHttp.head_s, **settings: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # h11 and websockets: with these everything was tested, whatever else is installed
                http=type("Http", (TimedHttp,), {"head_s": head_s}),
                ws=QuietWebSocket,
                loop="asyncio",
                log_config=None,
                access_log=False,
                lifespan="off",
                ws_max_size=max_message_bytes,
                timeout_graceful_shutdown=_FLUSH_S,
                server_header=False,
                proxy_headers=False,
                **settings,
            )
        )

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for an orderly end, a second one for an end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = number

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again at the end: who called has a model to close first."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
