"""What the agent's page and its bot exchange. Over the WebSocket it is raw PCM both ways and JSON between.

Binary messages are mono 16-bit little-endian PCM, 16 kHz from the page and 24 kHz to it. Text messages are objects with
a "type"; from the page come "hello", after which the bot greets, "mute", and "text", what was typed, which the bot
answers as if it had been said. To the page, over WebSocket and WebRTC alike:

    ready    session
    caption  who ("user" or "bot"), text, final; of the bot also turn, and interrupted with what was left unheard. The
             bot's text is what has been heard so far, not what has been written.
    state    user ("speaking", "silent"), bot ("thinking", "speaking", "silent")
    latency  turn and the times of `TurnLatency`
    error    message, fatal
    clear    what is queued is not to be played"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import WebSocket
from pipecat.frames import frames
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.serializers.base_serializer import FrameSerializer
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams, FastAPIWebsocketTransport
from pipecat.utils.string import TextPartForConcatenation, concatenate_aggregated_text

from mktts.agent.conversation import Conversation
from mktts.agent.latency import TIMES, TurnLatency
from mktts.agent.user_speech import USER_RATE_HZ

MOST_TYPED_CHARS = 2_000
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
                self._heard.append(
                    TextPartForConcatenation(frame.text, includes_inter_part_spaces=frame.includes_inter_frame_spaces)
                )
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
        elif message.get("type") == "text" and isinstance(text, str) and (text := text.strip()[:MOST_TYPED_CHARS]):
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


def page_transport(websocket: WebSocket) -> FastAPIWebsocketTransport:
    """Pipecat's WebSocket transport with the page's messages; it sends audio at the listener's pace. websocket:
    accepted."""
    params = FastAPIWebsocketParams(
        audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0, serializer=PcmSerializer()
    )
    return FastAPIWebsocketTransport(websocket, params)
