"""The agent over HTTP: its page, and conversations over WebSocket, or over WebRTC if aiortc is installed.

The WebSocket carries raw PCM and JSON in both directions. Binary messages are mono 16-bit little-endian PCM, 16 kHz
from the page and 24 kHz to it. Text messages are objects with a "type". The page sends "hello", which the bot answers
with its greeting, "mute", and "text" for typed text, which the bot answers like speech. The page receives, over
WebSocket and WebRTC alike:

    ready    session
    caption  who ("user" or "bot"), text, final; for the bot also turn, and after an interruption `interrupted` and the
             `unheard` rest. The bot's text is what has been heard so far, not what has been generated.
    state    user ("speaking", "silent"), bot ("thinking", "speaking", "silent")
    latency  turn and the times of `TurnLatency`
    error    message, fatal
    clear    drop the audio that is queued for playback"""

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
CONNECT_S = 8.0  # time for a peer to connect after its offer; behind a NAT without a relay it never does
_IDLE_S = 600.0  # ends the conversation of a page that was left open
_CLOSE_S = 2.0
_MAX_BODY_BYTES = 128 * 1024  # an offer has a few kilobytes
_MAX_MESSAGE_BYTES = 256 * 1024  # eight seconds of microphone audio
_MOST_REASON_CHARS = 200
_MOST_TYPED_CHARS = 2_000
_SOUND: dict[str, Any] = {"audio_in_enabled": True, "audio_out_enabled": True, "audio_out_end_silence_secs": 0}
_SAMPLE_BYTES = 2
# The state of either side that a frame implies.
_STATES = {
    frames.VADUserStartedSpeakingFrame: {"user": "speaking"},
    frames.VADUserStoppedSpeakingFrame: {"user": "silent"},
    frames.LLMFullResponseStartFrame: {"bot": "thinking"},
    frames.BotStartedSpeakingFrame: {"bot": "speaking"},
    frames.BotStoppedSpeakingFrame: {"bot": "silent"},
    frames.InterruptionFrame: {"bot": "silent"},
}


def create_server(settings: AgentSettings, **access: Any) -> GracefulServer:
    """Creates the server of the agent and its page, which ends conversations before connections. Loads the voice,
    unless it is loaded already.

    access: api_key, origins and hosts of `AccessMiddleware`. All paths under /agent require the key, as `?key=` or as a
    bearer token; the page itself is public. Without a key the server must be bound to loopback.
    Raises what loading the voice raises, PromptError or VoiceError for a voice, language or instruction that the
    checkpoint does not support, and AgentError if a package for speech to text is missing."""
    create_stt(settings)  # reports errors now; first, as a missing package shows before the voice loads for seconds
    llm_runs = getattr(create_llm(settings), "runs", "")
    create_tts(settings)
    synthesizer = load_voice(settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        AccessMiddleware,
        max_body_bytes=lambda path: _MAX_BODY_BYTES,
        is_open=lambda path: not f"{path}/".startswith("/agent/"),
        key_in_query=True,  # the page's URL has the key; none of our logs contains the query
        **access,
    )
    sessions = Sessions(settings)
    has_webrtc = importlib.util.find_spec("aiortc") is not None  # required by Pipecat's WebRTC transport

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
            await sessions.begin(FastAPIWebsocketTransport(websocket, params))  # sends at playback speed
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
    """The conversations of one server, at most MAX_SESSIONS at a time, each with its own transport."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._running: dict[asyncio.Task[None], PipelineWorker | None] = {}  # None until it is built
        self._closing = False

    @property
    def full(self) -> bool:
        """Whether a new conversation must be refused."""
        return self._closing or len(self._running) >= MAX_SESSIONS

    def begin(self, transport: BaseTransport, arrived: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
        """Starts a conversation over `transport`; the returned task ends with it. arrived: whether the peer has
        connected; if it has not after CONNECT_S, the conversation is ended."""
        task = asyncio.create_task(self._hold(transport, arrived))
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and task.exception() is not None:
            logger.opt(exception=task.exception()).error("a conversation failed")

    async def close(self) -> None:
        """Ends every conversation and refuses new ones."""
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
        # In a thread, as it may load models, which must not delay the audio of other conversations.
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
                raise ValueError("it has no audio section with a DTLS fingerprint")
            connection = SmallWebRTCConnection()
            await connection.initialize(asked["sdp"], asked["type"])
        except Exception as error:  # not a valid offer: aiortc raises various exceptions for malformed input
            words = f"{type(error).__name__}: {error}".strip(": ")[:_MOST_REASON_CHARS]
            raise HTTPException(400, f"expected type and sdp of an offer that can be answered: {words}") from None
        transport = SmallWebRTCTransport(webrtc_connection=connection, params=TransportParams(**_SOUND))
        task = sessions.begin(transport, connection.is_connected)
        task.add_done_callback(lambda _: asyncio.ensure_future(connection.disconnect()))
        return connection.get_answer()


class PageObserver(BaseObserver):
    """Sends captions, states and errors to the page, and handles its messages. conversation: set after it is built and
    before it runs. output: the output of its transport; text that leaves it has begun to play."""

    def __init__(self, output: FrameProcessor) -> None:
        super().__init__()
        self.conversation: Conversation | None = None
        self._output = output
        self._sides = {"user": "silent", "bot": "silent"}
        self._turn = 0
        self._heard: list[TextPartForConcatenation] = []
        self._written = ""
        self._greeted = False
        self._answering = asyncio.Lock()  # answers typed messages in order
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
            if not self._written and self._sides["bot"] == "thinking":  # an empty reply: nothing will be spoken
                await self._change({"bot": "silent"})
        elif isinstance(frame, (frames.BotStoppedSpeakingFrame, frames.InterruptionFrame)):
            await self._caption(final=True, interrupted=isinstance(frame, frames.InterruptionFrame))

    async def _take(self, message: Any) -> None:
        """Handles a message from the page: greets on the first "hello", and answers typed text."""
        if not isinstance(message, dict):
            return
        text = message.get("text")
        if message.get("type") == "hello" and not self._greeted:
            self._greeted = True
            await self.conversation.greet()
        elif message.get("type") == "text" and isinstance(text, str) and (text := text.strip()[:_MOST_TYPED_CHARS]):
            task = asyncio.create_task(self._answer(text))  # does not block the pipeline's frames
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
    """Converts between frames and the page's WebSocket messages. While the page is muted, its audio becomes silence."""

    def __init__(self) -> None:
        super().__init__()
        self._muted = False

    async def serialize(self, frame: frames.Frame) -> str | bytes | None:
        """PCM or JSON; None for frames that are not sent to the page."""
        if isinstance(frame, frames.OutputAudioRawFrame):
            return frame.audio
        if isinstance(frame, frames.InterruptionFrame):
            return json.dumps({"type": "clear"})  # the page must drop the audio that it has queued
        if isinstance(frame, (frames.OutputTransportMessageFrame, frames.OutputTransportMessageUrgentFrame)):
            return None if self.should_ignore_frame(frame) else json.dumps(frame.message)
        return None

    async def deserialize(self, data: str | bytes) -> frames.Frame | None:
        """The frame for a message from the page; None if that is neither PCM nor a JSON object."""
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
