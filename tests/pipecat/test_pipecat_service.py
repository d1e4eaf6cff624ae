"""The Pipecat service over a source under control, then the same over a synthesizer in this process and a server."""

import ast
import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import pytest
from loguru import logger
from pipecat.frames import frames
from pipecat.metrics.metrics import ProcessingMetricsData, TTFAMetricsData, TTFBMetricsData, TTSUsageMetricsData
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transcriptions.language import Language
from pipecat.transports.base_transport import TransportParams
from pipecat_fakes import TOO_LATE_S, FakeSource, FakeSpeech, Talk, metrics, taken, turn
from served import Served, Watched, fed, plain_voice, served

import mktts.pipecat
from mktts.agent.scripted import RecordingOutput
from mktts.audio import to_pcm16
from mktts.engine.options import Guard, StreamOptions
from mktts.errors import EngineError, PromptError, TextError
from mktts.pipecat import LocalSource, MkttsTTSService, RemoteSource, SpeechFailedFrame, SpeechSource, Style
from mktts.pipecat.service import SpokenText
from mktts.pipecat.source import close_shared_synthesizers, shared_synthesizer
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer
from mktts.text.split import MAX_TEXT_CHARS

Settings = MkttsTTSService.Settings


async def begun(talk: Talk, source: FakeSource, pieces: int = 0) -> FakeSpeech:
    """The first speech, once so many pieces of it have come."""
    await talk.until(lambda: source.speeches)
    source.speeches[0].give(pieces, open=True)
    await talk.until(lambda: len(talk.of(frames.TTSAudioRawFrame)) == pieces)
    return source.speeches[0]


def service(plan=3, **kwargs) -> tuple[MkttsTTSService, FakeSource]:
    source = FakeSource(plan if callable(plan) else lambda text: FakeSpeech(plan))  # pieces of every speech
    return MkttsTTSService(source=source, **kwargs), source


async def test_an_llm_turn_of_three_sentences_is_one_audio_context_in_order_and_its_words_have_their_times():
    tts, source = service(25)  # two seconds a sentence
    async with Talk(tts) as talk:
        await talk.say(*turn("One two. ", "Three four", ". Five", " six."))
    assert [text for text, _ in source.asked] == ["One two.", "Three four.", "Five six."]
    assert talk.heard() == "One two. Three four. Five six."
    order = [type(frame) for frame in talk.down if not isinstance(frame, (frames.MetricsFrame, frames.EndFrame))]
    started, stopped = order.index(frames.TTSStartedFrame), order.index(frames.TTSStoppedFrame)
    assert order.index(frames.AggregatedTextFrame) < started < order.index(frames.TTSAudioRawFrame) < stopped
    assert order.count(frames.TTSStartedFrame) == order.count(frames.TTSStoppedFrame) == 1
    spoken = talk.of(frames.TTSStartedFrame, frames.TTSAudioRawFrame, frames.TTSStoppedFrame)
    assert len({frame.context_id for frame in spoken}) == 1
    assert talk.samples() == 75 * SAMPLES_PER_FRAME and order[-1] is frames.LLMFullResponseEndFrame and talk.up == []
    assert len(metrics(talk, TTFBMetricsData)) == len(metrics(talk, TTFAMetricsData)) == 1
    assert [data.value for data in metrics(talk, TTSUsageMetricsData)] == [8, 11, 9]
    assert len(metrics(talk, ProcessingMetricsData)) == 3
    assert {data.model for data in metrics(talk, TTFBMetricsData)} == {"fake"}
    times_s = [frame.pts / 1e9 for frame in talk.of(frames.TTSTextFrame)]
    assert len(times_s) == 6 and times_s == sorted(times_s) and times_s[-1] - times_s[0] < 6.0
    assert 1.9 < times_s[2] - times_s[0] < 2.1  # the second sentence begins where the first one's audio ends


