"""Access control and API errors: middleware that assigns a request its id and checks key, host, origin, body size and
time before the body is parsed, and errors in OpenAI's shape that carry the id of their request."""

import asyncio
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, replace
from typing import Any

from fastapi.datastructures import Headers
from fastapi.requests import HTTPConnection
from fastapi.responses import Response

from mktts import errors
from mktts.server.schemas import ErrorDetail
from mktts.server.settings import LOOPBACK_ORIGIN, is_own_name

REQUEST_ID_HEADER = "X-Request-Id"
RETRY_AFTER_S = 1  # a slot becomes free every few seconds, so a client that retries once a second loses little
current_id: ContextVar[str | None] = ContextVar("mktts_request_id", default=None)
_OPENAI_KEYS = {"text": "input", "instruct": "instructions", "speaker": "voice"}  # OpenAI's names for our keys
_BY_ERROR = {
    errors.TextError: ("bad_text", "text"),
    errors.PromptError: ("bad_prompt", None),
    errors.OptionsError: ("bad_option", None),
    errors.SamplingError: ("bad_sampling", None),
    errors.VoiceError: ("bad_voice", "speaker"),
    errors.CapacityError: ("text_too_long", "text"),
}
# Probes, the OpenAPI document and the pages. A speech server answers these, and all of /page/, without a key.
_OPEN_PATHS = ("/", "/docs", "/health", "/v1/health", "/ready", "/ping", "/openapi.json")
NO_OWNER = "nobody"  # the owner of all requests to a server without a key
_OWNER_PREFIX = b"mktts: owner of uploaded voices\0"
_SLOWEST_BYTES_PER_S = 64 * 1024  # slowest upload that fits within the time limit of a body
_FIRST_MESSAGES = ("http.response.start", "websocket.accept", "websocket.http.response.start")


@dataclass(eq=False)
class ApiError(errors.MkttsError):
    """An error that the API returns. status: the HTTP status. code, param, streams_max: see ErrorDetail."""

    status: int
    code: str
    message: str
    param: str | None = None
    streams_max: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the same request may succeed; None if a retry cannot help."""
        return RETRY_AFTER_S if self.status in (429, 503) else None

    def in_openai_terms(self) -> "ApiError":
        """This error as an OpenAI route returns it: with status 400 for 422, and OpenAI's names for our keys."""
        name, message = _OPENAI_KEYS.get(self.param or "", self.param), self.message
        if self.param and message.startswith(self.param):
            message = f"{name}{message.removeprefix(self.param)}"
        return replace(self, status=400 if self.status == 422 else self.status, message=message, param=name)

    def detail(self, id: str | None = None) -> ErrorDetail:
        """The error object of the response. id: the stream that the error ended; None uses the request's id."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        said = {"message": self.message, "param": self.param, "code": self.code, "streams_max": self.streams_max}
        return ErrorDetail(type=kind, request_id=id or current_id.get(), **said)

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        detail = self.detail()
        more = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        more |= {} if detail.request_id is None else {REQUEST_ID_HEADER: detail.request_id}
        # Escaped to ASCII: a message may quote a name with a lone surrogate, which UTF-8 cannot encode.
        body = json.dumps({"error": detail.shown()})
        return Response(body, self.status, {**more, **(headers or {})}, media_type="application/json")


def from_error(error: BaseException) -> ApiError:
    """Converts an exception to an ApiError: a caller's mistake keeps its message, any other becomes a generic 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.BusyError):
        return ApiError(429, "busy", str(error), streams_max=error.capacity)
    for kind, (code, param) in _BY_ERROR.items():
        if isinstance(error, kind):
            return ApiError(422, code, str(error), param)
    return ApiError(500, "engine_error", "the generation failed: the server's log says why, under the stream's id")


def from_validation(errors: list[Any], tagged: bool = False) -> ApiError:
    """Converts the first of pydantic's errors, without the input. tagged: each path begins with the message's type."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":  # its location is a character offset, not a key
        reason = first.get("ctx", {}).get("error", message)
        where = f" at character {path[0]}" if path else ""
        return ApiError(422, "invalid_json", f"expected JSON, could not read it{where}: {reason}")
    key = ".".join(path[1:] if tagged else path)
    return ApiError(422, "invalid_value", f"{key or 'the body'}: {message}", key or None)


def owner_of(key: str) -> str:
    """Derives the owner's name from a key by a one-way hash: 64 hexadecimal digits, the same on every server."""
    return hashlib.sha256(_OWNER_PREFIX + key.encode()).hexdigest()


