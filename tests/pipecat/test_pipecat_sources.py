"""What the Pipecat service does is the same over a synthesizer in this process and over a server. Random weights:
order, limits and parity only."""

import ast
import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from pipecat.frames import frames
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat_fakes import Talk, metrics, taken, turn
from served import Served, Watched, fed, plain_voice, served

import mktts.pipecat
from mktts.audio import to_pcm16
from mktts.engine.options import Guard, StreamOptions
from mktts.errors import EngineError, PromptError, TextError
from mktts.pipecat import LocalSource, MkttsTTSService, RemoteSource, SpeechFailedFrame, SpeechSource, Style
from mktts.pipecat.source import close_shared_synthesizers, shared_synthesizer
from mktts.synth import Synthesizer
from mktts.text.split import MAX_TEXT_CHARS

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
    return b"".join(frame.audio for frame in talk.of(frames.TTSAudioRawFrame))


def alone(synth: Synthesizer, text: str, **how) -> bytes:
    return to_pcm16(synth.say(text, **{"speaker": "vivian", "seed": 5, "options": OPTIONS, **how}))


def spoken(synth: Synthesizer, mode: TextAggregationMode, *sentences: str) -> bytes:
    """What the synthesizer alone makes of a turn: a sentence at a time, or of all that was fed."""
    if mode is TextAggregationMode.SENTENCE:
        return b"".join(alone(synth, text) for text in sentences)
    return fed(synth, " ".join(sentences), speaker="vivian", seed=5, options=OPTIONS)


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_the_audio_of_a_turn_is_the_synthesizers_sentence_by_sentence_or_fed(place, synth, mode):
    async with Talk(place.service(text_aggregation_mode=mode)) as talk:
        await talk.say(*turn("Hel", "lo there.", " How are", " you?"))
    assert audio(talk) == spoken(synth, mode, "Hello there.", "How are you?")
    assert talk.heard() == "Hello there. How are you?"
    assert len(talk.of(frames.TTSStartedFrame)) == len(talk.of(frames.TTSStoppedFrame)) == 1
    assert len(metrics(talk, TTFBMetricsData)) == 1
    assert {data.model for data in metrics(talk, TTFBMetricsData)} == {synth.checkpoint.folder.name}


async def test_a_service_may_choose_the_layout_of_its_sentences(synth):
    source = LocalSource(synth, options=OPTIONS, layout="streaming")
    async with Talk(MkttsTTSService(source=source, settings=Settings(voice="vivian", seed=5))) as talk:
        await talk.say(frames.TTSSpeakFrame("Hello there."))
    assert audio(talk) == alone(synth, "Hello there.", layout="streaming") != alone(synth, "Hello there.")


async def test_settings_reach_the_model_from_the_next_sentence_on(place, synth):
    drawn = {"temperature": 0.4, "top_k": 7, "predictor_greedy": True, "repetition_penalty": 1.8}
    other = synth.sampling.with_flat(drawn)
    first = Settings(language=Language.EN_GB, seed=6, sampling=other)
    second = Settings.from_mapping({"speaker": "ryan", "language": Language.HI})  # which the model was not trained on
    async with Talk(place.service()) as talk:
        await talk.say(*turn("One."), frames.TTSUpdateSettingsFrame(delta=first), *turn("Two."))
        await talk.say(frames.TTSUpdateSettingsFrame(delta=second), *turn("Three."))
    two = alone(synth, "Two.", language="english", seed=6, sampling=other)
    three = alone(synth, "Three.", speaker="ryan", language="auto", seed=6, sampling=other)
    assert audio(talk) == alone(synth, "One.") + two + three


async def test_two_sessions_of_one_source_take_turns(place, synth):
    source = place.source()
    one, two = (MkttsTTSService(source=source, settings=Settings(voice="vivian", seed=5)) for _ in range(2))
    async with Talk(one) as first:
        async with Talk(two) as second:
            await first.say(frames.TTSSpeakFrame(LONG))
            await first.until(lambda: first.of(frames.TTSAudioRawFrame))
            await second.say(frames.TTSSpeakFrame("Yes."))
            await second.until(lambda: second.of(frames.TTSAudioRawFrame))
            assert not first.of(frames.TTSStoppedFrame)  # the second caller did not wait for the first one's sentence
        assert audio(second) == alone(synth, "Yes.")
    assert first.heard() == LONG.strip()  # the end of the second session did not cut it


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_after_an_interruption_no_stale_audio_comes_and_the_model_stops_within_a_frame(place, synth, mode):
    async with Talk(place.service(text_aggregation_mode=mode)) as talk:
        await talk.say(*turn(LONG.replace(".", ",")))  # one sentence
        await talk.until(lambda: len(talk.of(frames.TTSAudioRawFrame)) == 2)
        await talk.say(frames.InterruptionFrame(), *turn("Now this."))
        await talk.until(lambda: len(talk.of(frames.TTSStoppedFrame)) == 1)
    at = next(i for i, frame in enumerate(talk.down) if isinstance(frame, frames.InterruptionFrame))
    after = [frame for frame in talk.down[at:] if isinstance(frame, frames.TTSAudioRawFrame)]
    assert {frame.context_id for frame in after}.isdisjoint({talk.of(frames.TTSStartedFrame)[0].context_id})
    assert b"".join(frame.audio for frame in after) == spoken(synth, mode, "Now this.")
    interrupted = place.watched.streams[-2]
    assert await asyncio.to_thread(place.watched.wasted_frames, interrupted) <= 1
    assert interrupted.finish_reason == "cancelled"
    assert talk.heard().endswith(" Now this.") and LONG.replace(".", ",").startswith(talk.heard()[:-10])
    assert len(metrics(talk, TTFBMetricsData)) == 2


