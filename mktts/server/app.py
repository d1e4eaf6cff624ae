"""The ASGI application, with the routes that are our own, and uvicorn as it serves one: ending in order on a signal,
with a time limit for request heads and without texts or keys in its log."""

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
_OPENAI = "/v1/"  # under it the caller's mistakes are 400, as OpenAI's are
# The page may load from this server alone; blob: is audio that the page has made itself.
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

**Finish reason.** `X-Request-Id` is the id under which `GET /tts/stream/{{id}}` says how a response's stream ended:
`eos` (the text was spoken), `max_frames` (the limit), `runaway` (the model lost the end), `cancelled`, `error`. A body
that breaks off without its last chunk is not whole. **Closing the connection** cancels the stream within one frame.

**WebSocket** `/tts/ws`, for text that is still being written: `docs/serving.md` has its messages. With a key, a page
may open it with `?key=KEY`.

**Errors** have one shape, OpenAI's, and the id of their request: in `X-Request-Id` and in the body."""
_ERRORS = {  # of every route: the shape is the same everywhere
    "4XX": {"description": "The caller's mistake, or a server with too much to do (429).", "model": ErrorBody},
    "5XX": {"description": "The server's own, or that it stops (503).", "model": ErrorBody},
}
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_UVICORN = {  # with h11 and websockets everything was tested, whatever else is installed
    "ws": "websockets-sansio", "loop": "asyncio", "log_config": None, "access_log": False, "server_header": False,
    "proxy_headers": False, "timeout_graceful_shutdown": 1.0,  # the last bytes of connections whose work has ended
    "log_level": "warning",  # below it, uvicorn logs addresses, which may hold keys, and frames
}  # fmt: skip
# What uvicorn logs and is no fault of this server: a refused handshake, a body that is broken off so that none takes it
# for a whole one (the record says why), and broken text of a client.
_NO_FAULTS = (
    "ASGI callable returned without completing handshake",
    "ASGI callable returned without completing response",
    "Invalid UTF-8 sequence received from client",
)
_SWEEP_S = 5.0  # the longest that a voice deleted by another server stays in memory

logging.getLogger("uvicorn.error").addFilter(lambda record: str(record.msg).rstrip(".") not in _NO_FAULTS)
log = logging.getLogger(__name__)


def make_app(service: SpeechService, **access: Any) -> FastAPI:
    """The ASGI application of a speech server. access: api_key, origins and hosts of `AccessMiddleware`; pages of the
    origins also get CORS headers."""
    with contextlib.suppress(BackendUnavailable):  # a request that needs it gets the error
        import_av()  # not at the first request: it takes 0.2 s, which would hold up every stream

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(service.uploads))
        yield
        sweeping.cancel()

    # /docs with its scripts from here: FastAPI's own page loads them from another host
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
    app.add_middleware(  # outermost: a refusal needs CORS headers, too
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
        if isinstance(error, RequestValidationError) and isinstance(error.body, bytes):  # curl's, or a form's
            found = request.headers.get("content-type") or "none"
            message = f"expected the header Content-Type: application/json, got {found}"
            error = ApiError(415, "not_json", message, "Content-Type")
        elif isinstance(error, RequestValidationError):
            error = from_validation(error.errors())
        elif isinstance(error, StarletteHTTPException):
            if error.status_code == 405:  # the framework names only the methods of the path's first route
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

    # AccessMiddleware checks the key; the scheme is named here for the OpenAPI document.
    locked = [] if access.get("api_key") is None else [Security(HTTPBearer(auto_error=False))]

    @app.post("/tts/stream", response_class=Response, dependencies=locked, responses={200: documented("audio/pcm")})
    async def tts_stream(body: SpeechRequest, request: Request) -> Response:
        """Speaks a text; raw 16-bit PCM is sent while it is made."""
        stream = service.speak("tts_stream", body, body.text, owner=request.state.owner)
        return AudioResponse(stream, Encoder("pcm"))

    @app.get("/tts/stream/{id}", dependencies=locked)
    async def tts_stream_state(id: str) -> StreamState:
        """How the stream with this X-Request-Id ended, or how far it is. The server keeps the last ones only."""
        return service.find(id.partition(",")[0])  # behind a proxy that adds its own id, clients send both

    @app.websocket("/tts/ws")
    async def tts_ws(socket: WebSocket) -> None:
        await SpeechSocket(socket, service).run()

    app.include_router(openai_routes(service), dependencies=locked)

    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "Not ok."}})
    async def health() -> Response:
        """The model that is served and its state."""
        found = service.health
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.get("/ready", responses={503: {"description": "Not ready."}})
    async def ready() -> Response:
        """Whether this server accepts more requests: not while it fails or stops."""
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
    for path, answer in answers.items():  # /ping: the name that other servers and cloud platforms use
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/page", pages)

    @app.websocket("/{path:path}")  # last of the routes: the framework alone would answer 403
    async def no_such_socket(path: str) -> None:
        raise ApiError(404, "not_found", "no WebSocket is spoken here")

    return app


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


