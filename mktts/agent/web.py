"""The agent over HTTP: its page, the WebSocket of the conversation, and WebRTC where aiortc is installed.

Over the WebSocket it is raw PCM both ways and JSON between. Binary messages are mono 16-bit little-endian PCM, 16 kHz
from the page and 24 kHz to it. Text messages are objects with a "type"; from the page come "hello", after which the bot
greets, "mute", and "text", what was typed, which the bot answers as if it had been said. To the page, over WebSocket
and WebRTC alike:

    ready    session
    caption  who ("user" or "bot"), text, final; of the bot also turn, and interrupted with what was left unheard. The
             bot's text is what has been heard so far, not what has been written.
    state    user ("speaking", "silent"), bot ("thinking", "speaking", "silent")
    latency  turn and the times of `TurnLatency`
    error    message, fatal
    clear    what is queued is not to be played"""

import asyncio
import contextlib
import importlib.util
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, WebSocket, status
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from loguru import logger
from pipecat.frames import frames
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.serializers.base_serializer import FrameSerializer
from pipecat.transports.base_transport import BaseTransport, TransportParams
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams, FastAPIWebsocketTransport
from pipecat.utils.string import TextPartForConcatenation, concatenate_aggregated_text

from mktts.agent import intents
from mktts.agent.conversation import Conversation, build, create_tts, load_voice
from mktts.agent.latency import TIMES, TurnLatency
from mktts.agent.llm import create_llm
from mktts.agent.settings import AgentSettings
from mktts.agent.stt import create_stt
from mktts.agent.user_speech import USER_RATE_HZ
from mktts.server.access import AccessMiddleware
from mktts.server.app import PAGE as SERVERS_PAGE
from mktts.server.app import GracefulServer
from mktts.server.settings import Limits
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(__file__).parent / "page"
MAX_SESSIONS = 4
CONNECT_S = 8.0  # for a peer that has sent an offer; behind a NAT without a relay none ever comes
_IDLE_S = 600.0  # a page that was left open
_CLOSE_S = 2.0
_MAX_BODY_BYTES = 128 * 1024  # an offer has a few kilobytes
_MAX_MESSAGE_BYTES = 256 * 1024  # eight seconds of a microphone
_MOST_REASON_CHARS = 200
_MOST_TYPED_CHARS = 2_000
_SOUND: dict[str, Any] = {"audio_in_enabled": True, "audio_out_enabled": True, "audio_out_end_silence_secs": 0}
_SAMPLE_BYTES = 2
# What a frame says of either side.
_STATES = {
    frames.VADUserStartedSpeakingFrame: {"user": "speaking"},
    frames.VADUserStoppedSpeakingFrame: {"user": "silent"},
    frames.LLMFullResponseStartFrame: {"bot": "thinking"},
    frames.BotStartedSpeakingFrame: {"bot": "speaking"},
    frames.BotStoppedSpeakingFrame: {"bot": "silent"},
    frames.InterruptionFrame: {"bot": "silent"},
}