@pytest.mark.parametrize("chars", [MAX_TEXT_CHARS + 1, 2 * MAX_TEXT_CHARS], ids=["an utterance", "a message"])
async def test_text_too_long_for_an_utterance_costs_itself_alone(place, chars):
    tts = place.service()
    async with Talk(tts) as talk:
        await talk.say(*turn("Good. ", f"{'a' * chars}. ", "Yes."))
    assert [(type(frame), type(frame.exception)) for frame in talk.up] == [(SpeechFailedFrame, TextError)]
    assert talk.heard() == "Good. Yes." and tts.is_usable


@pytest.mark.parametrize("text", ["  ", "👍", "```\nx = 1\n```"])
async def test_nothing_to_say_in_a_fed_utterance_is_an_end_without_audio(place, text):
    source = place.source()
    speech = await source.open(Style(voice="vivian"))
    speech.feed(text)
    speech.finish()
    assert [piece async for piece in speech] == [] and speech.finish_reason == "cancelled"
    await source.disconnect()


# ---- synthesizers in this process


async def test_a_synthesizer_closed_in_mid_speech_is_a_failure_not_an_end(tiny):
    synth = Synthesizer.load(tiny, device="cpu", cpu_threads=1, engine="single")
    speech = await LocalSource(synth, options=StreamOptions(guard=Guard.off())).speak(LONG, Style(voice="vivian"))
    await anext(speech)
    synth.close()
    with pytest.raises(EngineError, match="closed"):
        await taken(speech)


async def test_a_saved_voice_speaks_on_a_base_checkpoint(tiny_base, tmp_path):
    with Synthesizer.load(tiny_base, device="cpu", cpu_threads=1, engine="single") as synth:
        with pytest.raises(PromptError, match="voice"):
            MkttsTTSService(source=LocalSource(synth))
        voice = plain_voice(tiny_base)
        voice.save(tmp_path / "voice.safetensors")
        settings = Settings(voice=str(tmp_path / "voice.safetensors"), seed=5)
        async with Talk(MkttsTTSService(source=LocalSource(synth, options=OPTIONS), settings=settings)) as talk:
            await talk.say(frames.TTSSpeakFrame("Hello."))
        assert audio(talk) == alone(synth, "Hello.", voice=voice, speaker=None)


def test_the_shared_model_is_loaded_once_and_closed_when_told():
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(shared_synthesizer, ["random:tiny"] * 3))
    one = MkttsTTSService(checkpoint="random:tiny")
    two = MkttsTTSService(checkpoint="random:tiny", settings=Settings(voice="ryan"))
    assert {id(synth) for synth in (*found, one._source._synthesizer, two._source._synthesizer)} == {id(found[0])}
    close_shared_synthesizers()
    with pytest.raises(EngineError):
        found[0].stream("Hello.", speaker="vivian")
    assert len(shared_synthesizer("random:tiny").say("Hello.", speaker="vivian", max_frames=1))
    close_shared_synthesizers()


def test_the_five_lines_of_the_docstring_are_five_and_run(synth, monkeypatch):
    lines = [line.strip() for line in mktts.pipecat.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 5
    code = ast.unparse(ast.parse("\n".join(lines))).replace("Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", "random:tiny")
    names = {name: [name] for name in ("stt", "user", "llm", "assistant")}
    transport = type("Transport", (), {"input": lambda self: "in", "output": lambda self: "out"})()
    monkeypatch.setattr("mktts.pipecat.service.shared_synthesizer", lambda *_, **__: synth)
    made = {**names, "transport": transport, "Pipeline": list}
    exec(code, made)
    assert isinstance(made["pipeline"][4], MkttsTTSService)
