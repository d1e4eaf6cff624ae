"""What a page receives beside the audio: captions, who is speaking, latencies. The same over WebSocket and WebRTC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    ErrorFrame,
    InterimTranscriptionFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSTextFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.utils.string import TextPartForConcatenation, concatenate_aggregated_text

from mktts.agent.latency import TIMES, TurnLatency

Send = Callable[[dict[str, Any]], Awaitable[None]]


class PageMessages(BaseObserver):
    """Turns frames into the page's messages, each a JSON object with a "type":

    caption: who ("user" or "bot"), text, final; of the bot also turn, and interrupted with what was left unheard.
        The bot's text is what has been heard so far, not what has been written.
    state: user ("speaking", "silent"), bot ("thinking", "speaking", "silent").
    latency: turn and the times of `TurnLatency`. error: message, fatal.
    """

    def __init__(self, send: Send, output: FrameProcessor, **kwargs: Any) -> None:
        """Initialize the observer.

        Args:
            send: Takes each message to the page.
            output: The transport's output: words that leave it are being heard.
            **kwargs: Additional arguments passed to parent class.
        """
        super().__init__(**kwargs)
        self._send = send
        self._output = output
        self._user = self._bot = "silent"
        self._state_sent: tuple[str, str] | None = None
        self._turn = 0
        self._heard: list[TextPartForConcatenation] = []
        self._written = ""

    async def send_typed(self, text: str) -> None:
        """Show what the user has typed, where the bot has taken it.

        Args:
            text: The text.
        """
        await self._send({"type": "caption", "who": "user", "text": text, "final": True})

    async def send_latency(self, turn: TurnLatency) -> None:
        """Send a turn's latencies.

        Args:
            turn: The turn.
        """
        await self._send({"type": "latency", "turn": turn.turn, **{name: getattr(turn, name) for name in TIMES}})

    async def on_push_frame(self, data: FramePushed) -> None:
        """Tell the page about a frame.

        Args:
            data: The frame, where it came from and where it goes.
        """
        frame = data.frame
        if isinstance(frame, TTSTextFrame):
            if data.source is self._output and data.direction == FrameDirection.DOWNSTREAM:
                self._heard.append(
                    TextPartForConcatenation(frame.text, includes_inter_part_spaces=frame.includes_inter_frame_spaces)
                )
                await self._caption(final=False)
        elif not data.first_push:
            return
        elif isinstance(frame, ErrorFrame):
            whose = "" if frame.processor is None else f"{frame.processor.name}: "
            permanent = getattr(frame, "permanent", frame.fatal)
            await self._send({"type": "error", "message": f"{whose}{frame.error}", "fatal": permanent})
        elif data.direction == FrameDirection.DOWNSTREAM:
            await self._tell(frame)

    async def _tell(self, frame: Any) -> None:
        if isinstance(frame, (TranscriptionFrame, InterimTranscriptionFrame)):
            final = isinstance(frame, TranscriptionFrame)
            await self._send({"type": "caption", "who": "user", "text": frame.text, "final": final})
        elif isinstance(frame, VADUserStartedSpeakingFrame):
            await self._state(user="speaking")
        elif isinstance(frame, VADUserStoppedSpeakingFrame):
            await self._state(user="silent")
        elif isinstance(frame, LLMFullResponseStartFrame):
            self._written = ""
            await self._state(bot="thinking")
        elif isinstance(frame, LLMTextFrame):
            self._written += frame.text
        elif isinstance(frame, LLMFullResponseEndFrame):
            if not self._written and self._bot == "thinking":  # nothing will be spoken
                await self._state(bot="silent")
        elif isinstance(frame, BotStartedSpeakingFrame):
            await self._state(bot="speaking")
        elif isinstance(frame, BotStoppedSpeakingFrame):
            await self._state(bot="silent")
            await self._caption(final=True)
        elif isinstance(frame, InterruptionFrame):
            await self._caption(final=True, interrupted=True)
            await self._state(bot="silent")

    async def _state(self, user: str | None = None, bot: str | None = None) -> None:
        self._user, self._bot = user or self._user, bot or self._bot
        if self._state_sent != (self._user, self._bot):
            self._state_sent = (self._user, self._bot)
            await self._send({"type": "state", "user": self._user, "bot": self._bot})

    async def _caption(self, *, final: bool, interrupted: bool = False) -> None:
        if not self._heard:
            return
        text = concatenate_aggregated_text(self._heard)
        caption = {"type": "caption", "who": "bot", "text": text, "final": final, "turn": self._turn}
        if interrupted:
            place = self._written.find(text)
            unheard = self._written[place + len(text) :].strip() if place >= 0 else ""
            caption |= {"interrupted": True, **({"unheard": unheard} if unheard else {})}
        await self._send(caption)
        if final:
            self._heard = []
            self._turn += 1