def create_server(settings: AgentSettings, **access: Any) -> GracefulServer:
    """The page's server; it ends conversations before it ends connections. The voice is loaded here, unless it is
    already.

    access: api_key, origins and hosts of `AccessMiddleware`. The key is asked for by everything under /agent, as
    `?key=` or as a bearer; the page itself holds no secret. Without one, it must be bound to loopback.
    Raises what loading the voice raises, PromptError or VoiceError for a voice, language or instruction that it does
    not take, and AgentError where a package of speech to text is missing."""
    create_stt(settings)  # what is missing or does not fit shows now, a package before seconds of loading
    llm_runs = getattr(create_llm(settings), "runs", "")
    create_tts(settings)
    synthesizer = load_voice(settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        AccessMiddleware,
        max_body_bytes=lambda path: _MAX_BODY_BYTES,
        is_open=lambda path: not f"{path}/".startswith("/agent/"),
        key_in_query=True,  # of the page's address; none of our logs contains the query
        **access,
    )
    sessions = Sessions(settings)
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
            await websocket.close(status.WS_1013_TRY_AGAIN_LATER)
            return
        try:
            params = FastAPIWebsocketParams(**_SOUND, serializer=PcmSerializer())
            await sessions.begin(FastAPIWebsocketTransport(websocket, params))  # sends at the listener's pace
        except Exception:
            with contextlib.suppress(RuntimeError):  # the page may be gone
                await websocket.close(status.WS_1011_INTERNAL_ERROR, "the bot failed: its log says why")

    if has_webrtc:
        _add_webrtc(app, sessions)

    @app.get("/base.css")
    async def base_style() -> FileResponse:
        return FileResponse(SERVERS_PAGE / "base.css")

    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False))
    return GracefulServer(app, Limits(max_body_bytes=_MAX_MESSAGE_BYTES), lambda _: sessions.close())


