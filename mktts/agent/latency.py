"""How long the user waits, and what they hear: what Pipecat's frames say about each turn."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    Frame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.aggregators.llm_response_universal import AssistantTurnStoppedMessage
from pipecat.processors.frame_processor import FrameDirection


@dataclass(frozen=True)
class TurnLatency:
    """One turn of the user and its answer. None for what did not happen, or has not yet.

    user: the transcript. reply: what the language model has written. heard: what of it the context received, which is
    what was heard; interrupted: whether that is because the user spoke.
    transcript_ms, first_token_ms, first_audio_ms, speaking_ms: from the end of the user's speech, as the voice
        detection dates it, to the transcript, the language model's first token, the first audio frame of the voice,
        and that frame's arrival at the output.
    silence_ms: of a turn that interrupted the bot: from the onset of the user's speech to the output's silence.
    """

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
class _Turn:
    """Times in s as `time.time`, which Pipecat dates speech with."""

    number: int
    onset_s: float
    interrupts: bool
    words: list[str] = field(default_factory=list)
    reply: list[str] = field(default_factory=list)
    heard: str | None = None
    interrupted: bool = False
    asked: bool = False  # the language model has begun to answer what the user has said so far
    end_s: float | None = None
    transcript_s: float | None = None
    first_token_s: float | None = None
    first_audio_s: float | None = None
    speaking_s: float | None = None
    silence_s: float | None = None

    def take(self, frame: Frame, now_s: float) -> None:
        """A frame on the way from the user's speech to the bot's."""
        if isinstance(frame, LLMTextFrame) and self.asked:
            self.reply.append(frame.text)
            self.first_token_s = self.first_token_s or now_s
        elif self.speaking_s is not None:
            return
        elif isinstance(frame, VADUserStoppedSpeakingFrame):
            self.end_s = frame.timestamp - frame.stop_secs
        elif isinstance(frame, TranscriptionFrame):
            self.words.append(frame.text)
            self.transcript_s = now_s
        elif isinstance(frame, LLMFullResponseStartFrame):
            self.asked, self.reply, self.first_token_s, self.first_audio_s = True, [], None, None
        elif isinstance(frame, TTSAudioRawFrame) and self.first_token_s is not None:
            self.first_audio_s = self.first_audio_s or now_s

    def latency(self) -> TurnLatency:
        begin_s = {"silence_ms": self.onset_s}
        ends_s = {name: getattr(self, name.removesuffix("_ms") + "_s") for name in TIMES}
        times = {
            name: round((at_s - begin_s.get(name, self.end_s)) * 1_000, 1)
            for name, at_s in ends_s.items()
            if at_s is not None and begin_s.get(name, self.end_s) is not None
        }
        reply = "".join(self.reply)
        return TurnLatency(self.number, " ".join(self.words), reply, self.heard, self.interrupted, **times)


class LatencyObserver(BaseObserver):
    """Collects a `TurnLatency` for every turn of the user that the bot answers.

    As Pipecat's `UserBotLatencyObserver`, but with all four times of a turn and the time to silence. The way from the
    output to the user's ear is not included.
    """

    def __init__(self, **kwargs: object) -> None:
        """Initialize the observer.

        Args:
            **kwargs: Additional arguments passed to parent class.
        """
        super().__init__(observe_every_push=False, **kwargs)
        self.on_turn: Callable[[TurnLatency], Awaitable[None]] | None = None  # awaited as the bot begins to answer
        self._answered: list[_Turn] = []
        self._turn: _Turn | None = None
        self._bot_speaking = False

    @property
    def turns(self) -> list[TurnLatency]:
        """Of the turns that the bot has begun to answer, as known by now."""
        return [turn.latency() for turn in self._answered]

    def note_heard(self, message: AssistantTurnStoppedMessage) -> None:
        """Take note of what the context received.

        Args:
            message: Of the assistant's aggregator; the greeting's is no answer to a turn.
        """
        turn = next((turn for turn in self._answered if turn.heard is None), None)
        if turn is not None:
            turn.heard, turn.interrupted = message.content, message.interrupted

    async def on_push_frame(self, data: FramePushed) -> None:
        """Take note of a frame.

        Args:
            data: The frame, where it came from and where it goes.
        """
        frame, now_s = data.frame, time.time()
        if data.direction != FrameDirection.DOWNSTREAM:
            return
        if isinstance(frame, VADUserStartedSpeakingFrame):
            self._begin(frame.timestamp - frame.start_secs)
        elif isinstance(frame, BotStartedSpeakingFrame):
            self._bot_speaking = True
            await self._answer(now_s)
        elif isinstance(frame, BotStoppedSpeakingFrame):
            self._bot_speaking = False
            if self._turn is not None and self._turn.interrupts and self._turn.silence_s is None:
                self._turn.silence_s = now_s
        elif self._turn is not None:
            self._turn.take(frame, now_s)

    def _begin(self, onset_s: float) -> None:
        """The user speaks: a new turn, unless the bot has not yet begun to answer the last one."""
        if self._turn is None or self._turn.speaking_s is not None:
            self._turn = _Turn(len(self._answered) + 1, onset_s, self._bot_speaking)
        else:
            self._turn.asked = False

    async def _answer(self, now_s: float) -> None:
        turn = self._turn
        if turn is None or turn.first_audio_s is None or turn.speaking_s is not None:
            return
        turn.speaking_s = now_s
        self._answered.append(turn)
        if self.on_turn is not None:
            await self.on_turn(turn.latency())


def table(turns: Sequence[TurnLatency]) -> str:
    """The turns as text, times in ms."""
    rows = [["turn", *(name.removesuffix("_ms").replace("_", " ") for name in TIMES), "said"]]
    for turn in turns:
        times = [getattr(turn, name) for name in TIMES]
        rows.append([str(turn.turn), *("-" if value is None else f"{value:.0f}" for value in times), turn.user])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[-1]}" for row in rows
    )
