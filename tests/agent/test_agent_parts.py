"""The agent's parts: what is recognised, what the script answers, which services are chosen, what is measured."""

import itertools
import re
import sys
from datetime import datetime
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from absent import needs
from pipecat.frames import frames
from pipecat.observers.base_observer import FramePushed
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.transcriptions.language import Language
from pipecat_fakes import Talk

from mktts.agent import intents, latency, stt, user_speech
from mktts.agent.intents import INTENTS, STORY
from mktts.agent.llm import ScriptedLLMService, create_llm
from mktts.agent.settings import AgentSettings, from_environment
from mktts.agent.stt import PocketsphinxSTTService, create_stt, decode, make_decoder
from mktts.errors import AgentError
from mktts.pipecat import MkttsTTSService

NOON = datetime(2026, 1, 1, 12, 0)
OFFLINE_STT = needs("pocketsphinx")
PAST_TWELVE = "forty-five minutes past twelve"
PAUSE = bytes(user_speech.USER_RATE_HZ)  # half a second


@OFFLINE_STT
def test_the_grammar_recognises_every_recording_and_nothing_in_noise():
    decoder = make_decoder(user_speech.USER_RATE_HZ)
    for text in user_speech.TEXTS:
        assert decode(decoder, user_speech.load(text).tobytes() + PAUSE) == text
    for level in (0, 3_000):
        noise = np.random.default_rng(0).normal(0, level, user_speech.USER_RATE_HZ).astype("<i2")
        assert decode(decoder, noise.tobytes()) == ""


def spellings(phrase: str) -> list[str]:
    """All texts of a phrase with [optional] words and (a | b) choices."""
    parts = re.findall(r"\[[^]]*\]|\([^)]*\)|[^\[(]+", phrase)
    choices = [["", part[1:-1]] if part[0] == "[" else part.strip("()").split("|") for part in parts]
    return [" ".join(" ".join(each).split()) for each in itertools.product(*choices)]


def test_every_phrase_of_the_grammar_gets_its_own_intents_answer():
    texts = [(text, intent) for intent in INTENTS for phrase in intent.phrases for text in spellings(phrase)]
    for text, intent in texts:
        assert intents.answer(text, ["Hello."], NOON) == intent.answer(["Hello."], NOON), text
    assert set(intents.hints()) <= {text for text, _ in texts}


def test_the_time_is_told_in_words():
    said = [intents.spoken_time(NOON.replace(hour=hour, minute=minute)) for hour, minute in ((21, 1), (0, 0), (12, 45))]
    assert said == [f"It is {words}." for words in ("one minute past nine", "twelve o'clock", PAST_TWELVE)]


def test_the_story_goes_on_where_the_context_says_the_listener_was():
    cut = STORY[: STORY.index("singing")].strip()  # in the second sentence
    go_on = intents.answer("go on", ["Hello.", cut, "All right."], NOON)
    assert STORY.endswith(go_on) and go_on.startswith("It lived under a desk")
    second_cut = go_on[: go_on.index("scales")].strip()
    assert intents.answer("go on", [cut, second_cut], NOON).startswith("Every night")
    assert "story" in intents.answer("go on", [STORY], NOON)
    assert "story" in intents.answer("go on", ["Hello."], NOON)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("user", "Thank you!")], ["You", " are", " welcome."]),
        ([("assistant", "Once upon a"), ("user", "say that again")], ["Once", " upon", " a"]),  # what the context holds
        ([("user", "hello"), ("developer", "not recognized")], None),
    ],
)
async def test_the_script_streams_tokens_between_start_and_end(messages, words):
    async with Talk(ScriptedLLMService()) as talk:
        context = LLMContext([{"role": role, "content": text} for role, text in messages])
        await talk.say(frames.LLMContextFrame(context))
        await talk.until(lambda: talk.of(frames.LLMFullResponseEndFrame))
    start, end = frames.LLMFullResponseStartFrame, frames.LLMFullResponseEndFrame
    first, *tokens, last = talk.of(start, frames.LLMTextFrame, end)
    assert isinstance(first, start) and isinstance(last, end)
    said = [frame.text for frame in tokens]
    assert said == words or (words is None and "did not understand" in "".join(said))


DEEPGRAM = {"DEEPGRAM_API_KEY": "secret"}
OPENAI = {"OPENAI_API_KEY": "secret", **DEEPGRAM}
OLLAMA = {"OPENAI_BASE_URL": "http://localhost:1/v1", "OPENAI_MODEL": "mine", **DEEPGRAM}


