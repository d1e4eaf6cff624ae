"""A conversation without a person: recorded user speech in, in real time; latencies and both sides' sound out.

The transport is in memory: a microphone that plays what it is given, and a loudspeaker that keeps what it was given.
Both run in real time, like a sound card: what Pipecat measures and the words it takes for heard depend on the clock.
With random weights what the bot plays is noise, as long as speech of its words would be. It is a conversation all the
same: the user's recordings are speech, and the bot's text is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pipecat.frames.frames import InputAudioRawFrame, OutputAudioRawFrame, StartFrame
from pipecat.observers.base_observer import BaseObserver
from pipecat.transports.base_input import BaseInputTransport
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import BaseTransport, TransportParams

from mktts.agent import user_speech
from mktts.agent.conversation import Conversation, build, load_voice
from mktts.agent.latency import TurnLatency
from mktts.agent.settings import AgentSettings
from mktts.agent.user_speech import USER_RATE_HZ
from mktts.audio import from_pcm16, resample
from mktts.engine.metrics import Player
from mktts.errors import AgentError
from mktts.spec import SAMPLE_RATE_HZ

_PAUSE_S = 0.3  # before the user speaks
_START_LIMIT_S = 60.0
_REPLY_LIMIT_S = 30.0  # until the bot begins to answer
_SPEAKING_LIMIT_S = 120.0
_LOOK_S = 0.005  # between looks at the bot
_PIECE_S = 0.02  # what a microphone hands over at a time
_LEAD_S = 0.04  # of audio in the loudspeaker's buffer
_NOISE = 8  # of a quiet room, in steps of 16-bit samples


@dataclass(frozen=True)
class UserTurn:
    """text: one of `user_speech.TEXTS`. after_s: into the bot's speech; None waits for its end."""

    text: str
    after_s: float | None = None


@dataclass(frozen=True)
class Talk:
    """What came of it.

    random_weights: the bot's voice is noise, as long as speech of its words would be.
    turns: one for each of the script's. messages: the conversation's context, {"role", "content"} each.
    stale_frames: audio of an interrupted reply that left the voice after the interruption.
    user, bot: what each side said, float32 (S,), 24 kHz, on one clock."""

    random_weights: bool
    turns: tuple[TurnLatency, ...]
    messages: tuple[dict[str, Any], ...]
    stale_frames: int
    user: np.ndarray
    bot: np.ndarray


async def converse(
    settings: AgentSettings, script: Sequence[UserTurn], *, observers: Sequence[BaseObserver] = ()
) -> Talk:
    """Holds the conversation, in real time, in the running event loop. Raises AgentError where the bot does not answer,
    or a package that it hears with is missing."""
    speech = [user_speech.load(turn.text) for turn in script]  # an unknown text shows at once
    transport = LoopbackTransport()
    conversation = await asyncio.to_thread(build, transport, settings, observers=observers)  # it loads models
    running = asyncio.create_task(conversation.run())
    try:
        await _talk(conversation, transport, script, speech)
        await conversation.worker.stop_when_done()
    except BaseException as error:
        await conversation.worker.cancel()
        if isinstance(error, AgentError):
            raise AgentError("; ".join([str(error), *settings.describe()])) from None
        raise
    finally:
        await running
    user, bot = transport.tracks()
    return Talk(
        random_weights=load_voice(settings).checkpoint.is_random,
        turns=tuple(conversation.latency.turns),
        messages=tuple(dict(message) for message in conversation.context.get_messages()),
        stale_frames=conversation.latency.stale_frames,
        user=user,
        bot=bot,
    )


