"""What is decided about a request before its body is parsed: who asks, from which page, and how much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mktts.server.access.hosts import is_local_page, is_own_name
from mktts.server.access.keys import NOBODY, Keys, chosen_protocol, without_key
from mktts.server.problems import Problem

OWNER = "mktts_owner"  # of a request's state: whose key it came with (mktts.server.access.keys)
# Answered without a key: a probe, a reader of the document and a page that is only opened have none.
OPEN_PATHS = ("/", "/docs", "/health", "/v1/health", "/ready", "/ping", "/openapi.json")
OPEN_FOLDER = "/page/"
_SLOWEST_BYTES_PER_S = 64 * 1024  # of a body


def owner_of_request(scope: Any) -> str:
    """Whose key a request came with, as `mktts.server.access.keys.owner_of` names it."""
    return scope.get("state", {}).get(OWNER) or NOBODY


class Gate:
    """ASGI middleware. A request that does not pass is answered here; the application never sees it.

    api_key: one or several; None lets everyone in: such a server must listen on loopback only (`refuse_open_address`
        sees to it).
    origins: of web pages that may use the server, as the browser writes them. Pages served from loopback may use a
        server without a key; any other page could otherwise speak through the browser of anyone who opens it, because
        neither WebSocket nor a plain POST waits for CORS.
    hosts: names that a server without a key may be called by, beside numbers and localhost; with a key, names are
        asked about only where there are any here.
    on_refusal: called with the code of each refusal.
    larger_bodies: paths whose bodies may have more than `max_body_bytes`, and how many.
    body_s: for a body, and more for a long one.
    """

    def __init__(
        self,
        app: Any,
        api_key: str | Sequence[str] | None,
        origins: Collection[str],
        max_body_bytes: int,
        on_refusal: Callable[[str], None],
        larger_bodies: Mapping[str, int] = MappingProxyType({}),
        hosts: Collection[str] = (),
        body_s: float = 20.0,
    ) -> None:
        self._app = app
        self._keys = Keys(api_key)
        self._origins = frozenset(origins)
        self._hosts = frozenset(hosts)
        self._max_body_bytes = max_body_bytes
        self._on_refusal = on_refusal
        self._larger_bodies = larger_bodies
        self._body_s = body_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})[OWNER] = self._check(scope)
            if scope["type"] == "http":
                receive = await self._whole_body(scope, receive)
            else:
                scope = {**scope, "query_string": without_key(scope["query_string"])}
                send = _choosing(scope, send)
        except Problem as problem:
            self._on_refusal(problem.code)
            await _refuse(problem, scope, receive, send)
        except _Gone:
            pass
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Any) -> str | None:
        """Whose request it is. Raises Problem."""
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if host is not None and (self._hosts or not self._keys.wanted) and not is_own_name(host, self._hosts):
            raise Problem(403, "foreign_host", "this server is called by another name; --allow-host gives it one more")
        if origin is not None and origin not in self._origins and not self._keys.wanted and not is_local_page(origin):
            raise Problem(
                403, "foreign_origin", "web pages from elsewhere may use this server only with --allow-origin"
            )
        owner = self._keys.owner(scope)
        if owner is None and not (scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER)):
            where = "" if scope["type"] == "http" else ", or ?key=KEY"
            message = f"expected the header Authorization: Bearer KEY{where} with a key of this server's"
            raise Problem(401, "invalid_api_key", message)
        return owner

    async def _whole_body(self, scope: Any, receive: Any) -> Any:
        """Reads the body, as far and as long as it is allowed to go, and returns a `receive` that hands it on in one
        piece."""
        at_most = self._larger_bodies.get(scope["path"], self._max_body_bytes)
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > at_most:
            raise _too_large(at_most)
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(self._body_s + at_most / _SLOWEST_BYTES_PER_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > at_most:
                        raise _too_large(at_most)
        except TimeoutError:
            raise Problem(408, "body_timeout", "the body did not come in time: send it again") from None
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return whole.pop() if whole else await receive()

        return replay


def _too_large(at_most: int) -> Problem:
    return Problem(413, "body_too_large", f"a body may have {at_most} bytes")


class _Gone(Exception):
    """The client went away while it sent its body."""


def _choosing(scope: Any, send: Any) -> Any:
    """`send` that answers a WebSocket which carries its key as a subprotocol with another one of those it offered."""
    chosen = chosen_protocol(scope.get("subprotocols", ()))
    if chosen is None:
        return send

    async def choose(message: Any) -> None:
        if message["type"] == "websocket.accept" and message.get("subprotocol") is None:
            message = {**message, "subprotocol": chosen}
        await send(message)

    return choose


async def _refuse(problem: Problem, scope: Any, receive: Any, send: Any) -> None:
    headers = {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}
    if problem.status in (408, 413):
        headers["Connection"] = "close"  # what is left of the body will not be read
    await problem.response(headers)(scope, receive, send)  # a WebSocket's handshake gets the same answer


def _header(scope: Any, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
