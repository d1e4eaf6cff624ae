"""The agent over HTTP: its page, the WebSocket of the conversation, and WebRTC where aiortc is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.staticfiles import StaticFiles
from loguru import logger

from mktts.agent import intents
from mktts.agent.conversation import check_voice, load_voice
from mktts.agent.ears import load_ears
from mktts.agent.mind import load_mind
from mktts.agent.sessions import Sessions
from mktts.agent.settings import AgentSettings
from mktts.agent.user_speech import USER_RATE_HZ
from mktts.agent.websocket import PageTransport
from mktts.errors import AgentError
from mktts.server import Gate
from mktts.spec import SAMPLE_RATE_HZ

Transport = Literal["websocket", "webrtc"]
PAGE = Path(__file__).parent / "page"
MAX_SESSIONS = 4
_MAX_BODY_BYTES = 128 * 1024  # an offer has a few kilobytes
_MOST_REASON_CHARS = 200
_TRY_AGAIN_LATER, _INTERNAL_ERROR = 1013, 1011  # RFC 6455 and its registry


def has_webrtc() -> bool:
    """Whether Pipecat's WebRTC transport can be used."""
    return importlib.util.find_spec("aiortc") is not None


def create_app(
    settings: AgentSettings,
    api_key: str | Sequence[str] | None = None,
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    transport: Transport = "websocket",
) -> FastAPI:
    """The ASGI application. The voice is loaded here, unless it is already.

    api_key: asked for by everything under /agent, as `?key=` or as a bearer; the page itself holds no secret. None
    lets in anyone who reaches it: such an application must be bound to loopback (`mktts.agent.serve.bind` sees to it).
    origins: of web pages from elsewhere that may use it. hosts: names it may be called by (see `Gate`). transport: what
    the page offers first.
    Raises what loading the voice raises, PromptError or VoiceError for a voice, language or instruction that it does
    not take, and AgentError where a package of the ears or of "webrtc" is missing.
    """
    if transport == "webrtc" and not has_webrtc():
        raise AgentError("WebRTC needs the package aiortc: pip install -r requirements.txt")
    load_ears(settings)  # a missing package shows before seconds of loading
    mind_runs = load_mind(settings)
    synthesizer = load_voice(settings)
    check_voice(settings)
    checkpoint = synthesizer.checkpoint
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_AgentGate, api_key=api_key, origins=origins, hosts=hosts)
    sessions = app.state.sessions = Sessions(settings, MAX_SESSIONS)
    transports = sorted(("websocket", "webrtc") if has_webrtc() else ("websocket",), key=lambda name: name != transport)

    @app.get("/agent/config")
    async def config() -> dict[str, Any]:
        parts = settings.parts()
        parts["voice"] += f", {synthesizer.backend_name} on {synthesizer.device}"
        parts["mind"] += mind_runs
        return {
            **parts,
            "input_rate_hz": USER_RATE_HZ,
            "output_rate_hz": SAMPLE_RATE_HZ,
            "random_weights": checkpoint is not None and checkpoint.is_random,
            "transports": transports,
            "hints": intents.hints() if settings.ears == "pocketsphinx" else [],
        }

    @app.websocket("/agent")
    async def agent(websocket: WebSocket) -> None:
        await websocket.accept()
        if sessions.full:
            await websocket.close(_TRY_AGAIN_LATER)
            return
        try:
            await sessions.begin(PageTransport(websocket))
        except Exception as error:
            logger.exception(f"a conversation failed: {error}")
            with contextlib.suppress(RuntimeError):  # the page may be gone
                await websocket.close(_INTERNAL_ERROR, "the bot failed: its log says why")

    if has_webrtc():
        _add_webrtc(app, sessions)
    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False))
    return app


def _add_webrtc(app: FastAPI, sessions: Sessions) -> None:
    from pipecat.transports.base_transport import TransportParams
    from pipecat.transports.smallwebrtc.request_handler import SmallWebRTCRequest, SmallWebRTCRequestHandler
    from pipecat.transports.smallwebrtc.transport import SmallWebRTCTransport

    handler = SmallWebRTCRequestHandler()

    @app.post("/agent/offer")
    async def offer(request: Request) -> dict[str, str] | None:
        if sessions.full:
            raise HTTPException(503, "too many conversations at once", {"Retry-After": "10"})
        try:
            asked = SmallWebRTCRequest.from_dict(await request.json())
        except (ValueError, TypeError, AttributeError):
            raise HTTPException(400, "expected a JSON object with sdp and type") from None
        if not is_offer(asked.sdp, asked.type):
            raise HTTPException(400, "expected an SDP offer with sound, ICE and DTLS in it")

        async def begin(connection: Any) -> None:
            params = TransportParams(audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0)
            transport = SmallWebRTCTransport(webrtc_connection=connection, params=params)
            task = sessions.begin(transport, connection.is_connected)
            task.add_done_callback(_log_failure)
            task.add_done_callback(lambda _: asyncio.ensure_future(connection.disconnect()))

        try:
            return await handler.handle_web_request(asked, begin)
        except HTTPException:
            raise
        except Exception as error:  # whatever aiortc makes of what a stranger sent
            words = f"{type(error).__name__}: {error}".strip(": ")[:_MOST_REASON_CHARS]
            raise HTTPException(400, f"this offer cannot be answered: {words}") from None


def is_offer(sdp: object, kind: object) -> bool:
    """Whether a description of a session is an offer that a connection can be made of (RFC 8829): it has audio, and
    for it the credentials of ICE and the fingerprint of DTLS."""
    from aiortc.sdp import SessionDescription

    if kind != "offer" or not isinstance(sdp, str):
        return False
    try:
        media = SessionDescription.parse(sdp).media
    except Exception:  # its parser asserts and indexes
        return False
    return any(
        one.kind == "audio" and one.dtls is not None and one.dtls.fingerprints and one.ice.usernameFragment
        for one in media
    )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.opt(exception=task.exception()).error("a conversation failed")


class _AgentGate:
    """The server's gate, before everything under /agent. A browser sets no headers on a WebSocket, so the key may come
    in the query as well; none of our logs contains the query."""

    def __init__(
        self, app: Any, api_key: str | Sequence[str] | None, origins: Collection[str], hosts: Collection[str]
    ) -> None:
        self._open = app
        self._gate = Gate(app, api_key, origins, _MAX_BODY_BYTES, lambda code: None, hosts=hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or not f"{scope['path']}/".startswith("/agent/"):
            await self._open(scope, receive, send)
            return
        key = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("key")
        if key is not None:
            given = (b"authorization", f"Bearer {key}".encode())
            scope = {**scope, "headers": [*(pair for pair in scope["headers"] if pair[0] != given[0]), given]}
        await self._gate(scope, receive, send)