@dataclass
class AccessMiddleware:
    """ASGI middleware that assigns every request an id, stores the `owner` of its key in the request's state, and
    refuses requests without access.

    max_body_bytes: limit by path. on_refusal: called with the code of each refusal.
    api_key: one or several keys; None accepts every request, which is meant for loopback only (`access_of`).
    origins: web pages that may use the server, as browsers write Origin. Without a key, pages served from loopback may
        use it too and all others are refused, because browsers send WebSockets and simple POSTs without asking CORS.
    hosts: accepted besides IP addresses and localhost. A server with a key checks Host only if hosts are given.
    body_s: seconds allowed for a body, plus its announced size at 64 KiB/s. is_open: whether a path needs no key.
    key_in_query: whether HTTP accepts ?key=. WebSockets always do, since a page cannot set their headers."""

    app: Any
    max_body_bytes: Callable[[str], int]
    on_refusal: Callable[[str], object] = lambda code: None
    api_key: InitVar[str | Sequence[str] | None] = None
    origins: Collection[str] = ()
    hosts: Collection[str] = ()
    body_s: float = 20.0
    is_open: Callable[[str], bool] = lambda path: path in _OPEN_PATHS or path.startswith("/page/")
    key_in_query: bool = False

    def __post_init__(self, api_key: str | Sequence[str] | None) -> None:
        self.hosts = frozenset(self.hosts)
        self._owners = frozenset(map(owner_of, [api_key] if isinstance(api_key, str) else api_key or ()))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        id = uuid.uuid4().hex  # random, as the id gives access to the stream's state
        current_id.set(id)  # not reset: an outer error handler answers in this task and needs it

        async def send_with_id(message: Any) -> None:
            if message["type"] in _FIRST_MESSAGES and REQUEST_ID_HEADER not in Headers(raw=message["headers"]):
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER.lower().encode(), id.encode())]
            await send(message)

        connection = HTTPConnection(scope)
        try:
            connection.state.owner = self._check(connection)
            if scope["type"] == "http":
                receive = await self._whole_body(connection, receive)
            if receive is None:
                return
        except ApiError as error:
            self.on_refusal(error.code)
            unread = {"Connection": "close"}  # the rest of the body will not be read
            headers = {401: {"WWW-Authenticate": "Bearer"}, 408: unread, 413: unread}.get(error.status)
            await error.response(headers)(scope, receive, send_with_id)  # also refuses a WebSocket handshake
        else:
            await self.app(scope, receive, send_with_id)

    def _check(self, connection: HTTPConnection) -> str:
        """Checks host, origin and key; returns the owner. Raises ApiError."""
        headers = connection.headers
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and (self.hosts or not self._owners) and not is_own_name(host, self.hosts):
            raise ApiError(403, "foreign_host", "the Host header does not name this server: allow it with --allow-host")
        if not (origin is None or origin in self.origins or self._owners or re.fullmatch(LOOPBACK_ORIGIN, origin)):
            message = "web pages from other origins may use this server only with --allow-origin"
            raise ApiError(403, "foreign_origin", message)
        if not self._owners:
            return NO_OWNER
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        in_query = self.key_in_query or connection.scope["type"] == "websocket"
        keys = [bearer.strip()] if scheme.lower() == "bearer" else []
        keys += connection.query_params.getlist("key") if in_query else []
        for owner in map(owner_of, keys):
            if owner in self._owners:  # compares digests, so timing reveals nothing about a key
                return owner
        if not self.is_open(connection.scope["path"]):
            where = ", or ?key=KEY" if in_query else ""
            message = f"expected the header Authorization: Bearer KEY{where} with a key of this server"
            raise ApiError(401, "invalid_api_key", message)
        return NO_OWNER

    async def _whole_body(self, connection: HTTPConnection, receive: Any) -> Any:
        """Reads the whole body within the size and time limits. Returns a `receive` that delivers it in one message, or
        None if the client disconnected. Raises ApiError."""
        at_most = self.max_body_bytes(connection.scope["path"])
        length = connection.headers.get("content-length", "")
        found_bytes, body, more = int(length) if length.isdigit() else 0, bytearray(), True
        most_s = self.body_s + min(found_bytes or at_most, at_most) / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(most_s):
                while more and found_bytes <= at_most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    found_bytes = max(found_bytes, len(body))
        except TimeoutError:
            raise ApiError(408, "body_timeout", "the body did not arrive in time: send it again") from None
        if found_bytes > at_most:
            raise ApiError(413, "body_too_large", f"a body may have at most {at_most} bytes")
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Any:
            return whole.pop() if whole else await receive()

        return replay