async def _talk(
    conversation: Conversation, transport: LoopbackTransport, script: Sequence[UserTurn], speech: Sequence[np.ndarray]
) -> None:
    bot, microphone = conversation.latency, transport.microphone

    async def until(condition: Callable[[], Any], limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    if bot.error is not None:
                        raise AgentError(f"while waiting for {what}: {bot.error}")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise AgentError(f"waited {limit_s:g} s for {what}: it did not come") from None

    await until(lambda: microphone.heard, _START_LIMIT_S, "the pipeline to start")
    if conversation.settings.greeting:
        await conversation.greet()
        await until(lambda: bot.begun and not bot.speaking, _SPEAKING_LIMIT_S, "the greeting")
    for turn, pcm in zip(script, speech, strict=True):
        if turn.after_s is None:
            await until(lambda: not bot.speaking, _SPEAKING_LIMIT_S, "the bot to be silent")
            await asyncio.sleep(_PAUSE_S)
        else:
            await asyncio.sleep(turn.after_s)
        begun = bot.begun
        await microphone.say(pcm)
        await until(lambda begun=begun: bot.begun > begun, _REPLY_LIMIT_S, f"an answer to {turn.text!r}")
    await until(lambda: not bot.speaking, _SPEAKING_LIMIT_S, "the bot to be silent")


class LoopbackTransport(BaseTransport):
    """The user side of a conversation without a user."""

    def __init__(self) -> None:
        super().__init__()
        params = TransportParams(audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0)
        self.microphone = Microphone(params)
        self.loudspeaker = RecordingOutput(params)

    def input(self) -> Microphone:
        return self.microphone

    def output(self) -> RecordingOutput:
        return self.loudspeaker

    def tracks(self) -> np.ndarray:
        """What the user said and what was played: float32 (2, S), 24 kHz, from the microphone's first sample on."""
        heard = np.concatenate([np.zeros(0, "<i2"), *self.microphone.heard])
        user = resample(from_pcm16(heard), USER_RATE_HZ, SAMPLE_RATE_HZ)
        begin_s, played = self.microphone.begin_s, self.loudspeaker.played
        pieces = [(round((at_s - begin_s) * SAMPLE_RATE_HZ), pcm) for at_s, pcm in played]
        tracks = np.zeros((2, max([len(user), *(at + len(pcm) for at, pcm in pieces)])), np.float32)
        tracks[0, : len(user)] = user
        for at, pcm in pieces:
            tracks[1, at : at + len(pcm)] = from_pcm16(pcm)
        return tracks


class Microphone(BaseInputTransport):
    """Hands over a quiet room's noise, and what is said into it.

    heard: all of it, int16 at USER_RATE_HZ, from `begin_s` on, as `time.time`."""

    def __init__(self, params: TransportParams) -> None:
        super().__init__(params)
        self.heard: list[np.ndarray] = []
        self.begin_s = 0.0
        self._waiting = np.zeros(0, "<i2")
        self._said = asyncio.Event()
        self._capturing: asyncio.Task | None = None

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)
        self._capturing = self.create_task(self._capture())

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._capturing is not None:
            await self.cancel_task(self._capturing)
            self._capturing = None

    async def say(self, pcm: np.ndarray) -> None:
        """Says `pcm` (S,) int16 at 16 kHz; returns when its last sample has been handed over."""
        self._said.clear()
        self._waiting = pcm
        await self._said.wait()

    async def _capture(self) -> None:
        samples = round(_PIECE_S * USER_RATE_HZ)
        noise = np.random.default_rng(0)
        at_s = self.begin_s = time.time()
        while True:
            piece = noise.integers(-_NOISE, _NOISE + 1, samples).astype("<i2")
            spoken, self._waiting = self._waiting[:samples], self._waiting[samples:]
            piece[: len(spoken)] += spoken
            await asyncio.sleep(max(0.0, at_s + _PIECE_S - time.time()))  # a piece exists once it has been captured
            self.heard.append(piece)
            await self.push_audio_frame(InputAudioRawFrame(piece.tobytes(), USER_RATE_HZ, 1))
            if len(spoken) and not len(self._waiting):
                self._said.set()
            at_s += _PIECE_S


class RecordingOutput(BaseOutputTransport):
    """Takes audio as fast as it is heard, and keeps it. played: all of it, int16 at SAMPLE_RATE_HZ, after the time of
    its first sample in s as `time.time`."""

    def __init__(self, params: TransportParams) -> None:
        super().__init__(params)
        self.played: list[tuple[float, np.ndarray]] = []
        self._player = Player()

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        pcm = np.frombuffer(frame.audio, "<i2")
        begin_s, _ = self._player.play(time.time(), len(pcm) / frame.sample_rate)
        self.played.append((begin_s, pcm))
        await asyncio.sleep(max(0.0, self._player.lead_s(time.time()) - _LEAD_S))
        return True
