"""What is decided about a request before its body is parsed: who asks, from which page, and how much."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from mktts.server.address import is_loopback
from mktts.server.problems import Problem

OPEN_PATHS = (
    "/",
    "/health",
    "/ready",
    "/openapi.json",
)  # answered without a key: a probe and a reader of the document have none


class Gate:
    """ASGI middleware. A request that does not pass is answered here; the application never sees it.

    api_key: None lets everyone in; such a server must listen on loopback only (`refuse_open_address` sees to it).
    origins: of web pages that may use the server, as the browser writes them. Pages served from loopback may use a
        server without a key; any other page could otherwise speak through the browser of anyone who opens it, because
        neither WebSocket nor a plain POST waits for CORS.
    on_refusal: called with the code of each refusal.
    larger_bodies: paths whose bodies may have more than `max_body_bytes`, and how many.
    """

    def __init__(
        self,
        app: Any,
        api_key: str | None,
        origins: Collection[str],
        max_body_bytes: int,
        on_refusal: Callable[[str], None],
        larger_bodies: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._key = None if api_key is None else _digest(api_key.encode())
        self._origins = frozenset(origins)
        self._max_body_bytes = max_body_bytes
        self._on_refusal = on_refusal
        self._larger_bodies = larger_bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            if scope["type"] == "http":
                receive = await self._whole_body(scope, receive)
        except Problem as problem:
            self._on_refusal(problem.code)
            await _refuse(problem, scope, receive, send)
        except _Gone:
            pass
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Any) -> None:
        origin = _header(scope, b"origin")
        if origin is not None and origin not in self._origins and self._key is None and not _is_local_page(origin):
            raise Problem(
                403, "foreign_origin", "web pages from elsewhere may use this server only with --allow-origin"
            )
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = (_header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._key):
            raise Problem(
                401, "invalid_api_key", "expected the header Authorization: Bearer KEY with this server's key"
            )

    async def _whole_body(self, scope: Any, receive: Any) -> Any:
        """Reads the body, as far as it is allowed to go, and returns a `receive` that hands it on in one piece."""
        at_most = self._larger_bodies.get(scope["path"], self._max_body_bytes)
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > at_most:
            raise _too_large(at_most)
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > at_most:
                raise _too_large(at_most)
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return whole.pop() if whole else await receive()

        return replay


def _too_large(at_most: int) -> Problem:
    return Problem(413, "body_too_large", f"a body may have {at_most} bytes")


class _Gone(Exception):
    """The client went away while it sent its body."""


async def _refuse(problem: Problem, scope: Any, receive: Any, send: Any) -> None:
    headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}
    if problem.status == 413:
        headers["Connection"] = "close"  # what is left of the body will not be read
    await problem.response(headers)(scope, receive, send)  # a WebSocket's handshake gets the same answer


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of equal length: how long the comparison takes says nothing about the key's


def _header(scope: Any, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _is_local_page(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)
