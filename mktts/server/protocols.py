"""Uvicorn's protocols with what a server among strangers needs beside: an end to waiting, and quiet logs.

Neither a text nor a key reaches the log by them, whatever level the process logs at.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, h11
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mktts.server.access.request_id import HEADER, new_id

_INVALID_TEXT = 1007  # RFC 6455, 7.4.1: a text that is no UTF-8

log = logging.getLogger(__name__)


class TimedHttp(H11Protocol):
    """HTTP/1.1 whose request heads must come within `head_s`; then a half one is answered by 408, and
    the connection is closed.

    The time runs from the connection's beginning, and from the first byte of a further request on it. (Between
    requests uvicorn's own limit holds.)
    """

    head_s = 10.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.access_log = False  # addresses may hold what is nobody's business

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
        self._refuse(400, b"Bad Request", "invalid_http", msg)

    def _refuse(self, status: int, reason: bytes, code: str, message: str) -> None:
        """Answers a request that no application will see, and hangs up."""
        id = new_id()
        detail = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": {**detail, "request_id": id}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (HEADER.encode(), id.encode()),
        ]
        try:
            head = self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason))
            self.transport.write(head + self.conn.send(h11.Data(data=body)) + self.conn.send(h11.EndOfMessage()))
        except h11.LocalProtocolError:  # an answer is on its way already
            pass
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
            self._refuse(408, b"Request Timeout", "head_timeout", message)
        self.transport.close()


class QuietWebSocket(WebSocketsSansIOProtocol):
    """WebSockets whose refusals and broken texts are no errors of this server, and whose queries are not logged."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn.debug = False  # it would log every frame

    async def send(self, message: Any) -> None:
        first = not self.handshake_complete and self.initial_response is None
        whole = self.scope
        if first:  # which uvicorn logs, with its query
            self.scope = {**whole, "query_string": b""}
        try:
            await super().send(message)
        finally:
            self.scope = whole
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # by a refusal; uvicorn takes that for a handshake left open

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(self.frames):
            self.frames = []
            self.conn.send_close(_INVALID_TEXT)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()


def _is_utf8(pieces: list[bytes]) -> bool:
    try:
        b"".join(pieces).decode()
    except UnicodeDecodeError:
        return False
    return True
