"""The agent over HTTP: its page, the WebSocket of the conversation, and WebRTC where aiortc is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from loguru import logger
from pipecat.pipeline.worker import PipelineWorker
from pipecat.transports.base_transport import BaseTransport, TransportParams

from mktts.agent import intents
from mktts.agent.conversation import build, create_tts, load_voice
from mktts.agent.llm import load_llm
from mktts.agent.page_transport import PageObserver, page_transport
from mktts.agent.settings import AgentSettings
from mktts.agent.stt import load_stt
from mktts.agent.user_speech import USER_RATE_HZ
from mktts.server.access import AccessMiddleware
from mktts.server.app import PAGE as SERVERS_PAGE
from mktts.server.graceful import GracefulServer
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(__file__).parent / "page"
MAX_SESSIONS = 4
CONNECT_S = 8.0  # for a peer that has sent an offer; behind a NAT without a relay none ever comes
_IDLE_S = 600.0  # a page that was left open
_CLOSE_S = 2.0
_MAX_BODY_BYTES = 128 * 1024  # an offer has a few kilobytes
_MAX_MESSAGE_BYTES = 256 * 1024  # eight seconds of a microphone
_MOST_REASON_CHARS = 200
_TRY_AGAIN_LATER, _INTERNAL_ERROR = 1013, 1011  # RFC 6455 and its registry


def create_app(
    settings: AgentSettings,
    api_key: str | Sequence[str] | None = None,
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
) -> FastAPI:
    """The ASGI application. The voice is loaded here, unless it is already.

    api_key: asked for by everything under /agent, as `?key=` or as a bearer; the page itself holds no secret. None
    checks no key: such an application must be bound to loopback (`access_of`).
    origins, hosts: as `AccessMiddleware`.
    Raises what loading the voice raises, PromptError or VoiceError for a voice, language or instruction that it does
    not take, and AgentError where a package of speech to text is missing."""
    load_stt(settings)  # a missing package shows before seconds of loading
    llm_runs = load_llm(settings)
    synthesizer = load_voice(settings)
    create_tts(settings)  # a voice, language or instruction that it does not take shows now
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        AccessMiddleware,
        api_key=api_key,
        origins=origins,
        max_body_bytes=_MAX_BODY_BYTES,
        on_refusal=lambda code: None,
        hosts=hosts,
        is_open=lambda path: not f"{path}/".startswith("/agent/"),
        key_in_query=True,  # of the page's address; none of our logs contains the query
    )
    sessions = app.state.sessions = Sessions(settings, MAX_SESSIONS)
    has_webrtc = importlib.util.find_spec("aiortc") is not None  # what Pipecat's transport needs

    @app.get("/agent/config")
    async def config() -> dict[str, Any]:
        parts = settings.parts()
        parts["voice"] += f", {synthesizer.backend_name} on {synthesizer.device}"
        parts["llm"] += llm_runs
        return {
            **parts,
            "input_rate_hz": USER_RATE_HZ,
            "output_rate_hz": SAMPLE_RATE_HZ,
            "random_weights": synthesizer.checkpoint.is_random,
            "transports": ["websocket", "webrtc"] if has_webrtc else ["websocket"],
            "hints": intents.hints() if settings.stt == "pocketsphinx" else [],
        }

    @app.websocket("/agent")
    async def agent(websocket: WebSocket) -> None:
        await websocket.accept()
        if sessions.full:
            await websocket.close(_TRY_AGAIN_LATER)
            return
        try:
            await sessions.begin(page_transport(websocket))
        except Exception as error:
            logger.exception(f"a conversation failed: {error}")
            with contextlib.suppress(RuntimeError):  # the page may be gone
                await websocket.close(_INTERNAL_ERROR, "the bot failed: its log says why")

    if has_webrtc:
        _add_webrtc(app, sessions)

    @app.get("/base.css")
    async def base_style() -> FileResponse:
        return FileResponse(SERVERS_PAGE / "base.css")

    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False))
    return app


class Sessions:
    """The conversations of one server, at most `limit` at once, each over its own transport."""

    def __init__(self, settings: AgentSettings, limit: int) -> None:
        self._settings = settings
        self._limit = limit
        self._running: set[asyncio.Task[None]] = set()
        self._workers: set[PipelineWorker] = set()
        self._closing = False

    @property
    def full(self) -> bool:
        """Whether no other conversation may begin."""
        return self._closing or len(self._running) >= self._limit

    def begin(self, transport: BaseTransport, arrived: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
        """Holds a conversation over `transport`; done when it has ended. arrived: whether the other side is there; if
        it is not within CONNECT_S, the conversation ends, and its place is free."""
        task = asyncio.create_task(self._hold(transport, arrived))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Ends every conversation, and begins no more."""
        self._closing = True
        for worker in [*self._workers]:
            await worker.cancel()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    async def _hold(self, transport: BaseTransport, arrived: Callable[[], bool]) -> None:
        session = uuid.uuid4().hex[:8]
        page = PageObserver(transport.output())
        # In a thread: it loads models, and the audio of other conversations is not to wait for them.
        conversation = await asyncio.to_thread(
            build, transport, self._settings, observers=[page], idle_timeout_s=_IDLE_S
        )
        page.conversation = conversation
        conversation.latency.on_turn = page.send_latency

        @transport.event_handler("on_client_connected")
        async def connected(*_: Any) -> None:
            await page.send("ready", session=session)

        @transport.event_handler("on_client_disconnected")
        async def disconnected(*_: Any) -> None:
            await conversation.worker.cancel()

        async def give_up() -> None:
            await asyncio.sleep(CONNECT_S)
            if not arrived():
                logger.warning(f"conversation {session} ends: no client connected within {CONNECT_S:g} s")
                await conversation.worker.cancel()

        logger.info(f"conversation {session} begins")
        self._workers.add(conversation.worker)
        waiting = asyncio.create_task(give_up())
        try:
            await conversation.run()
        finally:
            waiting.cancel()
            self._workers.discard(conversation.worker)
            logger.info(f"conversation {session} has ended after {len(conversation.latency.turns)} turns")


