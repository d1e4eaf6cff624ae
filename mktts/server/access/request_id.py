"""Every request has an id: in the header X-Request-Id of its answer, in the body of an error, and in the log."""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from typing import Any

HEADER = "X-Request-Id"
_STATE = "mktts_request_id"  # of a request's scope
_NAMED = {"http.response.start", "websocket.accept", "websocket.http.response.start"}
_current: ContextVar[str | None] = ContextVar("mktts_request_id", default=None)


def new_id() -> str:
    """32 hexadecimal digits that nobody can guess: who knows one may ask how its stream ended."""
    return uuid.uuid4().hex


def current_id() -> str | None:
    """Of the request, or of the WebSocket, that is being answered; None outside of one."""
    return _current.get()


def id_of(scope: Any) -> str | None:
    """Of the request, or of the WebSocket, with that scope; None before it has one."""
    return scope.get("state", {}).get(_STATE)


class RequestIds:
    """ASGI middleware, the outermost. An answer that names an id already keeps it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        id = new_id()
        scope.setdefault("state", {})[_STATE] = id
        _current.set(id)  # never taken back: what fails further out is answered in this task too

        async def named(message: Any) -> None:
            if message["type"] in _NAMED:
                headers = list(message.get("headers", ()))
                if not any(name.lower() == HEADER.lower().encode() for name, _ in headers):
                    message = {**message, "headers": [*headers, (HEADER.lower().encode(), id.encode())]}
            await send(message)

        await self._app(scope, receive, named)
