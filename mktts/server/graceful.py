"""uvicorn, ending in order on a signal, with a time limit for request heads and without texts or keys in its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, h11
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mktts.server.api_errors import REQUEST_ID_HEADER, ApiError, new_id
from mktts.server.app import make_app
from mktts.server.service import SpeechService

_FLUSH_S = 1.0  # for the last bytes to connections whose work has ended
_INVALID_TEXT = 1007  # RFC 6455, 7.4.1: a text that is no UTF-8


class GracefulServer(uvicorn.Server):
    """Serves an ASGI application; leaves signals of the rest of the process to the caller.

    stopped_by: the signal that ended it; None while none has. max_message_bytes: of a WebSocket message from a client.
    head_s: within which the head of a request must come. settings: more of `uvicorn.Config`.
    """

    stopped_by: int | None = None

    def __init__(self, app: Any, max_message_bytes: int, *, head_s: float = 10.0, **settings: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # h11 and websockets: with these everything was tested, whatever else is installed
                http=type("Http", (_TimedHttp,), {"head_s": head_s}),
                ws=_QuietWebSocket,
                loop="asyncio",
                log_config=None,
                access_log=False,
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
        """As uvicorn's, but the signal is not raised again at the end: the caller has a model to close first."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class SpeechServer(GracefulServer):
    """Ends by refusing new streams, letting open ones finish for a while, and cancelling the rest. access: as
    `make_app`."""

    def __init__(self, service: SpeechService, **access: Any) -> None:
        super().__init__(
            make_app(service, **access),
            service.limits.max_body_bytes,
            head_s=service.limits.head_s,
            # A client that plays as it reads has its pong behind minutes of audio; stall_s finds dead ones.
            ws_ping_timeout=None,
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.stop(lambda: self.force_exit)
        await super().shutdown(sockets)


class _TimedHttp(H11Protocol):
    """HTTP/1.1 whose request heads must come within `head_s`; then a half one is answered by 408, and the connection
    is closed.

    The time runs from the connection's beginning, and from the first byte of a further request on it. (Between
    requests uvicorn's own limit holds.)
    """

    head_s = 10.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.access_log = False  # addresses may hold keys

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
        id = new_id()
        body = json.dumps({"error": error.detail(id).shown()}).encode()
        headers = {"content-type": "application/json", "connection": "close", REQUEST_ID_HEADER: id}
        answer = [
            h11.Response(
                status_code=error.status,
                headers=[*headers.items(), ("content-length", str(len(body)))],
                reason=reason,
            ),
            h11.Data(data=body),
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


class _QuietWebSocket(WebSocketsSansIOProtocol):
    """WebSockets whose refusals and broken texts are no errors of this server, and whose queries are not logged."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn.debug = False  # it would log every frame

    async def send(self, message: Any) -> None:
        if not self.handshake_complete:  # uvicorn logs the first message with the query; the application has its own
            self.scope = {**self.scope, "query_string": b""}
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # by a refusal; uvicorn takes that for a handshake left open

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(_INVALID_TEXT)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
