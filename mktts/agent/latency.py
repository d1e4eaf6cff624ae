"""A Pipecat observer that measures the latencies of a conversation, turn by turn."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipecat.frames import frames
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.aggregators.llm_response_universal import AssistantTurnStoppedMessage
from pipecat.processors.frame_processor import FrameDirection

from mktts.pipecat import MkttsTTSService


@dataclass
class TurnLatency:
    """A turn of the user and the bot's answer; None marks what has not happened.

    user: the transcript. reply: the language model's text. heard: the part of the reply that was spoken, as in the
        context. interrupted: whether the user interrupted the reply.
    transcript_ms, first_token_ms, first_audio_ms, speaking_ms: from the end of the user's speech, as detected, to the
        transcript, the language model's first token, the first audio frame, and that frame's arrival at the output.
    silence_ms: of a turn that interrupted the bot, from the onset of the user's speech to silence at the output."""

    turn: int
    user: str = ""
    reply: str = ""
    heard: str | None = None
    interrupted: bool = False
    transcript_ms: float | None = None
    first_token_ms: float | None = None
    first_audio_ms: float | None = None
    speaking_ms: float | None = None
    silence_ms: float | None = None


TIMES = ("transcript_ms", "first_token_ms", "first_audio_ms", "speaking_ms", "silence_ms")


class LatencyObserver(BaseObserver):
    """Collects a `TurnLatency` for every turn that the bot answers, excluding the network after the transport's output.

    turns: those that the bot has begun to answer. speaking: whether the bot is speaking. begun: how often it has begun
    to speak. error: the text of the latest error.
    stale_frames: audio frames that left the TTS service after the interruption of their utterance.
    on_turn: awaited when the bot begins to answer."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[TurnLatency] = []
        self.speaking = False
        self.begun = 0
        self.stale_frames = 0
        self.error: str | None = None
        self.on_turn: Callable[[TurnLatency], Awaitable[None]] | None = None
        self._turn: TurnLatency | None = None  # the latest; added to `turns` once the bot begins to answer it
        self._answering = False  # whether the language model has begun to answer what the user has said so far
        # Times in s of `time.time`, like Pipecat's: the onset of interrupting speech, None once the bot is silent; the
        # end of the turn's speech; when each of TIMES happened.
        self._onset_s: float | None = None
        self._end_s: float | None = None
        self._at_s: dict[str, float] = {}
        self._spoken: set[str | None] = set()  # audio contexts since the last interruption
        self._cut: set[str | None] = set()

    async def note_heard(self, assistant: object, message: AssistantTurnStoppedMessage) -> None:
        """Stores the message added to the assistant's context with its turn; the greeting belongs to none."""
        turn = next((turn for turn in self.turns if turn.heard is None), None)
        if turn is not None:
            turn.heard, turn.interrupted = message.content, message.interrupted

    async def on_push_frame(self, data: FramePushed) -> None:
        frame, now_s = data.frame, time.time()
        downstream = data.direction == FrameDirection.DOWNSTREAM
        if downstream and isinstance(data.source, MkttsTTSService):
            self._count_stale(frame)
        if not data.first_push:
            return
        if isinstance(frame, frames.ErrorFrame):
            self.error = frame.error
        elif not downstream:
            return
        elif isinstance(frame, frames.VADUserStartedSpeakingFrame):
            self._begin(frame.timestamp - frame.start_secs)
        elif isinstance(frame, frames.BotStartedSpeakingFrame):
            self.speaking = True
            self.begun += 1
            await self._answer(now_s)
        elif isinstance(frame, frames.BotStoppedSpeakingFrame):
            self.speaking = False
            if self._onset_s is not None:
                self._turn.silence_ms = round(1_000 * (now_s - self._onset_s), 1)
                self._onset_s = None
        elif self._turn is not None:
            self._note(frame, now_s)

    def _count_stale(self, frame: frames.Frame) -> None:
        """Counts audio frames that leave the TTS service after the interruption of their utterance."""
        if isinstance(frame, frames.InterruptionFrame):
            self._cut |= self._spoken
            self._spoken.clear()
        elif isinstance(frame, frames.TTSAudioRawFrame):
            self._spoken.add(frame.context_id)
            self.stale_frames += frame.context_id in self._cut

    def _begin(self, onset_s: float) -> None:
        """Begins a turn; speech before the bot has begun to answer continues the last turn instead."""
        self._answering = False
        if self._turn is None or "speaking_ms" in self._at_s:
            self._turn = TurnLatency(len(self.turns) + 1)
            self._onset_s, self._end_s = onset_s if self.speaking else None, None
            self._at_s = {}

    def _note(self, frame: frames.Frame, now_s: float) -> None:
        """Records a frame between the user's speech and the bot's answer."""
        turn, at_s = self._turn, self._at_s
        if isinstance(frame, frames.LLMTextFrame) and self._answering:
            turn.reply += frame.text
            at_s.setdefault("first_token_ms", now_s)
        elif "speaking_ms" in at_s:
            return
        elif isinstance(frame, frames.VADUserStoppedSpeakingFrame):
            self._end_s = frame.timestamp - frame.stop_secs
        elif isinstance(frame, frames.TranscriptionFrame):
            turn.user = f"{turn.user} {frame.text}".strip()
            at_s["transcript_ms"] = now_s
        elif isinstance(frame, frames.LLMFullResponseStartFrame):
            self._answering, turn.reply = True, ""
            for name in ("first_token_ms", "first_audio_ms"):
                at_s.pop(name, None)
        elif isinstance(frame, frames.TTSAudioRawFrame) and "first_token_ms" in at_s:
            at_s.setdefault("first_audio_ms", now_s)

    async def _answer(self, now_s: float) -> None:
        """Completes the turn's latencies when the bot begins to speak, unless this is not its answer."""
        if "first_audio_ms" not in self._at_s or "speaking_ms" in self._at_s:
            return
        self._at_s["speaking_ms"] = now_s
        if self._end_s is not None:
            for name, at_s in self._at_s.items():
                setattr(self._turn, name, round(1_000 * (at_s - self._end_s), 1))
        self.turns.append(self._turn)
        if self.on_turn is not None:
            await self.on_turn(self._turn)
