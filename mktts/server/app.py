"""The HTTP side: routes, errors, the OpenAPI document."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request, Security, WebSocket
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute, Match
from fastapi.security import HTTPBearer

from mktts.audio.encoding import import_av
from mktts.errors import BackendUnavailable
from mktts.server.access.gate import Gate, owner_of_request
from mktts.server.access.hosts import LOOPBACK_ORIGIN
from mktts.server.access.request_id import RequestIds, current_id
from mktts.server.answer import AudioAnswer, Body, headers
from mktts.server.document import audio_response, describe, error_responses
from mktts.server.openai_routes import PREFIX, SPEECH_PATH, add_openai_routes
from mktts.server.pages import add_pages
from mktts.server.peers import add_peer_sockets
from mktts.server.probes import add_probes
from mktts.server.problems import Problem, from_error, from_validation
from mktts.server.references import References, ReferenceSources
from mktts.server.schemas import SpeechRequest, StreamState
from mktts.server.speaking import KEYS, Speaking
from mktts.server.studio import Studio
from mktts.server.uploads.routes import VOICES_PATH, add_upload_routes
from mktts.server.websocket import SpeechSocket

_EXPOSED = [
    "X-Request-Id",
    "X-Seed",
    "X-Sample-Rate-Hz",
    "X-Sample-Rate",
    "X-Random-Weights",
    "X-Ignored-Keys",
    "Retry-After",
]
_CODES = {404: "not_found", 405: "method_not_allowed"}

log = logging.getLogger(__name__)


def make_app(
    studio: Studio,
    api_key: str | Sequence[str] | None = None,
    origins: Collection[str] = (),
    sources: ReferenceSources | None = None,
    hosts: Collection[str] = (),
) -> FastAPI:
    """The ASGI application. `api_key`, `origins`, `hosts`: see `Gate`; pages of the origins and of this machine also
    get CORS headers. `sources`: where recordings to be cloned may come from."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    limits = studio.limits
    with contextlib.suppress(BackendUnavailable):  # a request that needs it says so
        import_av()  # now: it takes 0.2 s, in which no stream would get on

    def refused(code: str) -> None:
        studio.meters.refused.labels(code).inc()

    with_recording = limits.max_body_bytes + limits.max_reference_bytes * 4 // 3
    recordings = studio.model.clones  # no other checkpoint has a use for one
    app.add_middleware(
        Gate,
        api_key=api_key,
        origins=origins,
        max_body_bytes=limits.max_body_bytes,
        on_refusal=refused,
        larger_bodies=dict.fromkeys((SPEECH_PATH, VOICES_PATH), with_recording) if recordings else {},
        hosts=hosts,
        body_s=limits.body_s,
    )
    app.add_middleware(  # around the gate: a refusal needs its headers too
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
    app.add_middleware(RequestIds)
    # The gate checks the key; naming the scheme here puts it into the document.
    locked = [Security(HTTPBearer(auto_error=False))] if api_key is not None else []
    anyone = error_responses(403) if api_key is None else {}
    known = anyone or error_responses(401)

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        if error.status == 422 and request.url.path.startswith(PREFIX):
            error.status, error.param = 400, KEYS.get(error.param, error.param)
        refused(error.code)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await problem(request, from_validation(list(error.errors())))

    async def http_error(request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "bad_request")
        refused(code)
        more = {"Allow": _allowed(app, request)} if error.status_code == 405 else error.headers
        return Problem(error.status_code, code, str(error.detail)).response(more)

    for status in (400, *_CODES):
        app.add_exception_handler(status, http_error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("request %s failed", current_id())
        return from_error(error).response()

    checks = [Depends(_json_only)]

    @app.post(
        "/tts/stream",
        response_class=Response,
        dependencies=[*locked, *checks],
        responses={
            200: audio_response("audio/pcm"),
            **known,
            **error_responses(400, 408, 413, 415, 422, 429, 500, 503),
        },
    )
    async def tts_stream(body: SpeechRequest, request: Request) -> Response:
        """Speaks a text; raw 16-bit PCM comes while it is made."""
        owner = owner_of_request(request.scope)
        utterance, sound = studio.speak("tts_stream", body.text, body, owner=owner), Body("pcm")
        return AudioAnswer(utterance, sound, headers(utterance, sound, studio.model.random_weights), limits.stall_s)

    @app.get("/tts/stream/{id}", dependencies=locked, responses={**known, **error_responses(404)})
    async def tts_stream_state(id: str) -> StreamState:
        """How the stream with this X-Request-Id ended, or how far it is. The server keeps the last ones only."""
        return studio.find(id)

    @app.websocket("/tts/ws")
    async def tts_ws(socket: WebSocket) -> None:
        await SpeechSocket(socket, studio).run()

    add_probes(app, studio, locked, anyone, known)

    references = References(studio.checkpoint, limits, sources)
    speaking = Speaking(studio, references)
    add_openai_routes(app, studio, speaking, locked, known, checks)
    add_upload_routes(app, studio, references, locked, known)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(describe(app, studio))
        return document

    app.openapi = openapi

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_document() -> Response:
        return JSONResponse(openapi())

    add_pages(app, studio, openapi, anyone)
    add_peer_sockets(app, studio, speaking)

    @app.websocket("/{path:path}")  # the last: left to itself, the framework answers 403
    async def no_such_socket(socket: WebSocket, path: str) -> None:
        refused("not_found")
        await Problem(404, "not_found", "no WebSocket is spoken here").response()(
            socket.scope, socket.receive, socket.send
        )

    return app


def _allowed(app: FastAPI, request: Request) -> str:
    """The methods of a path, of all its routes; the framework names those of the first alone."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


async def _json_only(request: Request) -> None:
    """Raises Problem 415 for a body that does not say that it is JSON: curl's and a form's default."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        found = f"got {kind}" if kind else "got none"
        raise Problem(415, "not_json", f"expected the header Content-Type: application/json, {found}", "Content-Type")