def _add_webrtc(app: FastAPI, sessions: Sessions) -> None:
    from aiortc.sdp import SessionDescription
    from pipecat.transports.smallwebrtc.connection import SmallWebRTCConnection
    from pipecat.transports.smallwebrtc.transport import SmallWebRTCTransport

    @app.post("/agent/offer")
    async def offer(request: Request) -> dict[str, str]:
        if sessions.full:
            raise HTTPException(503, "too many conversations at once", {"Retry-After": "10"})
        try:
            asked = await request.json()
            media = SessionDescription.parse(asked["sdp"]).media
            if not any(one.kind == "audio" and one.dtls and one.dtls.fingerprints for one in media):  # RFC 8829
                raise ValueError("it has no sound with the fingerprint of DTLS")
            connection = SmallWebRTCConnection()
            await connection.initialize(asked["sdp"], asked["type"])
        except Exception as error:  # of no such object, and whatever aiortc makes of what anyone may have sent
            words = f"{type(error).__name__}: {error}".strip(": ")[:_MOST_REASON_CHARS]
            raise HTTPException(400, f"expected type and sdp of an offer that can be answered: {words}") from None
        params = TransportParams(audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0)
        transport = SmallWebRTCTransport(webrtc_connection=connection, params=params)
        task = sessions.begin(transport, connection.is_connected)
        task.add_done_callback(_log_failure)
        task.add_done_callback(lambda _: asyncio.ensure_future(connection.disconnect()))
        return connection.get_answer()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.opt(exception=task.exception()).error("a conversation failed")


def page_server(app: FastAPI) -> GracefulServer:
    """Ends conversations before it ends connections."""
    return GracefulServer(app, _MAX_MESSAGE_BYTES, app.state.sessions.close)