@pytest.mark.parametrize(
    ("environment", "stt", "llm", "words"),
    [
        pytest.param({}, PocketsphinxSTTService, ScriptedLLMService, "a script", marks=OFFLINE_STT),
        (DEEPGRAM, DeepgramSTTService, ScriptedLLMService, "a script"),
        (OPENAI, DeepgramSTTService, OpenAILLMService, "gpt-4.1 at OpenAI"),
        (OLLAMA, DeepgramSTTService, OpenAILLMService, "mine at http://localhost:1/v1"),
    ],
)
def test_the_environment_chooses_the_services_where_no_argument_does(environment, stt, llm, words):
    assert from_environment(environment, llm="scripted", voice="vivian").llm == "scripted"
    settings = from_environment(environment)
    assert type(create_stt(settings)) is stt
    assert type(create_llm(settings)) is llm
    assert words in settings.parts()["llm"]
    assert "secret" not in repr(settings) + "".join(settings.describe())


async def test_latencies_are_counted_from_the_end_and_the_onset_of_speech(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(latency, "time", SimpleNamespace(time=lambda: now[0]))
    observer = latency.LatencyObserver()

    async def at(now_s: float, *pushed) -> None:
        now[0] = now_s
        for frame in pushed:
            await observer.on_push_frame(FramePushed(None, None, frame, FrameDirection.DOWNSTREAM, 0))

    audio = frames.TTSAudioRawFrame(b"\0\0", 24_000, 1)
    await at(100.0, frames.BotStartedSpeakingFrame())  # a greeting: no turn of the user
    await at(101.0, frames.VADUserStartedSpeakingFrame(start_secs=0.2, timestamp=100.9))
    await at(101.1, frames.BotStoppedSpeakingFrame(), frames.LLMTextFrame("stale"), audio)
    await at(102.0, frames.VADUserStoppedSpeakingFrame(stop_secs=0.2, timestamp=101.9))
    await at(102.1, frames.TranscriptionFrame("hello", "", ""))
    await at(102.2, frames.LLMFullResponseStartFrame(), frames.LLMTextFrame("Hi "))
    await at(102.4, frames.LLMTextFrame("there."), audio)
    await at(102.5, frames.BotStartedSpeakingFrame())
    await at(103.0, frames.VADUserStartedSpeakingFrame(start_secs=0.2, timestamp=103.0))
    (turn,) = observer.turns
    assert (turn.turn, turn.user, turn.reply) == (1, "hello", "Hi there.")
    times = [getattr(turn, name) for name in latency.TIMES]
    assert times == pytest.approx([400, 500, 700, 800, 400])  # from 101.7, the last from 100.7


async def test_only_what_leaves_the_voice_behind_an_interruption_is_stale():
    observer, before, voice = latency.LatencyObserver(), object(), object.__new__(MkttsTTSService)
    audio, interruption = frames.TTSAudioRawFrame(b"\0\0", 24_000, 1, context_id="a"), frames.InterruptionFrame()
    for source, frame, stale in (
        (voice, audio, 0),
        (before, interruption, 0),
        (voice, audio, 0),  # the voice has not heard of it yet
        (voice, interruption, 0),
        (before, audio, 0),
        (voice, audio, 1),
    ):
        first = (source, frame) != (voice, interruption)
        await observer.on_push_frame(FramePushed(source, None, frame, FrameDirection.DOWNSTREAM, 0, first_push=first))
        assert observer.stale_frames == stale


# ---- Whisper, over a stand-in for faster-whisper


with_whisper = partial(AgentSettings, stt="whisper", device="cpu")


@pytest.fixture
def whisper(monkeypatch):
    def load(name: str, device: str, device_index: int) -> SimpleNamespace:
        if name == "org/absent":
            raise RuntimeError("LocalEntryNotFoundError: no network\n  and no cache")
        return SimpleNamespace(supported_languages=["en"] if name.endswith(".en") else ["en", "de"])

    package = ModuleType("faster_whisper")
    package.WhisperModel = load
    package.__spec__ = SimpleNamespace(name="faster_whisper")
    monkeypatch.setitem(sys.modules, "faster_whisper", package)
    stt._whisper_model.cache_clear()
    yield
    for name in ("pipecat.services.whisper.stt", "pipecat.services.whisper"):
        sys.modules.pop(name, None)  # they hold the stand-in


def test_conversations_share_one_whisper_of_the_language_that_is_named_and_one_that_cannot_be_is_one_line(whisper):
    one, other = create_stt(with_whisper()), create_stt(with_whisper())
    assert one._model is other._model and one._settings.language is None
    for language, name in ((Language.EN, "english"), (Language.DE, "german")):
        assert create_stt(with_whisper(language=name))._settings.language == language
    for changes, words in (
        ({"stt_model": "org/absent"}, "no network and no cache"),
        ({"stt_model": "base.en", "language": "german"}, "cannot transcribe"),
    ):
        with pytest.raises(AgentError, match=words) as refused:
            create_stt(with_whisper(**changes))
        assert "\n" not in str(refused.value)