async def test_ipa_is_said_in_english_letters_and_the_context_has_the_words_as_written():
    warnings = []
    kept = logger.add(warnings.append, level="WARNING")
    say = MkttsTTSService.pronunciation_transform_ipa({"nginx": "/ˈɛndʒɪn ˈɛks/", "Rose": "ʁoz"})
    logger.remove(kept)
    assert len(warnings) == 1 and "Rose" in warnings[0] and "nginx" not in warnings[0]
    for language, sent in (("english", "Use enjin eks, Rose."), ("german", "Use nginx, Rose.")):
        tts, source = service(text_transforms=[("*", say)], settings=Settings(language=language))
        async with Talk(tts) as talk:
            await talk.say(*turn("Use nginx, ", "Rose."))
        assert [text for text, _ in source.asked] == [sent]
        kept = [frame.raw_text or frame.text for frame in talk.of(frames.TTSTextFrame) if frame.append_to_context]
        assert " ".join(kept) == "Use nginx, Rose."


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_a_pause_that_the_text_asks_for_is_no_word_and_stays_in_the_context(mode):
    tts, _ = service(25, text_aggregation_mode=mode)
    async with Talk(tts) as talk:
        await talk.say(*turn("One two [pause 0.5s] three."))
    assert [frame.text for frame in talk.of(frames.TTSTextFrame)] == ["One", "two", "[pause 0.5s] three."]


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_an_interruption_before_the_first_audio_reports_no_ttfb_and_a_cancel_disconnects_the_source(mode):
    tts, source = service(None, text_aggregation_mode=mode)
    with pytest.raises(ZeroDivisionError):
        async with Talk(tts) as talk:
            await talk.say(*turn("One two three."))
            await talk.until(lambda: source.speeches)
            await talk.say(frames.InterruptionFrame())
            await talk.until(lambda: talk.of(frames.InterruptionFrame))
            assert source.speeches.pop().cancelled and talk.heard() == "" and source.connected == 1
            await talk.say(*turn("One two three."))
            speech = await begun(talk, source, 2)
            raise ZeroDivisionError  # the talk is cancelled
    assert speech.cancelled and source.connected == 0
    assert talk.of(frames.CancelFrame) and len(metrics(talk, TTFBMetricsData)) == 1


@pytest.mark.parametrize("text", ["\U0001f44d", "...", "\u200b!", "Sh."])
async def test_a_turn_without_sound_ends_at_once_and_is_no_failure(text):
    tts, source = service(lambda said: FakeSpeech(0 if said == text else 3), stop_frame_timeout_s=TOO_LATE_S)
    async with Talk(tts) as talk:
        for _ in range(4):  # one more than Pipecat writes a silent service off for
            await talk.say(frames.TTSSpeakFrame(text))
        await talk.say(*turn("Good."))
    assert [asked for asked, _ in source.asked if asked != "Sh."] == ["Good."]  # the model is not asked for marks
    assert talk.up == [] and tts.is_usable
    assert len(talk.of(frames.TTSStoppedFrame)) == 5 and len(metrics(talk, TTFBMetricsData)) == 1
    assert talk.samples() == 4 * 480 + 3 * SAMPLES_PER_FRAME


async def test_words_after_an_interruption_are_told_while_they_are_heard():
    tts, source = service(None)
    async with Talk(tts) as talk:
        await talk.say(*turn("A sentence of which eight seconds are made at once."))
        await begun(talk, source, 100)
        await talk.say(frames.InterruptionFrame(), *turn("Now this one."))
        await talk.until(lambda: len(source.speeches) == 2)
        source.speeches[1].give(10, open=True)
        await talk.until(lambda: talk.heard().endswith(" Now"))  # before the end, which brings all that is left
        source.speeches[1].give(1)


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_a_failed_engine_is_a_permanent_error_and_the_unspoken_text_stays_out_of_the_context(mode):
    bad = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen. "
    whole = f"All is good. {bad}This is never said."

    def plan(text: str) -> FakeSpeech:
        return FakeSpeech(3) if text == "All is good." else FakeSpeech(50, RuntimeError("device lost"))  # of four s

    tts, source = service(plan, stop_frame_timeout_s=TOO_LATE_S, text_aggregation_mode=mode)
    async with Talk(tts) as talk:
        await talk.say(*turn("All is good. ", bad, "This is never said."))
        await talk.until(lambda: talk.of(frames.LLMFullResponseEndFrame))
        await talk.say(*turn("Nor is this."))
    failed = talk.failures[0]
    assert "device lost" in failed.error and failed.permanent and not tts.is_usable
    assert whole.startswith(talk.heard()) and "All is good. one two" in talk.heard()
    assert "nine" in talk.heard() and "fifteen" not in talk.heard()
    assert len(talk.of(frames.TTSStoppedFrame)) == 2  # no context is left hanging
    assert "Nor is this." not in [text for text, _ in source.asked]