class Sessions:
    """The conversations of one server, at most MAX_SESSIONS at once, each over its own transport."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._running: dict[asyncio.Task[None], PipelineWorker | None] = {}  # None until it is built
        self._closing = False

    @property
    def full(self) -> bool:
        """Whether no other conversation may begin."""
        return self._closing or len(self._running) >= MAX_SESSIONS

    def begin(self, transport: BaseTransport, arrived: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
        """Holds a conversation over `transport`; done when it has ended. arrived: whether the other side is there; if
        it is not within CONNECT_S, the conversation ends, and its place is free."""
        task = asyncio.create_task(self._hold(transport, arrived))
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and task.exception() is not None:
            logger.opt(exception=task.exception()).error("a conversation failed")

    async def close(self) -> None:
        """Ends every conversation, and begins no more."""
        self._closing = True
        for worker in [*self._running.values()]:
            if worker is not None:
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
        self._running[asyncio.current_task()] = conversation.worker
        waiting = asyncio.create_task(give_up())
        try:
            await conversation.run()
        finally:
            waiting.cancel()
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
        transport = SmallWebRTCTransport(webrtc_connection=connection, params=TransportParams(**_SOUND))
        task = sessions.begin(transport, connection.is_connected)
        task.add_done_callback(lambda _: asyncio.ensure_future(connection.disconnect()))
        return connection.get_answer()


class PageObserver(BaseObserver):
    """Sends the page what it shows, and does what comes from there. conversation: set once it is built, before it runs.
    output: of its transport; words that leave it are being heard."""

    def __init__(self, output: FrameProcessor) -> None:
        super().__init__()
        self.conversation: Conversation | None = None
        self._output = output
        self._sides = {"user": "silent", "bot": "silent"}
        self._turn = 0
        self._heard: list[TextPartForConcatenation] = []
        self._written = ""
        self._greeted = False
        self._answering = asyncio.Lock()  # what is typed is answered in its order
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, kind: str, **fields: Any) -> None:
        message = {"type": kind, **fields}
        await self.conversation.worker.queue_frame(frames.OutputTransportMessageUrgentFrame(message=message))

    async def send_latency(self, turn: TurnLatency) -> None:
        await self.send("latency", turn=turn.turn, **{name: getattr(turn, name) for name in TIMES})

    async def on_push_frame(self, data: FramePushed) -> None:
        frame = data.frame
        if isinstance(frame, frames.TTSTextFrame):
            if data.source is self._output and data.direction == FrameDirection.DOWNSTREAM:
                spaces = frame.includes_inter_frame_spaces
                self._heard.append(TextPartForConcatenation(frame.text, includes_inter_part_spaces=spaces))
                await self._caption(final=False)
        elif not data.first_push:
            return
        elif isinstance(frame, frames.ErrorFrame):
            whose = "" if frame.processor is None else f"{frame.processor.name}: "
            permanent = getattr(frame, "permanent", frame.fatal)
            await self.send("error", message=f"{whose}{frame.error}", fatal=permanent)
        elif data.direction == FrameDirection.DOWNSTREAM:
            await self._show(frame)

    async def _show(self, frame: frames.Frame) -> None:
        if type(frame) in _STATES:
            await self._change(_STATES[type(frame)])
        if isinstance(frame, frames.InputTransportMessageFrame):
            await self._take(frame.message)
        elif isinstance(frame, (frames.TranscriptionFrame, frames.InterimTranscriptionFrame)):
            await self.send("caption", who="user", text=frame.text, final=isinstance(frame, frames.TranscriptionFrame))
        elif isinstance(frame, frames.LLMFullResponseStartFrame):
            self._written = ""
        elif isinstance(frame, frames.LLMTextFrame):
            self._written += frame.text
        elif isinstance(frame, frames.LLMFullResponseEndFrame):
            if not self._written and self._sides["bot"] == "thinking":  # nothing will be spoken
                await self._change({"bot": "silent"})
        elif isinstance(frame, (frames.BotStoppedSpeakingFrame, frames.InterruptionFrame)):
            await self._caption(final=True, interrupted=isinstance(frame, frames.InterruptionFrame))

    async def _take(self, message: Any) -> None:
        """A message of the page: greets once it can play, and answers what is typed there."""
        if not isinstance(message, dict):
            return
        text = message.get("text")
        if message.get("type") == "hello" and not self._greeted:
            self._greeted = True
            await self.conversation.greet()
        elif message.get("type") == "text" and isinstance(text, str) and (text := text.strip()[:_MOST_TYPED_CHARS]):
            task = asyncio.create_task(self._answer(text))  # frames go on meanwhile
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, text: str) -> None:
        async with self._answering:
            await self.conversation.answer(text)
            await self.send("caption", who="user", text=text, final=True)

    async def _change(self, sides: dict[str, str]) -> None:
        changed = self._sides | sides
        if changed != self._sides:
            self._sides = changed
            await self.send("state", **changed)

    async def _caption(self, *, final: bool, interrupted: bool = False) -> None:
        if not self._heard:
            return
        text = concatenate_aggregated_text(self._heard)
        more: dict[str, Any] = {}
        if interrupted:
            place = self._written.find(text)
            unheard = self._written[place + len(text) :].strip() if place >= 0 else ""
            more = {"interrupted": True, **({"unheard": unheard} if unheard else {})}
        await self.send("caption", who="bot", text=text, final=final, turn=self._turn, **more)
        if final:
            self._heard = []
            self._turn += 1


class PcmSerializer(FrameSerializer):
    """Frames as the page has them. Keeps whether the page is muted, and hears silence while it is."""

    def __init__(self) -> None:
        super().__init__()
        self._muted = False

    async def serialize(self, frame: frames.Frame) -> str | bytes | None:
        """PCM, JSON, or None for what the page does not get."""
        if isinstance(frame, frames.OutputAudioRawFrame):
            return frame.audio
        if isinstance(frame, frames.InterruptionFrame):
            return json.dumps({"type": "clear"})  # what the page has queued cannot be taken back from here
        if isinstance(frame, (frames.OutputTransportMessageFrame, frames.OutputTransportMessageUrgentFrame)):
            return None if self.should_ignore_frame(frame) else json.dumps(frame.message)
        return None

    async def deserialize(self, data: str | bytes) -> frames.Frame | None:
        """The frame of a message of the page; None for what is neither PCM nor a JSON object."""
        if isinstance(data, bytes):
            whole = len(data) - len(data) % _SAMPLE_BYTES
            return frames.InputAudioRawFrame(bytes(whole) if self._muted else data[:whole], USER_RATE_HZ, 1)
        try:
            message = json.loads(data)
        except ValueError:
            return None
        if not isinstance(message, dict):
            return None
        if message.get("type") == "mute":
            self._muted = message.get("muted") is True
        return frames.InputTransportMessageFrame(message=message)
