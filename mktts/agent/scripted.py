"""A conversation without a person: recorded user speech in, in real time; latencies and a stereo file out.

With random weights what the bot plays is noise, as long as speech of its words would be. It is a conversation all
the same: the user's recordings are speech, and the bot's text is known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from pipecat.observers.base_observer import BaseObserver
from pipecat.observers.user_bot_latency_observer import MeasuredFrom

from mktts.agent import user_speech
from mktts.agent.conversation import Conversation, build, load_voice
from mktts.agent.latency import TurnLatency, table
from mktts.agent.llm import load_llm
from mktts.agent.loopback import LoopbackTransport
from mktts.agent.settings import AgentSettings
from mktts.agent.stt import load_stt
from mktts.errors import AgentError, BackendUnavailable
from mktts.measure.recogniser import Recogniser, vocabulary_of
from mktts.measure.tracks import between
from mktts.measure.word_errors import errors_by_sound, words

RANDOM_NOTE = "random weights: the bot's voice is noise, as long as speech of its words would be"

_PAUSE_S = 0.3  # before the user speaks
_START_LIMIT_S = 60.0
_REPLY_LIMIT_S = 30.0  # until the bot begins to answer
_SPEAKING_LIMIT_S = 120.0


@dataclass(frozen=True)
class UserTurn:
    """text: one of `user_speech.TEXTS`. after_s: into the bot's speech; None waits for its end."""

    text: str
    after_s: float | None = None


SCRIPT = (
    UserTurn("hello"),
    UserTurn("what time is it"),
    UserTurn("tell me a story"),
    UserTurn("stop please", after_s=2.5),
    UserTurn("go on"),
    UserTurn("stop please", after_s=4.0),
    UserTurn("thank you"),
)


@dataclass(frozen=True)
class RecognisedReply:
    """One reply of the bot. said: its text, or of an interrupted one what the context took for heard; heard: by the
    recogniser.

    errors: substitutions, insertions and deletions, words that sound alike being one. words: said.
    """

    turn: int
    said: str
    heard: str
    errors: int
    words: int
    interrupted: bool


