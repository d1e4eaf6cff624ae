"""The mind on the same kernel: a tiny Qwen3 of random weights, in a pipeline. Its words mean nothing."""

from __future__ import annotations

import threading

import pytest
from commands import run
from pipecat.frames.frames import (
    ErrorFrame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    MetricsFrame,
)
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.tts_service import TextAggregationMode
from pipecat_fakes import FakeSource, FakeSpeech, Talk, until

from mktts.agent.mind import make_mind
from mktts.agent.qwen import Qwen3LLMService, Thinker
from mktts.agent.settings import AgentSettings, from_environment
from mktts.errors import CheckpointError, EngineError
from mktts.llm.chat import Message
from mktts.llm.conversation import TextConversation
from mktts.llm.decoder import TextDecoder
from mktts.pipecat import MkttsTTSService

ASKED = {"role": "user", "content": "Who are you?"}
INSTRUCTIONS = "Be brief."
REPLY_TOKENS = 12


@pytest.fixture(scope="module")
def thinker(checkpoint_cache):
    made = Thinker(TextDecoder.load("random:tiny", device="cpu"))
    yield made
    made.close()


def service(thinker: Thinker, reply_tokens: int = REPLY_TOKENS) -> Qwen3LLMService:
    made = Qwen3LLMService(thinker, instructions=INSTRUCTIONS, seed=3)
    made.conversation = TextConversation(thinker.decoder, reply_tokens=reply_tokens)
    return made


def words(talk: Talk) -> str:
    return "".join(frame.text for frame in talk.of(LLMTextFrame))


def usage(talk: Talk) -> list:
    found = [data for frame in talk.of(MetricsFrame) for data in frame.data]
    return [data.value for data in found if isinstance(data, LLMUsageMetricsData)]


async def ask(talk: Talk, *messages: dict, answers: int = 1) -> None:
    await talk.say(LLMContextFrame(LLMContext(list(messages))))
    await talk.until(lambda: len(talk.of(LLMFullResponseEndFrame)) == answers)


async def test_the_words_are_the_models_and_a_second_turn_keeps_the_first(thinker):
    async with Talk(service(thinker)) as talk:
        await ask(talk, ASKED)
        said = words(talk)
        await ask(talk, ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}, answers=2)
    alone = TextConversation(thinker.decoder, reply_tokens=REPLY_TOKENS)
    assert said and said == alone.reply([Message("system", INSTRUCTIONS), Message("user", "Who are you?")], 3).read()
    kinds = [type(frame) for frame in talk.of(LLMFullResponseStartFrame, LLMTextFrame, LLMFullResponseEndFrame)]
    assert kinds[0] is LLMFullResponseStartFrame and kinds.count(LLMTextFrame) > 2
    first, second = usage(talk)
    prompt = alone.template.ids([Message("system", INSTRUCTIONS), Message("user", "Who are you?")])
    assert (first.prompt_tokens, first.cache_read_input_tokens) == (len(prompt), 0)
    assert second.cache_read_input_tokens == prompt.index(alone.template.think)  # all but the thought's place


async def test_an_interruption_ends_a_reply_within_one_token(thinker, monkeypatch):
    """The model is held inside a token while the interruption passes: that token is its last, and nobody gets it."""
    inside, go_on, made = threading.Event(), threading.Event(), []
    step = type(thinker.decoder._backend).step

    def held(backend, state, count=1):
        if len(made) == 3:
            inside.set()
            assert go_on.wait(60)
        ids = step(backend, state, count)
        made.extend(ids)
        return ids

    monkeypatch.setattr(type(thinker.decoder._backend), "step", held)
    mind = service(thinker, reply_tokens=200)
    async with Talk(mind) as talk:
        await talk.say(LLMContextFrame(LLMContext([ASKED])))
        await talk.until(inside.is_set)
        before = thinker.decoder.vocabulary.decode(made)
        await talk.until(lambda: words(talk) == before)
        await talk.say(InterruptionFrame())
        await talk.until(lambda: talk.of(InterruptionFrame))  # it waits for no token
        go_on.set()
        await thinker.run(lambda: None)  # the thread is done with what was asked of it
        assert len(made) == 4 and mind.conversation._said.finish_reason == "cancelled"
        assert words(talk) == before
        await ask(talk, {"role": "user", "content": "Go on."}, answers=2)  # and it answers again
    assert len(words(talk)) > len(before) and not talk.of(ErrorFrame)


async def test_tokens_go_into_the_speech_as_they_are_made(thinker, monkeypatch):
    """The speech has words before the reply is whole, and all of them at its end."""
    reply = "I am a small voice, and I speak while I think."
    ids = [*thinker.decoder.vocabulary.encode(reply), thinker.decoder.checkpoint.config.eos_ids[0]]
    go_on, made = threading.Event(), []

    def told(backend, state, count=1):
        if len(made) == len(ids) // 2:
            assert go_on.wait(60)
        made.append(ids[len(made)])
        return made[-1:]

    monkeypatch.setattr(type(thinker.decoder._backend), "step", told)
    source = FakeSource(lambda _: FakeSpeech(None))
    tts = MkttsTTSService(source=source, text_aggregation_mode=TextAggregationMode.TOKEN)
    async with Talk(service(thinker, reply_tokens=200), after=[tts]) as talk:
        await talk.say(LLMContextFrame(LLMContext([ASKED])))
        await until(lambda: source.speeches and source.speeches[0].texts)
        assert len(made) < len(ids) and not source.speeches[0].finished.is_set()
        go_on.set()
        await until(source.speeches[0].finished.is_set)
        source.speeches[0].give(1)
    (speech,) = source.speeches
    assert "".join(speech.texts) == reply and len(speech.texts) > 2


async def test_two_conversations_take_turns_on_one_model(thinker):
    async with Talk(service(thinker)) as one, Talk(service(thinker)) as other:
        await one.say(LLMContextFrame(LLMContext([ASKED])))
        await ask(other, {"role": "user", "content": "Something else."})
        await one.until(lambda: one.of(LLMFullResponseEndFrame))
    async with Talk(service(thinker)) as alone:
        await ask(alone, ASKED)
    assert words(one) == words(alone) != words(other)


async def test_a_failed_model_is_said_and_the_turn_ends(thinker, monkeypatch):
    def fail(*_):
        raise EngineError("the kernel stopped")

    monkeypatch.setattr(type(thinker.decoder._backend), "step", fail)
    async with Talk(service(thinker)) as talk:
        await ask(talk, ASKED)
        (error,) = [frame for frame in talk.up if isinstance(frame, ErrorFrame)]
    assert "the kernel stopped" in error.error


def test_the_arguments_choose_it_and_speak_its_tokens(checkpoint_cache):
    settings = from_environment({}, mind="qwen3", mind_checkpoint="random:tiny", device="cpu")
    assert settings.tokens and "random:tiny" in settings.parts()["mind"]
    mind, again = make_mind(settings), make_mind(settings)
    assert isinstance(mind, Qwen3LLMService) and mind._thinker is again._thinker
    assert not from_environment({}, mind="qwen3", tokens=False).tokens and not from_environment({}).tokens


def test_a_checkpoint_that_is_none_is_told_at_the_start(checkpoint_cache):
    with pytest.raises(CheckpointError, match="nosuch"):
        run(
            "agent", "--checkpoint", "random:tiny", "--port", 0, "--mind", "qwen3", "--mind-checkpoint", "random:nosuch"
        )
    assert AgentSettings().mind == "scripted"
