"""Token mode: an LLM's tokens go into one generation while they are written."""

from __future__ import annotations

from itertools import pairwise

from pipecat.frames.frames import (
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
)
from pipecat.metrics.metrics import TTFBMetricsData, TTSUsageMetricsData
from pipecat.services.tts_service import TextAggregationMode
from pipecat_fakes import TOO_LATE_S, FakeSource, FakeSpeech, Talk, metrics, turn

from mktts.pipecat import MkttsTTSService, SpeechFailedFrame
from mktts.spec import SAMPLES_PER_FRAME


def service(**kwargs) -> tuple[MkttsTTSService, FakeSource]:
    """One whose speech says nothing until it is told to."""
    source = FakeSource(lambda text: FakeSpeech(None))
    return MkttsTTSService(source=source, text_aggregation_mode=TextAggregationMode.TOKEN, **kwargs), source


async def test_tokens_of_a_turn_go_into_one_generation_as_they_come():
    tts, source = service()
    async with Talk(tts) as talk:
        await talk.say(LLMFullResponseStartFrame(), LLMTextFrame("Hel"), LLMTextFrame("lo there."))
        await talk.until(lambda: source.speeches and source.speeches[0].texts == ["Hel", "lo there."])
        source.speeches[0].give(1, open=True)
        await talk.until(lambda: talk.of(TTSAudioRawFrame))  # speech before the text is complete
        assert not source.speeches[0].finished.is_set()
        await talk.say(LLMTextFrame(" How are"), LLMTextFrame(" you?"), LLMFullResponseEndFrame())
        await talk.until(source.speeches[0].finished.is_set)
        source.speeches[0].give(9)
    assert len(source.speeches) == 1
    assert "".join(source.speeches[0].texts) == "Hello there. How are you?"
    assert talk.heard() == "Hello there. How are you?"
    assert len(talk.of(TTSStartedFrame)) == len(talk.of(TTSStoppedFrame)) == 1
    assert [data.value for data in metrics(talk, TTSUsageMetricsData)] == [25]
    assert len(metrics(talk, TTFBMetricsData)) == 1


async def test_an_interrupted_token_turn_has_the_heard_words_in_the_context_alone():
    tts, source = service()
    async with Talk(tts) as talk:
        await talk.say(*turn("Once upon a time", " there was a computer.", " It dreamed of the opera."))
        await talk.until(lambda: source.speeches)
        source.speeches[0].give(5, open=True)
        await talk.until(lambda: len(talk.of(TTSAudioRawFrame)) == 5)
        await talk.say(InterruptionFrame())
        await talk.until(lambda: source.speeches[0].cancelled)
        source.speeches[0].give(5)
        await talk.until(lambda: talk.of(InterruptionFrame))
        heard = talk.heard()
        await talk.say(*turn("Yes?"))
        await talk.until(lambda: len(source.speeches) == 2)
        source.speeches[1].give(2)
    assert heard
    assert "Once upon a time there was".startswith(heard)
    assert talk.samples() == 7 * SAMPLES_PER_FRAME
    assert talk.heard() == f"{heard} Yes?"


async def test_a_failed_engine_in_a_token_turn_keeps_the_unspoken_text_out_of_the_context():
    tts, source = service(stop_frame_timeout_s=TOO_LATE_S)
    async with Talk(tts) as talk:
        await talk.say(LLMFullResponseStartFrame(), LLMTextFrame("Once upon a time there was a computer. It"))
        await talk.until(lambda: source.speeches)
        source.speeches[0].give(3, RuntimeError("device lost"))
        await talk.until(lambda: talk.up)
        await talk.say(LLMTextFrame(" dreamed."), LLMFullResponseEndFrame())
    assert [type(frame) for frame in talk.up] == [SpeechFailedFrame]
    assert talk.heard()
    assert "Once upon a time".startswith(talk.heard())
    assert not tts.is_usable
    assert len(talk.of(TTSStoppedFrame)) == 1


async def test_two_token_turns_are_generated_one_after_another():
    tts, source = service()
    async with Talk(tts) as talk:
        await talk.say(*turn("First one."), *turn("Second one."))
        await talk.until(lambda: source.speeches)
        await talk.until(lambda: len(tts._speaking) == 2)
        assert len(source.speeches) == 1
        source.speeches[0].give(2)
        await talk.until(lambda: len(source.speeches) == 2)
        source.speeches[1].give(2)
    assert talk.heard() == "First one. Second one."
    contexts = [frame.context_id for frame in talk.of(TTSAudioRawFrame)]
    assert contexts == sorted(contexts, key=contexts.index)
    assert len([pair for pair in pairwise(contexts) if pair[0] != pair[1]]) == 1


async def test_a_token_turn_that_a_limit_ends_early_keeps_the_rest_out_of_the_context():
    tts, source = service(stop_frame_timeout_s=TOO_LATE_S)
    async with Talk(tts) as talk:
        await talk.say(LLMFullResponseStartFrame(), LLMTextFrame("One two three four five six seven. "))
        await talk.until(lambda: source.speeches)
        source.speeches[0].give(3)
        await talk.until(lambda: tts._speaking and next(iter(tts._speaking.values())).over)
        await talk.say(LLMTextFrame("Never said."), LLMFullResponseEndFrame())
    assert talk.heard()
    assert "One two three four".startswith(talk.heard())