@dataclass(frozen=True)
class Talk:
    """What came of it.

    who: speech to text, language model and voice, one line each. random_weights: the bot's voice is noise.
    turns: one for each of the script's. messages: the conversation's context, {"role", "content"} each.
    parts_ms: Pipecat's own split of each wait for the bot, in the same order.
    ttfb_ms: of the voice, as its service reports it to Pipecat, of each turn.
    stale_frames: audio of an interrupted reply that left the voice after the interruption.
    heard_back: what a recogniser hears of each reply; empty without one, and with random weights, whose noise has no
        words.
    user, bot: what each side said, float32 (S,), 24 kHz, on one clock. wav: both; None where none was asked for.
    """

    who: tuple[str, ...]
    random_weights: bool
    turns: tuple[TurnLatency, ...]
    messages: tuple[dict[str, Any], ...]
    parts_ms: tuple[dict[str, float], ...]
    ttfb_ms: tuple[float, ...]
    stale_frames: int
    heard_back: tuple[RecognisedReply, ...]
    user: np.ndarray
    bot: np.ndarray
    wav: Path | None

    @property
    def word_error_rate(self) -> float | None:
        """Of `heard_back`, of the replies that were said to their end; None where there is none.

        Where an interrupted reply was cut is known only as exactly as the times of its words.
        """
        whole = [reply for reply in self.heard_back if not reply.interrupted]
        said = sum(reply.words for reply in whole)
        return sum(reply.errors for reply in whole) / said if said else None

    def document(self) -> dict[str, Any]:
        """Everything but the audio, as JSON has it."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("user", "bot")}
        found |= {name: [asdict(each) for each in getattr(self, name)] for name in ("turns", "heard_back")}
        return json.loads(json.dumps(found | {"word_error_rate": self.word_error_rate}, default=str))

    def lines(self) -> list[str]:
        """What was said, the latencies, and what was heard back, for a person."""
        said = [f"{message['role']:>9}: {message['content']}" for message in self.messages]
        heard = [
            f"{reply.turn:>9}: heard back, {reply.errors} of {reply.words} words wrong: {reply.heard}"
            for reply in self.heard_back
        ]
        rate = self.word_error_rate
        return [
            *said,
            table(self.turns),
            *heard,
            *([] if rate is None else [f"word error rate of the bot's whole replies: {rate:.3f}"]),
        ]


async def converse(
    settings: AgentSettings,
    script: Sequence[UserTurn] = SCRIPT,
    *,
    wav: Path | str | None = None,
    say: Callable[[str], None] = print,
    observers: Sequence[BaseObserver] = (),
) -> Talk:
    """Holds the conversation, in real time, in the running event loop.

    `say` gets the lines for a person. Raises AgentError where the bot does not answer, or a package that it hears with
    is missing.
    """
    speech = [user_speech.load(turn.text) for turn in script]  # an unknown text shows at once
    await asyncio.to_thread(load_stt, settings)
    await asyncio.to_thread(load_llm, settings)
    checkpoint = (await asyncio.to_thread(load_voice, settings)).checkpoint
    random_weights = checkpoint is not None and checkpoint.is_random
    for line in [*settings.describe(), *([RANDOM_NOTE] if random_weights else [])]:
        say(line)
    transport = LoopbackTransport()
    conversation = build(transport, settings, observers=observers)
    running = asyncio.create_task(conversation.run())
    try:
        await _talk(conversation, transport, script, speech)
        await conversation.end()
    except BaseException:
        await conversation.worker.cancel()
        raise
    finally:
        await running
    user, bot = transport.tracks()
    answers = [each for each in conversation.breakdowns if each.measured_from == MeasuredFrom.USER_SILENCE]
    turns = tuple(conversation.latency.turns)
    talk = Talk(
        who=tuple(settings.describe()),
        random_weights=random_weights,
        turns=turns,
        messages=tuple(dict(message) for message in conversation.context.get_messages()),
        parts_ms=tuple(
            {part.key: round(part.duration_secs * 1_000, 1) for part in answer.contributions} for answer in answers
        ),
        ttfb_ms=tuple(
            round(measured.duration_secs * 1_000, 1)
            for answer in answers
            for measured in answer.ttfb
            if measured.processor == conversation.tts.name
        ),
        stale_frames=conversation.latency.stale_frames,
        heard_back=() if random_weights else await asyncio.to_thread(_hear_back, turns, user, bot, say),
        user=user,
        bot=bot,
        wav=transport.write_stereo(wav) if wav is not None else None,
    )
    for line in talk.lines():
        say(line)
    return talk


def hear_back(turns: Sequence[TurnLatency], user: np.ndarray, bot: np.ndarray) -> tuple[RecognisedReply, ...]:
    """What a recogniser hears of each reply of a recorded conversation, `user` and `bot` (S,) float32 at 24 kHz.

    The recogniser is pocketsphinx; it knows which words were said, not their order. Raises AgentError where the
    recording does not have as many user turns as `turns`, BackendUnavailable without pocketsphinx.
    """
    replies = between(user, bot)
    if len(replies) != len(turns):
        raise AgentError(f"expected {len(turns)} turns of the user in the recording, found {len(replies)}")
    texts = [turn.heard or turn.reply for turn in turns]
    recogniser = Recogniser(vocabulary_of(texts))
    found = []
    for turn, said, pcm in zip(turns, texts, replies, strict=True):
        heard = recogniser.hear(pcm)
        errors = errors_by_sound(said, heard, recogniser.sound)
        found.append(RecognisedReply(turn.turn, said, heard, errors, len(words(said)), turn.interrupted))
    return tuple(found)


def _hear_back(
    turns: Sequence[TurnLatency], user: np.ndarray, bot: np.ndarray, say: Callable[[str], None]
) -> tuple[RecognisedReply, ...]:
    try:
        return hear_back(turns, user, bot)
    except BackendUnavailable as error:
        say(f"the replies are not heard back: {error}")
        return ()


async def _talk(
    conversation: Conversation, transport: LoopbackTransport, script: Sequence[UserTurn], speech: Sequence[np.ndarray]
) -> None:
    bot = conversation.latency
    await bot.until(lambda: bot.started, _START_LIMIT_S, "the pipeline to start")
    if conversation.settings.greeting:
        await conversation.greet()
        await bot.until(lambda: bot.begun and not bot.speaking, _SPEAKING_LIMIT_S, "the greeting")
    for turn, pcm in zip(script, speech, strict=True):
        if turn.after_s is None:
            await bot.until(lambda: not bot.speaking, _SPEAKING_LIMIT_S, "the bot to be silent")
            await asyncio.sleep(_PAUSE_S)
        else:
            await asyncio.sleep(turn.after_s)
        begun = bot.begun
        await transport.microphone.say(pcm)
        await bot.until(lambda begun=begun: bot.begun > begun, _REPLY_LIMIT_S, f"an answer to {turn.text!r}")
    await bot.until(lambda: not bot.speaking, _SPEAKING_LIMIT_S, "the bot to be silent")