async def test_settings_that_do_not_fit_are_permanent_until_they_change():
    with pytest.raises(ValueError, match="both"):
        MkttsTTSService(checkpoint="random:tiny", source=FakeSource(FakeSpeech))

    def plan(text: str) -> FakeSpeech:
        if source.asked[-1][1].voice == "nobody":
            raise PromptError("speaker must be 'vivian', got 'nobody'")
        return FakeSpeech(3)

    tts, source = service(plan, stop_frame_timeout_s=TOO_LATE_S)
    async with Talk(tts) as talk:
        await talk.say(frames.TTSUpdateSettingsFrame(delta=Settings(voice="nobody")), *turn("One."))
        await talk.until(lambda: talk.of(frames.LLMFullResponseEndFrame))
        assert not tts.is_usable
        await talk.say(frames.TTSUpdateSettingsFrame(delta=Settings(voice="vivian", instruct="Calmly.")), *turn("Two."))
    assert talk.heard() == "Two." and tts.is_usable
    assert (source.asked[-1][1].voice, source.asked[-1][1].instruct) == ("vivian", "Calmly.")


async def test_uninterruptible_speech_survives_an_interruption_and_an_end_does_not_wait_for_the_rest_of_a_reply():
    tts, source = service(lambda text: FakeSpeech(None if "recorded" in text else 3), stop_frame_timeout_s=TOO_LATE_S)
    frame = frames.TTSSpeakFrame("This call is recorded.")
    frame.interruptible = False
    async with Talk(tts) as talk:
        await talk.say(frame)
        speech = await begun(talk, source, 2)
        await talk.say(frames.InterruptionFrame())
        await talk.until(lambda: talk.of(frames.InterruptionFrame))
        speech.give(2)
        await talk.say(*turn("One two three. ", "Four")[:-1], frames.EndFrame())
        await talk.ended()
    assert talk.samples() == (4 + 3) * SAMPLES_PER_FRAME
    assert talk.heard() == "This call is recorded. One two three."


@pytest.mark.parametrize(
    ("rate_hz", "mode"),
    [(8_000, "sentence"), (16_000, "token"), (22_050, "sentence"), (44_100, "token"), (48_000, "sentence")],
)
async def test_resampled_speech_keeps_its_length_to_the_sample_though_the_engine_pauses(rate_hz, mode):
    """Pipecat's own resampler of a service forgets what it holds after 0.2 s."""
    tts, source = service(None, text_aggregation_mode=TextAggregationMode(mode))
    async with Talk(tts, rate_hz) as talk:
        await talk.say(*turn("One two three."))
        speech = await begun(talk, source)
        speech.give(3, open=True)
        await asyncio.sleep(0.25)
        speech.give(4)
    assert {frame.sample_rate for frame in talk.of(frames.TTSAudioRawFrame)} == {rate_hz}
    assert abs(talk.samples() - 7 * SAMPLES_PER_FRAME * rate_hz / source.sample_rate_hz) <= 0.5


# ---- token mode: an LLM's tokens go into one generation while they are written


