"""The latencies of a conversation, turn by turn: one observer of the pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pipecat.frames import frames
from pipecat.observers.base_observer import BaseObserver, FrameProcessed, FramePushed
from pipecat.processors.aggregators.llm_response_universal import AssistantTurnStoppedMessage
from pipecat.processors.frame_processor import FrameDirection

from mktts.errors import AgentError
from mktts.pipecat import MkttsTTSService


@dataclass(frozen=True)
class TurnLatency:
    """A turn of the user and its answer; None for what has not happened.

    user: the transcript. reply: the text of the language model. heard: the part of it that was spoken, as the context
        has it. interrupted: the user cut it off.
    transcript_ms, first_token_ms, first_audio_ms, speaking_ms: from the end of the user's speech, as detected, to the
        transcript, the language model's first token, the first audio frame, and that frame's arrival at the output.
    silence_ms: of a turn that interrupted the bot, from the onset of the user's speech to silence at the output."""

    turn: int
    user: str
    reply: str = ""
    heard: str | None = None
    interrupted: bool = False
    transcript_ms: float | None = None
    first_token_ms: float | None = None
    first_audio_ms: float | None = None
    speaking_ms: float | None = None
    silence_ms: float | None = None


TIMES = ("transcript_ms", "first_token_ms", "first_audio_ms", "speaking_ms", "silence_ms")


@dataclass
class _OpenTurn:
    """A turn in progress. at_s: when each of TIMES happened, in s as `time.time`, which Pipecat uses."""

    number: int
    onset_s: float
    interrupts: bool
    words: list[str] = field(default_factory=list)
    reply: list[str] = field(default_factory=list)
    heard: str | None = None
    interrupted: bool = False
    answering: bool = False  # the language model has begun to answer what the user has said so far
    end_s: float | None = None
    at_s: dict[str, float] = field(default_factory=dict)

    def take(self, frame: frames.Frame, now_s: float) -> None:
        """Notes a frame between the user's speech and the bot's."""
        if isinstance(frame, frames.LLMTextFrame) and self.answering:
            self.reply.append(frame.text)
            self.at_s.setdefault("first_token_ms", now_s)
        elif "speaking_ms" in self.at_s:
            return
        elif isinstance(frame, frames.VADUserStoppedSpeakingFrame):
            self.end_s = frame.timestamp - frame.stop_secs
        elif isinstance(frame, frames.TranscriptionFrame):
            self.words.append(frame.text)
            self.at_s["transcript_ms"] = now_s
        elif isinstance(frame, frames.LLMFullResponseStartFrame):
            self.answering, self.reply = True, []
            for name in ("first_token_ms", "first_audio_ms"):
                self.at_s.pop(name, None)
        elif isinstance(frame, frames.TTSAudioRawFrame) and "first_token_ms" in self.at_s:
            self.at_s.setdefault("first_audio_ms", now_s)

    def latency(self) -> TurnLatency:
        times = {}
        for name, at_s in self.at_s.items():
            begin_s = self.onset_s if name == "silence_ms" else self.end_s
            if begin_s is not None:
                times[name] = round((at_s - begin_s) * 1_000, 1)
        reply = "".join(self.reply)
        return TurnLatency(self.number, " ".join(self.words), reply, self.heard, self.interrupted, **times)


class LatencyObserver(BaseObserver):
    """Collects a `TurnLatency` for every turn that the bot answers; the transport behind the output is not included.

    started: the pipeline runs. speaking: the bot speaks. begun: how often it has begun to speak. error: the last one.
    stale_frames: audio frames that left the TTS service after the interruption of their utterance.
    on_turn: awaited when the bot begins to answer."""

    def __init__(self) -> None:
        super().__init__(observe_every_push=False)
        self.started = False
        self.speaking = False
        self.begun = 0
        self.stale_frames = 0
        self.error: str | None = None
        self.on_turn: Callable[[TurnLatency], Awaitable[None]] | None = None
        self._answered: list[_OpenTurn] = []
        self._turn: _OpenTurn | None = None
        self._spoken: set[str | None] = set()  # audio contexts since the last interruption
        self._cut: set[str | None] = set()
        self._at_tts: frames.InterruptionFrame | None = None
        self._changed = asyncio.Event()

    @property
    def turns(self) -> list[TurnLatency]:
        """The turns that the bot has begun to answer."""
        return [turn.latency() for turn in self._answered]

    async def until(self, condition: Callable[[], Any], limit_s: float, what: str) -> None:
        """Waits for `condition`. what: for the error. Raises AgentError after `limit_s`, or at a pipeline's error."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    if self.error is not None:
                        raise AgentError(f"while waiting for {what}: {self.error}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AgentError(f"waited {limit_s:g} s for {what}: it did not come") from None

    def note_heard(self, message: AssistantTurnStoppedMessage) -> None:
        """Notes the message that the context received; the greeting's belongs to no turn."""
        turn = next((turn for turn in self._answered if turn.heard is None), None)
        if turn is not None:
            turn.heard, turn.interrupted = message.content, message.interrupted

    async def on_pipeline_started(self) -> None:
        self.started = True
        self._changed.set()

    async def on_process_frame(self, data: FrameProcessed) -> None:
        """Finds when an interruption has passed the TTS service: audio that leaves it later is stale."""
        if not isinstance(data.frame, frames.InterruptionFrame) or data.direction != FrameDirection.DOWNSTREAM:
            return
        if isinstance(data.processor, MkttsTTSService):
            self._at_tts = data.frame
        elif data.frame is self._at_tts:  # the processor after the TTS service has it
            self._cut |= self._spoken
            self._spoken.clear()
            self._at_tts = None

    async def on_push_frame(self, data: FramePushed) -> None:
        frame, now_s = data.frame, time.time()
        if isinstance(frame, frames.ErrorFrame):
            self.error = frame.error
        elif data.direction != FrameDirection.DOWNSTREAM:
            return
        elif isinstance(frame, frames.VADUserStartedSpeakingFrame):
            self._begin(frame.timestamp - frame.start_secs)
        elif isinstance(frame, frames.BotStartedSpeakingFrame):
            self.speaking = True
            self.begun += 1
            await self._answer(now_s)
        elif isinstance(frame, frames.BotStoppedSpeakingFrame):
            self.speaking = False
            if self._turn is not None and self._turn.interrupts:
                self._turn.at_s.setdefault("silence_ms", now_s)
        else:
            if isinstance(frame, frames.TTSAudioRawFrame) and isinstance(data.source, MkttsTTSService):
                self._spoken.add(frame.context_id)
                self.stale_frames += frame.context_id in self._cut
            if self._turn is not None:
                self._turn.take(frame, now_s)
            return
        self._changed.set()

    def _begin(self, onset_s: float) -> None:
        """Begins a turn, unless the bot has not begun to answer the last one."""
        if self._turn is None or "speaking_ms" in self._turn.at_s:
            self._turn = _OpenTurn(len(self._answered) + 1, onset_s, self.speaking)
        else:
            self._turn.answering = False

    async def _answer(self, now_s: float) -> None:
        turn = self._turn
        if turn is None or "first_audio_ms" not in turn.at_s or "speaking_ms" in turn.at_s:
            return
        turn.at_s["speaking_ms"] = now_s
        self._answered.append(turn)
        if self.on_turn is not None:
            await self.on_turn(turn.latency())
