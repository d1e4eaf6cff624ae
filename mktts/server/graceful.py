"""uvicorn, ending in order on a signal, with a time limit for request heads and without texts or keys in its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, h11

from mktts.server.api_errors import ApiError, current_id, new_id
from mktts.server.app import make_app
from mktts.server.service import SpeechService

Stop = Callable[[], Awaitable[None]]
_FLUSH_S = 1.0  # for the last bytes to connections whose work has ended
# What uvicorn logs and is no fault of this server: a refused handshake, and broken text of a client.
_NO_FAULTS = ("ASGI callable returned without completing handshake", "Invalid UTF-8 sequence received from client")
logging.getLogger("uvicorn.error").addFilter(lambda record: str(record.msg).rstrip(".") not in _NO_FAULTS)


class GracefulServer(uvicorn.Server):
    """Serves an ASGI application; leaves signals of the rest of the process to the caller.

    stopped_by: the signal that ended it; None while none has. max_message_bytes: of a WebSocket message from a client.
    stop: ends what the application does, before connections are ended. head_s: within which the head of a request must
    come. settings: more of `uvicorn.Config`."""

    stopped_by: int | None = None

    def __init__(self, app: Any, max_message_bytes: int, stop: Stop, head_s: float = 10.0, **settings: Any) -> None:
        self._stop = stop
        super().__init__(
            uvicorn.Config(
                app,
                # h11 and websockets: with these everything was tested, whatever else is installed
                http=type("Http", (_TimedHttp,), {"head_s": head_s}),
                ws="websockets-sansio",
                loop="asyncio",
                log_config=None,
                log_level="warning",  # below it, uvicorn logs addresses, which may hold keys, and frames
                access_log=False,
                ws_max_size=max_message_bytes,
                timeout_graceful_shutdown=_FLUSH_S,
                server_header=False,
                proxy_headers=False,
                **settings,
            )
        )

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for an orderly end, a second one for an end at once. uvicorn raises again at the end
        what its own method notes; the caller of this server has a model to close first."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = number

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stop()
        await super().shutdown(sockets)


def speech_server(service: SpeechService, **access: Any) -> GracefulServer:
    """Ends by refusing new streams, letting open ones finish for a while, and cancelling the rest. access: as
    `make_app`."""
    limits = service.limits
    server = GracefulServer(
        make_app(service, **access),
        limits.max_body_bytes,
        lambda: service.stop(lambda: server.force_exit),
        head_s=limits.head_s,
        ws_ping_timeout=None,  # a client that plays as it reads has its pong behind minutes of audio; stall_s finds it
    )
    return server


class _TimedHttp(H11Protocol):
    """HTTP/1.1 whose request heads must come within `head_s`; then a half one is answered by 408, and the connection is
    closed. The time runs from the connection's beginning, and from the first byte of a further request on it. (Between
    requests uvicorn's own limit holds.)"""

    head_s = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait()
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, in the shape of every other error."""
        self._refuse(b"Bad Request", ApiError(400, "invalid_http", msg))

    def _refuse(self, reason: bytes, error: ApiError) -> None:
        """Answers a request that no application will see, and closes the connection."""
        current_id.set(new_id())
        found = error.response({"Connection": "close"})
        answer = [
            h11.Response(status_code=error.status, headers=found.raw_headers, reason=reason),
            h11.Data(data=found.body),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is on its way already
            self.transport.write(b"".join(self.conn.send(part) for part in answer))
        self.transport.close()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self._too_late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self.conn.trailing_data[0]:  # otherwise nothing was asked
            message = f"the head of the request did not come within {self.head_s:g} s: send it again"
            self._refuse(b"Request Timeout", ApiError(408, "head_timeout", message))
        self.transport.close()