async def test_tokens_of_a_turn_go_into_one_generation_as_they_come_and_the_next_turn_waits_for_its_end():
    tts, source = service(None, text_aggregation_mode=TextAggregationMode.TOKEN)
    async with Talk(tts) as talk:
        await talk.say(*turn("Hel", "lo there.")[:-1])
        await talk.until(lambda: source.speeches and source.speeches[0].texts == ["Hel", "lo there."])
        first = source.speeches[0]
        first.give(1, open=True)
        await talk.until(lambda: talk.of(frames.TTSAudioRawFrame))  # speech before the text is complete
        assert not first.finished.is_set()
        await talk.say(*turn(" How are", " you?")[1:], *turn("Second one."))
        await talk.until(lambda: first.finished.is_set() and len(tts._speaking) == 2)
        assert len(source.speeches) == 1 and "".join(first.texts) == "Hello there. How are you?"
        first.give(9)
        await talk.until(lambda: len(source.speeches) == 2)
        source.speeches[1].give(2)
    assert talk.heard() == "Hello there. How are you? Second one."
    assert len(list(groupby(frame.context_id for frame in talk.of(frames.TTSAudioRawFrame)))) == 2
    assert [data.value for data in metrics(talk, TTSUsageMetricsData)] == [25, 11]


async def test_a_token_turn_that_a_limit_ends_early_keeps_the_rest_out_of_the_context():
    tts, source = service(None, text_aggregation_mode=TextAggregationMode.TOKEN, stop_frame_timeout_s=TOO_LATE_S)
    async with Talk(tts) as talk:
        await talk.say(frames.LLMFullResponseStartFrame(), frames.LLMTextFrame("One two three four five six seven. "))
        (await begun(talk, source)).give(3)
        await talk.until(lambda: tts._speaking and next(iter(tts._speaking.values())).over)
        await talk.say(frames.LLMTextFrame("Never said."), frames.LLMFullResponseEndFrame())
    assert talk.heard() and "One two three four".startswith(talk.heard())


# ---- the conversation's context: what was heard is in it

SENTENCES = ("Once upon a time there was a computer. ", "It dreamed of singing in the opera.")


def played_s(loudspeaker: RecordingOutput) -> float:
    return sum(len(pcm) for _, pcm in loudspeaker.played) / SAMPLE_RATE_HZ


def said(context: LLMContext) -> str:
    return " ".join(message["content"] for message in context.get_messages() if message["role"] == "assistant")


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_the_context_ends_where_an_interrupted_listener_was_and_has_a_turn_heard_to_its_end(mode):
    pieces = round(2.4 * FRAME_RATE_HZ)  # of each of two sentences
    tts, _ = service(lambda text: FakeSpeech(pieces if text else 2 * pieces), text_aggregation_mode=mode)
    context = LLMContext()
    loudspeaker = RecordingOutput(TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0))
    async with Talk(tts, after=[loudspeaker, LLMContextAggregatorPair(context).assistant()]) as talk:
        await talk.say(*turn(*SENTENCES))
        await talk.until(lambda: played_s(loudspeaker) > 1.0)
        await talk.say(frames.InterruptionFrame())
        await talk.until(lambda: said(context))
        heard, before_s = said(context), played_s(loudspeaker)
        await talk.say(*turn("One. ", "Two."))
        await talk.until(lambda: said(context) != heard)
    assert "".join(SENTENCES).startswith(heard)
    assert "Once upon a" in heard  # all audio was made long before: what counts is what was played
    assert "computer" not in heard
    assert talk.of(frames.BotStartedSpeakingFrame)
    assert said(context) == f"{heard} One. Two." and played_s(loudspeaker) >= before_s + 4.7


def test_a_pause_of_the_engine_moves_the_words_after_it():
    utterance = SpokenText(str, SAMPLE_RATE_HZ)
    utterance.add_audio(1.0, begin_s=20.0)
    utterance.add_audio(1.0, begin_s=25.0)
    assert [utterance.heard_at(offset_s) for offset_s in (0.0, 0.5, 1.0, 1.5, 2.0)] == [20.0, 20.5, 25.0, 25.5, 26.0]
    assert utterance.made_s == 2.0


# ---- a synthesizer in this process and a server. Random weights: order, limits and parity only

SHORT = Guard(frames_per_text_token=0.5, slack_frames=6)  # random weights never end by themselves
OPTIONS = StreamOptions(guard=SHORT)
LONG = "One two three four five six seven eight nine ten. " * 4


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