async def _sweep(folder: VoiceFolder | None) -> None:
    """Drops voices that have expired or that another server has deleted, every _SWEEP_S."""
    while folder is not None:
        try:
            await asyncio.to_thread(folder.sweep)
        except Exception:
            log.exception("the folder of uploaded voices could not be swept")
        await asyncio.sleep(_SWEEP_S)


class GracefulServer(uvicorn.Server):
    """Serves an ASGI application; leaves signals of the rest of the process to the caller.

    stopped_by: the signal that ended it. limits: of a request's head and of a WebSocket message. stop: ends what the
    application does, before connections are; it is given what tells whether to end at once. settings: more of
    `uvicorn.Config`."""

    stopped_by: int | None = None

    def __init__(
        self, app: Any, limits: Limits, stop: Callable[[Callable[[], bool]], Awaitable[None]], **settings: Any
    ) -> None:
        self._stop = stop
        http = type("Http", (_TimedHttp,), {"head_s": limits.head_s})
        settings = {**_UVICORN, "http": http, "ws_max_size": limits.max_body_bytes, **settings}
        super().__init__(uvicorn.Config(app, **settings))

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for an orderly end, a second one for an end at once. What uvicorn's own method notes
        would be raised again at the end: the caller has a model to close first."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = number

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stop(lambda: self.force_exit)
        await super().shutdown(sockets)


def speech_server(service: SpeechService, **access: Any) -> GracefulServer:
    """Ends by refusing new streams, letting open ones finish for a while, and cancelling the rest: see `make_app`."""
    # No pings: a client that plays as it reads has its pong behind minutes of audio; stall_s finds one that is gone.
    return GracefulServer(make_app(service, **access), service.limits, service.stop, ws_ping_timeout=None)


class _TimedHttp(H11Protocol):
    """HTTP/1.1 whose request heads must come within `head_s` of the connection's beginning, or of the first byte of a
    further request: a half one is answered by 408. Between requests uvicorn's own limit holds."""

    head_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, self._too_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():  # no head is waited for
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(self.head_s, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers as uvicorn does, in the shape of every other error."""
        self._refuse(ApiError(400, "invalid_http", msg))

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that no application will see, and closes the connection."""
        current_id.set(uuid.uuid4().hex)
        found = error.response({"Connection": "close"})
        head = h11.Response(status_code=error.status, headers=found.raw_headers)
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is on its way already
            self.transport.write(b"".join(map(self.conn.send, (head, h11.Data(found.body), h11.EndOfMessage()))))
        self.transport.close()

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:  # otherwise nothing was asked
            message = f"the head of the request did not come within {self.head_s:g} s: send it again"
            self._refuse(ApiError(408, "head_timeout", message))
        self.transport.close()
