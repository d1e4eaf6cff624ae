"""The ASGI application with mktts's own routes, and the uvicorn server that runs it: it shuts down gracefully on a
signal, limits the time for request heads, and logs neither texts nor keys."""

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Security, WebSocket
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import Match
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from uvicorn.protocols.http.h11_impl import H11Protocol, h11

from mktts.audio.encoding import Encoder, import_av
from mktts.errors import BackendUnavailable
from mktts.server.access import AccessMiddleware, ApiError, current_id, from_error, from_validation
from mktts.server.openai_routes import AUDIO_HEADERS, SPEECH_PATH, VOICES_PATH, AudioResponse, documented, openai_routes
from mktts.server.schemas import ErrorBody, Health, SpeechRequest, StreamState
from mktts.server.service import SpeechService
from mktts.server.settings import LOOPBACK_ORIGIN, Limits
from mktts.server.voices import VoiceFolder
from mktts.server.websocket import SpeechSocket
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(__file__).parent / "page"
_OPENAI = "/v1/"  # under this path a caller's mistake is answered with 400, as OpenAI does
# The page may load resources from this server only; blob: is audio that the page created itself.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; media-src 'self' blob:; "
        "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ABOUT = f"""Qwen3-TTS speech, streamed frame by frame: 16-bit PCM at {SAMPLE_RATE_HZ} Hz, one channel.

**Finish reason.** `GET /tts/stream/{{id}}`, with the id in `X-Request-Id`, reports how a stream ended: `eos` (the text
was spoken), `max_frames` (the limit), `runaway` (the model failed to stop), `cancelled` or `error`. A body without its
last chunk is incomplete. **Closing the connection** cancels the stream within one frame.

**WebSocket** `/tts/ws` takes text while it is still being written; `docs/serving.md` describes its messages. If the
server has a key, a page can open it with `?key=KEY`.

**Errors** all have OpenAI's shape. `X-Request-Id` and the body hold the id of the request."""
_ERRORS = {  # of every route
    "4XX": {"description": "The request is invalid, or the server is at capacity (429).", "model": ErrorBody},
    "5XX": {"description": "The server failed, or is shutting down (503).", "model": ErrorBody},
}
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_UVICORN = {  # names the protocol implementations that were tested, whatever else is installed
    "ws": "websockets-sansio", "loop": "asyncio", "log_config": None, "access_log": False, "server_header": False,
    "proxy_headers": False, "timeout_graceful_shutdown": 1.0,  # s to flush connections whose streams have ended
    "log_level": "warning",  # below it, uvicorn logs WebSocket frames and URLs, which may contain keys
}  # fmt: skip
# Errors that uvicorn logs though the server works as intended: a refused handshake, a body that was cut off so that no
# client takes it for complete (the stream's own log line gives the reason), and invalid UTF-8 from a client.
_NO_FAULTS = (
    "ASGI callable returned without completing handshake",
    "ASGI callable returned without completing response",
    "Invalid UTF-8 sequence received from client",
)
_SWEEP_S = 5.0  # a voice deleted by another server stays in memory for at most this long

logging.getLogger("uvicorn.error").addFilter(lambda record: str(record.msg).rstrip(".") not in _NO_FAULTS)
log = logging.getLogger(__name__)


