"""What a recogniser hears of the bot, with recorded speech in the bot's place."""

from __future__ import annotations

import numpy as np
import pytest
from absent import needs

from mktts.agent import user_speech
from mktts.agent.hearing import hear_back, word_error_rate
from mktts.agent.latency import TurnLatency
from mktts.audio import from_pcm16
from mktts.errors import AgentError
from mktts.spec import SAMPLE_RATE_HZ

PAUSE_S = 0.6


def spoken(text: str) -> np.ndarray:
    """A recording at 24 kHz, float32."""
    pcm = from_pcm16(user_speech.load(text))
    times = np.arange(len(pcm) * SAMPLE_RATE_HZ // user_speech.USER_RATE_HZ) * user_speech.USER_RATE_HZ / SAMPLE_RATE_HZ
    return np.interp(times, np.arange(len(pcm)), pcm).astype(np.float32)


def conversation(*turns: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """(user, bot) tracks of the recordings named, one after another with pauses."""
    pause = np.zeros(round(PAUSE_S * SAMPLE_RATE_HZ), np.float32)
    user, bot = [], []
    for asked, answered in turns:
        first, second = spoken(asked), spoken(answered)
        user += [pause, first, pause, np.zeros_like(second)]
        bot += [pause, np.zeros_like(first), pause, second]
    return np.concatenate([*user, pause]), np.concatenate([*bot, pause])


def turn(number: int, reply: str, heard: str | None = None, interrupted: bool = False) -> TurnLatency:
    return TurnLatency(number, "hello", reply, heard, interrupted)


@needs("pocketsphinx")
def test_clear_speech_is_heard_word_for_word_and_other_words_are_errors():
    user, bot = conversation(
        ("hello", "what time is it"),
        ("go on", "how fast are you"),
        ("stop please", "what time is it"),
        ("thank you", "thank you"),
    )
    found = hear_back(
        [
            turn(1, "What time is it?"),
            turn(2, "How fast are you?"),
            turn(3, "what time is it now, please", "what", True),
            turn(4, "thank you twice, thank you"),
        ],
        user,
        bot,
    )
    assert [(reply.heard, reply.errors, reply.words) for reply in found[:2]] == [
        ("what time is it", 0, 4),
        ("how fast are you", 0, 4),
    ]
    assert found[2].said == "what" and found[2].interrupted and found[2].errors
    assert found[3].errors == 3 and word_error_rate(found) == 3 / 13  # the interrupted one does not count
    assert word_error_rate(found[:2]) == 0 and word_error_rate(found[2:3]) is None


def test_a_recording_of_other_turns_is_refused():
    with pytest.raises(AgentError, match="2 turns.*found 1"):
        hear_back([turn(1, "a"), turn(2, "b")], *conversation(("hello", "go on")))
