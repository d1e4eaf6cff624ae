"""A whole conversation offline: recorded user speech in, an interruption, a context that holds what was heard."""

import numpy as np
import pytest
from absent import needs

from mktts.agent.intents import STORY
from mktts.agent.scripted import UserTurn, converse
from mktts.agent.settings import from_environment
from mktts.errors import AgentError
from mktts.spec import SAMPLE_RATE_HZ

pytestmark = needs("pocketsphinx")  # the speech to text that the agent has without a key


async def test_a_text_that_was_not_recorded_is_told_before_anything_is_loaded():
    with pytest.raises(AgentError, match="'hello'.*no such text"):
        await converse(from_environment({}, checkpoint="absent-folder"), [UserTurn("no such text")])


async def test_a_conversation_with_an_interruption(checkpoint_cache):
    script = (UserTurn("tell me a story"), UserTurn("stop please", after_s=1.0))
    settings = from_environment({}, checkpoint="random:tiny", turn_end="timeout", greeting="", seed=1)
    talk = await converse(settings, script)

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

    assert talk.stale_frames == 0
    assert len(talk.user) == len(talk.bot) > SAMPLE_RATE_HZ
    assert np.abs(talk.user).max() > 0.3 and np.abs(talk.bot).max() > 0.05
    assert talk.random_weights
