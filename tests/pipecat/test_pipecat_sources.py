"""What the Pipecat service does is the same over a synthesizer in this process and over a server. Random weights:
order, limits and parity only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from pipecat.frames.frames import (
    InterruptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.services.tts_service import TextAggregationMode
from pipecat_fakes import Talk, metrics, turn
from served import Served, Watched, served

from mktts.audio import to_pcm16
from mktts.errors import PromptError, TextError
from mktts.pipecat import LocalSource, MkttsTTSService, RemoteSource, SpeechFailedFrame, SpeechSource, Style
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions
from mktts.speech.text import MAX_TEXT_CHARS
from mktts.synth import Synthesizer

SHORT = Guard(frames_per_text_token=0.5, slack_frames=6)  # random weights never end by themselves
OPTIONS = StreamOptions(guard=SHORT)
LONG = "One two three four five six seven eight nine ten. " * 4
Settings = MkttsTTSService.Settings


@pytest.fixture(scope="module")
def server(synth: Synthesizer) -> Iterator[Served]:
    with served(synth, guard=SHORT) as running:
        yield running


@dataclass
class Place:
    """Where the model is. watched: what it is asked for."""

    source: Callable[[], SpeechSource]
    watched: Watched

    def service(self, **kwargs) -> MkttsTTSService:
        kwargs.setdefault("settings", Settings(voice="vivian", seed=5))
        return MkttsTTSService(source=self.source(), **kwargs)


@pytest.fixture(params=["in process", "server"])
def place(request: pytest.FixtureRequest, synth: Synthesizer, server: Served) -> Place:
    if request.param == "server":
        server.watched.streams.clear()
        return Place(lambda: RemoteSource(server.url), server.watched)
    watched = Watched(synth, SHORT)
    return Place(lambda: LocalSource(watched), watched)


def audio(talk: Talk) -> bytes:
    return b"".join(frame.audio for frame in talk.of(TTSAudioRawFrame))


async def test_the_audio_of_a_turn_is_the_synthesizers_sentence_by_sentence(place, synth):
    async with Talk(place.service()) as talk:
        await talk.say(*turn("Hello there. ", "How are you?"))
    alone = [synth.say(text, speaker="vivian", seed=5, options=OPTIONS) for text in ("Hello there.", "How are you?")]
    assert audio(talk) == b"".join(to_pcm16(pcm) for pcm in alone)
    assert talk.heard() == "Hello there. How are you?"
    assert len(talk.of(TTSStartedFrame)) == len(talk.of(TTSStoppedFrame)) == 1
    assert len(metrics(talk, TTFBMetricsData)) == 1
    assert {data.model for data in metrics(talk, TTFBMetricsData)} == {synth.checkpoint.folder.name}


async def test_a_service_may_choose_the_layout_of_its_sentences(synth):
    heard = {}
    for layout in ("streaming", "whole"):
        source = LocalSource(synth, options=OPTIONS, layout=layout)
        async with Talk(MkttsTTSService(source=source, settings=Settings(voice="vivian", seed=5))) as talk:
            await talk.say(TTSSpeakFrame("Hello there."))
        heard[layout] = audio(talk)
        alone = synth.say("Hello there.", speaker="vivian", seed=5, options=OPTIONS, layout=layout)
        assert heard[layout] == to_pcm16(alone)
    assert heard["streaming"] != heard["whole"]


async def test_the_audio_of_a_token_turn_is_that_of_a_fed_session(place, synth):
    async with Talk(place.service(text_aggregation_mode=TextAggregationMode.TOKEN)) as talk:
        await talk.say(*turn("Hel", "lo there.", " How are", " you?"))
    with synth.open(speaker="vivian", seed=5, options=OPTIONS) as session:
        session.feed("Hello there. How are you?")
        session.finish()
        assert audio(talk) == to_pcm16(session.read())
    assert talk.heard() == "Hello there. How are you?"


async def test_settings_reach_the_model_from_the_next_sentence_on(place, synth):
    sampling = synth.sampling
    other = replace(
        sampling,
        talker=replace(sampling.talker, temperature=0.4, top_k=7),
        predictor=replace(sampling.predictor, do_sample=False),
        repetition_penalty=1.8,
    )
    change = Settings(voice="ryan", language="english", seed=6, sampling=other)
    async with Talk(place.service()) as talk:
        await talk.say(*turn("One."), TTSUpdateSettingsFrame(delta=change), *turn("Two."))
    one = synth.say("One.", speaker="vivian", seed=5, options=OPTIONS)
    two = synth.say("Two.", speaker="ryan", language="english", seed=6, sampling=other, options=OPTIONS)
    assert audio(talk) == to_pcm16(one) + to_pcm16(two)


async def test_two_sessions_of_one_source_take_turns(place, synth):
    source = place.source()
    one, two = (MkttsTTSService(source=source, settings=Settings(voice="vivian", seed=5)) for _ in range(2))
    async with Talk(one) as first:
        async with Talk(two) as second:
            await first.say(TTSSpeakFrame(LONG))
            await first.until(lambda: first.of(TTSAudioRawFrame))
            await second.say(TTSSpeakFrame("Yes."))
            await second.until(lambda: second.of(TTSAudioRawFrame))
            assert not first.of(TTSStoppedFrame)  # the second caller did not wait for the first one's sentence
        assert audio(second) == to_pcm16(synth.say("Yes.", speaker="vivian", seed=5, options=OPTIONS))
    assert first.heard() == LONG.strip()  # the end of the second session did not cut it


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_after_an_interruption_no_stale_audio_comes_and_the_model_stops_within_a_frame(place, synth, mode):
    async with Talk(place.service(text_aggregation_mode=mode)) as talk:
        await talk.say(*turn(LONG.replace(".", ",")))  # one sentence
        await talk.until(lambda: len(talk.of(TTSAudioRawFrame)) == 2)
        await talk.say(InterruptionFrame(), *turn("Now this."))
        await talk.until(lambda: len(talk.of(TTSStoppedFrame)) == 1)
    at = next(i for i, frame in enumerate(talk.down) if isinstance(frame, InterruptionFrame))
    after = [frame for frame in talk.down[at:] if isinstance(frame, TTSAudioRawFrame)]
    assert {frame.context_id for frame in after}.isdisjoint({talk.of(TTSStartedFrame)[0].context_id})
    with synth.open(speaker="vivian", seed=5, options=OPTIONS) as session:
        session.feed("Now this.")
        session.finish()
        fed = to_pcm16(session.read())
    whole = to_pcm16(synth.say("Now this.", speaker="vivian", seed=5, options=OPTIONS))
    assert b"".join(frame.audio for frame in after) == (fed if mode is TextAggregationMode.TOKEN else whole)
    interrupted = place.watched.streams[-2]
    assert await asyncio.to_thread(place.watched.wasted_frames, interrupted) <= 1
    assert interrupted.finish_reason == "cancelled"


async def test_a_voice_or_language_that_the_model_lacks_makes_no_usable_service(place):
    for settings, what in ((Settings(voice="nobody"), "nobody"), (Settings(language="klingon"), "klingon")):
        source = place.source()
        await source.connect()
        with pytest.raises(PromptError, match=what):
            MkttsTTSService(source=source, settings=settings)
        await source.disconnect()


@pytest.mark.parametrize("chars", [MAX_TEXT_CHARS + 1, 2 * MAX_TEXT_CHARS], ids=["an utterance", "a message"])
async def test_text_too_long_for_an_utterance_costs_itself_alone(place, chars):
    async with Talk(place.service()) as talk:
        await talk.say(*turn("Good. ", f"{'a' * chars}. ", "Yes."))
    assert [(type(frame), type(frame.exception)) for frame in talk.up] == [(SpeechFailedFrame, TextError)]
    assert talk.heard() == "Good. Yes."


async def test_nothing_visible_in_a_fed_utterance_is_an_end_without_audio(place):
    source = place.source()
    speech = await source.open(Style(voice="vivian"))
    speech.feed("  ")
    speech.finish()
    assert [piece async for piece in speech] == []
    assert speech.finish_reason == "cancelled"
    await source.disconnect()
