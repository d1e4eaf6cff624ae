"""Scripted conversations: recorded user speech is fed to the agent in real time; the result is latencies and audio.

The transport is in memory: its input plays the recordings, and its output records the bot. Both run in real time, like
a sound card, because Pipecat's metrics, and the words it considers heard, depend on the clock. With random weights the
bot's audio is noise of the length that speech would have; the conversation still works, as the user's recordings are
real speech and the bot's text is known."""

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
_LOOK_S = 0.005  # polling interval
_PIECE_S = 0.02  # duration of a microphone frame
_LEAD_S = 0.04  # audio buffered in the loudspeaker
_NOISE = 8  # peak of the background noise, in 16-bit sample values


@dataclass(frozen=True)
class UserTurn:
    """text: one of `user_speech.TEXTS`, which the user says. after_s: into the bot's reply; None waits for its end."""

    text: str
    after_s: float | None = None


@dataclass(frozen=True)
class Talk:
    """The result of a scripted conversation.

    random_weights: whether the bot's audio is noise, of the length that speech would have.
    turns: one for each turn of the script. messages: the conversation's context, {"role", "content"} each.
    stale_frames: audio frames of an interrupted reply that left the TTS service after the interruption.
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
    """Holds the conversation in real time on the running event loop. Raises AgentError if the bot does not answer or a
    package for speech to text is missing."""
    speech = [user_speech.load(turn.text) for turn in script]  # fails at once for an unknown text
    transport = LoopbackTransport()
    conversation = await asyncio.to_thread(build, transport, settings, observers=observers)  # loads models
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
            raise AgentError(f"waited {limit_s:g} s for {what}, in vain") from None

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
    """An in-memory transport whose user is a script."""

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
        """User and bot audio on one clock: float32 (2, S), 24 kHz, from the microphone's first sample on."""
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
    """A simulated microphone: faint background noise, plus the speech passed to `say`.

    heard: all frames so far, int16 at USER_RATE_HZ, from `begin_s` on, a time of `time.time`."""

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
        """Plays `pcm` (S,), int16 at 16 kHz, into the microphone; returns when its last sample was pushed."""
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
            await asyncio.sleep(max(0.0, at_s + _PIECE_S - time.time()))  # a frame is available when it ends
            self.heard.append(piece)
            await self.push_audio_frame(InputAudioRawFrame(piece.tobytes(), USER_RATE_HZ, 1))
            if len(spoken) and not len(self._waiting):
                self._said.set()
            at_s += _PIECE_S


class RecordingOutput(BaseOutputTransport):
    """Takes audio at playback speed and records it. played: pairs of the start time in s of `time.time` and the
    samples, int16 at SAMPLE_RATE_HZ."""

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
