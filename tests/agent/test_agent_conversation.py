"""A whole conversation offline: recorded user speech in, an interruption, a context that holds what was heard.

Random weights: the bot's voice is noise; its text is known.
"""

from __future__ import annotations

import wave

import numpy as np
import pytest
from absent import needs
from pipecat.frames.frames import InterruptionFrame, LLMFullResponseStartFrame, OutputAudioRawFrame
from pipecat.observers.base_observer import BaseObserver
from pipecat.processors.frame_processor import FrameDirection
from pipecat.transports.base_output import BaseOutputTransport

from mktts.agent import user_speech
from mktts.agent.intents import STORY
from mktts.agent.latency import TurnLatency
from mktts.agent.scripted import Talk, UserTurn, at_output_rate, converse, hear_back
from mktts.agent.settings import from_environment
from mktts.audio import from_pcm16
from mktts.errors import AgentError
from mktts.spec import SAMPLE_RATE_HZ

pytestmark = needs("pocketsphinx")  # the speech to text that the agent has without a key
PAUSE_S = 0.6


class Order(BaseObserver):
    """What left the loudspeaker, in order: "i" an interruption, "a" audio; and "?" where the model was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ""

    async def on_push_frame(self, data) -> None:
        if data.direction != FrameDirection.DOWNSTREAM:
            return
        if isinstance(data.frame, LLMFullResponseStartFrame) and data.first_push:
            self.log += "?"
        elif isinstance(data.source, BaseOutputTransport):
            if isinstance(data.frame, InterruptionFrame):
                self.log += "i"
            elif isinstance(data.frame, OutputAudioRawFrame):
                self.log += "a"


async def test_a_conversation_with_an_interruption(tmp_path, checkpoint_cache):
    """One conversation, in real time, looked at from all sides."""
    order, lines = Order(), []
    script = (UserTurn("tell me a story"), UserTurn("stop please", after_s=1.0))
    settings = from_environment({}, checkpoint="random:tiny", turn_end="timeout", greeting="", seed=1)
    talk = await converse(settings, script, wav=tmp_path / "talk.wav", say=lines.append, observers=[order])

    story, stop = talk.turns
    assert [turn.user for turn in talk.turns] == [turn.text for turn in script]
    for turn in talk.turns:
        assert 0 < turn.transcript_ms <= turn.first_token_ms <= turn.first_audio_ms <= turn.speaking_ms
    assert story.silence_ms is None and stop.silence_ms > 0
    assert story.interrupted and not stop.interrupted

    # The context holds what was heard of the story, and all of the answer to the interruption.
    roles = [(message["role"], message["content"]) for message in talk.messages]
    assert roles[0] == ("user", "tell me a story") and roles[2] == ("user", "stop please")
    heard = roles[1][1]
    assert STORY.startswith(heard) and 0 < len(heard) < len(STORY) / 2
    assert heard == story.heard
    assert roles[3] == ("assistant", stop.reply) and stop.reply == stop.heard

    # After the interruption nothing is played but the piece in the loudspeaker's hand, until the model has been asked.
    after = order.log[order.log.rindex("i") :]
    assert after[: after.index("?")].count("a") <= 1
    assert "a" in order.log[: order.log.rindex("i")] and "a" in after[after.index("?") :]
    assert talk.stale_frames == 0

    with wave.open(str(talk.wav)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, SAMPLE_RATE_HZ, len(talk.user))
        both = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2) / 2**15
    assert np.abs(both[:, 0] - talk.user).max() < 1e-3 and np.abs(both[:, 1] - talk.bot).max() < 1e-3
    assert np.abs(talk.user).max() > 0.3 and np.abs(talk.bot).max() > 0.05

    assert talk.random_weights and any("noise" in line for line in lines)
    assert any(line.startswith("stt: pocketsphinx") for line in lines)
    told = talk.document()
    assert told["turns"][1]["silence_ms"] == stop.silence_ms and "user" not in told


def conversation(*turns: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """(user, bot) tracks of the recordings named, one after another with pauses."""
    pause = np.zeros(round(PAUSE_S * SAMPLE_RATE_HZ), np.float32)
    user, bot = [], []
    for asked, answered in turns:
        first, second = (
            from_pcm16(at_output_rate(user_speech.load(text), user_speech.USER_RATE_HZ)) for text in (asked, answered)
        )
        user += [pause, first, pause, np.zeros_like(second)]
        bot += [pause, np.zeros_like(first), pause, second]
    return np.concatenate([*user, pause]), np.concatenate([*bot, pause])


def test_clear_speech_is_heard_word_for_word_and_other_words_are_errors():
    tracks = conversation(("hello", "what time is it"), ("stop please", "what time is it"), ("thank you", "thank you"))
    turns = [
        TurnLatency(1, "hello", "What time is it?"),
        TurnLatency(2, "hello", "what time is it now, please", "what", True),
        TurnLatency(3, "hello", "thank you twice, thank you"),
    ]
    found = hear_back(turns, *tracks)
    assert (found[0].heard, found[0].errors, found[0].words) == ("what time is it", 0, 4)
    assert found[1].said == "what" and found[1].interrupted and found[1].errors
    talks = [Talk((), False, (), (), 0, replies, *tracks, None) for replies in (found, found[:1], found[1:2])]
    assert found[2].errors == 3
    assert [talk.word_error_rate for talk in talks] == [3 / 9, 0, None]  # the interrupted one does not count


def test_a_recording_of_other_turns_is_refused_and_a_text_that_was_not_recorded():
    with pytest.raises(AgentError, match="'hello'.*no such text"):
        user_speech.recording("no such text")
    with pytest.raises(AgentError, match="2 turns.*found 1"):
        hear_back([TurnLatency(1, "a"), TurnLatency(2, "b")], *conversation(("hello", "go on")))