def make_app(service: SpeechService, **access: Any) -> FastAPI:
    """Builds the ASGI application of a speech server. access: api_key, origins and hosts of `AccessMiddleware`; pages
    from the origins also get CORS headers."""
    with contextlib.suppress(BackendUnavailable):  # a request that needs PyAV gets the error
        import_av()  # takes 0.2 s, which would stall every stream if it happened at the first request

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(service.uploads))
        yield
        sweeping.cancel()

    # /docs loads its scripts from this server; FastAPI's own page loads them from another host.
    app = FastAPIOffline(
        title="mktts", description=_ABOUT, lifespan=lifespan, responses=_ERRORS, redoc_url=None, static_url="/page/docs"
    )
    limits = service.limits
    recording_bytes = limits.max_reference_bytes * 4 // 3 if service.model.clones else 0
    app.add_middleware(
        AccessMiddleware,
        max_body_bytes=lambda path: limits.max_body_bytes + recording_bytes * (path in (SPEECH_PATH, VOICES_PATH)),
        on_refusal=service.meters.refuse,
        body_s=limits.body_s,
        **access,
    )
    app.add_middleware(  # the outermost one, so that refusals get CORS headers, too
        CORSMiddleware,
        allow_origins=list(access.get("origins", ())),
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=_METHODS,
        allow_headers=["*"],
        expose_headers=[*AUDIO_HEADERS, "X-Sample-Rate", "X-Mktts-Ignored", "Retry-After"],
    )

    @app.exception_handler(ApiError)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None)
        if isinstance(error, RequestValidationError) and isinstance(error.body, bytes):  # not sent as JSON
            found = request.headers.get("content-type") or "none"
            message = f"expected the header Content-Type: application/json, got {found}"
            error = ApiError(415, "not_json", message, "Content-Type")
        elif isinstance(error, RequestValidationError):
            error = from_validation(error.errors())
        elif isinstance(error, StarletteHTTPException):
            if error.status_code == 405:  # Starlette lists only the methods of the path's first route
                asked = {method: {**request.scope, "method": method} for method in _METHODS}
                there = (name for name in asked if any(r.matches(asked[name])[0] is Match.FULL for r in app.routes))
                headers = {"Allow": ", ".join(there)}
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            error = ApiError(error.status_code, code, str(error.detail))
        elif not isinstance(error, ApiError):
            log.error("request %s failed", current_id.get())
            error = from_error(error)
        service.meters.refuse(error.code)
        return (error.in_openai_terms() if request.url.path.startswith(_OPENAI) else error).response(headers)

    # AccessMiddleware checks the key; this only declares the scheme in the OpenAPI document.
    locked = [] if access.get("api_key") is None else [Security(HTTPBearer(auto_error=False))]

    @app.post("/tts/stream", response_class=Response, dependencies=locked, responses={200: documented("audio/pcm")})
    async def tts_stream(body: SpeechRequest, request: Request) -> Response:
        """Speaks a text and streams raw 16-bit PCM while it is generated."""
        stream = service.speak("tts_stream", body, body.text, owner=request.state.owner)
        return AudioResponse(stream, Encoder("pcm"))

    @app.get("/tts/stream/{id}", dependencies=locked)
    async def tts_stream_state(id: str) -> StreamState:
        """Reports the progress or the end of the stream with this X-Request-Id. Only recent streams are kept."""
        return service.find(id.partition(",")[0])  # behind a proxy that adds its own id, clients send both

    @app.websocket("/tts/ws")
    async def tts_ws(socket: WebSocket) -> None:
        await SpeechSocket(socket, service).run()

    app.include_router(openai_routes(service), dependencies=locked)

    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "Not ok."}})
    async def health() -> Response:
        """Describes the model that is served and the state of the server."""
        found = service.health
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.get("/ready", responses={503: {"description": "Not ready."}})
    async def ready() -> Response:
        """Reports whether the server accepts requests, which it does not while it is failing or stopping."""
        wants_more = service.health.status == "ok"
        return JSONResponse({"ready": wants_more}, 200 if wants_more else 503)

    plain = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", response_class=Response, dependencies=locked, responses=plain)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(service.meters.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    pages = _PageFiles(directory=PAGE)

    async def root(request: Request) -> Response:
        return await pages.get_response("index.html", request.scope)

    answers = {"/": root, "/ready": ready, "/health": health, "/v1/health": health, "/ping": health}
    for path, answer in answers.items():  # /ping is the path that other servers and cloud platforms use
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/page", pages)

    @app.websocket("/{path:path}")  # the last route; without it Starlette would answer 403
    async def no_such_socket(path: str) -> None:
        raise ApiError(404, "not_found", "there is no WebSocket at this path")

    return app


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _sweep(folder: VoiceFolder | None) -> None:
    """Drops, every _SWEEP_S seconds, voices that have expired or that another server has deleted."""
    while folder is not None:
        try:
            await asyncio.to_thread(folder.sweep)
        except Exception:
            log.exception("the folder of uploaded voices could not be swept")
        await asyncio.sleep(_SWEEP_S)


class GracefulServer(uvicorn.Server):
    """Serves an ASGI application until a signal, which it records instead of raising again.

    stopped_by: the signal that ended it. limits: of a request's head and of a WebSocket message. stop: awaited before
    connections close, to end the application's work; its argument returns whether to end at once. settings: further
    arguments of `uvicorn.Config`."""

    stopped_by: int | None = None

    def __init__(
        self, app: Any, limits: Limits, stop: Callable[[Callable[[], bool]], Awaitable[None]], **settings: Any
    ) -> None:
        self._stop = stop
        http = type("Http", (_TimedHttp,), {"head_s": limits.head_s})
        settings = {**_UVICORN, "http": http, "ws_max_size": limits.max_body_bytes, **settings}
        super().__init__(uvicorn.Config(app, **settings))

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """Starts a graceful shutdown at the first signal and an immediate one at the second. uvicorn's own method would
        raise the signal again after serving, but the caller must close the model first."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = number

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stop(lambda: self.force_exit)
        await super().shutdown(sockets)


def speech_server(service: SpeechService, **access: Any) -> GracefulServer:
    """A server of `make_app`. Its end refuses new streams, lets open ones finish for a while, and cancels the rest."""
    # No pings: a client that reads as it plays would answer minutes late. stall_s detects a client that is gone.
    return GracefulServer(make_app(service, **access), service.limits, service.stop, ws_ping_timeout=None)


class _TimedHttp(H11Protocol):
    """HTTP/1.1 with `head_s` seconds for a request's head, from the connection's start or a later request's first byte.
    An incomplete head is answered with 408. Between requests uvicorn's keep-alive timeout applies."""

    head_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, self._too_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():  # no head is expected
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(self.head_s, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP, as uvicorn does, but in the shape of every other error."""
        self._refuse(ApiError(400, "invalid_http", msg))

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that never reaches the application, and closes the connection."""
        current_id.set(uuid.uuid4().hex)
        found = error.response({"Connection": "close"})
        head = h11.Response(status_code=error.status, headers=found.raw_headers)
        with contextlib.suppress(h11.LocalProtocolError):  # a response has already begun
            self.transport.write(b"".join(map(self.conn.send, (head, h11.Data(found.body), h11.EndOfMessage()))))
        self.transport.close()

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:  # otherwise no request was begun
            message = f"the head of the request did not arrive within {self.head_s:g} s: send it again"
            self._refuse(ApiError(408, "head_timeout", message))
        self.transport.close()
