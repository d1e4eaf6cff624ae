"""The agent's parts: what its ears know, what its mind answers, which of them are chosen, what is measured."""

from __future__ import annotations

import itertools
import re
import sys
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
from absent import needs
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.observers.base_observer import FramePushed
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat_fakes import Talk

from mktts import cli
from mktts.agent import intents, latency, user_speech
from mktts.agent.ears import PocketsphinxSTTService, decode, make_decoder, make_ears
from mktts.agent.intents import INTENTS, STORY, Turn
from mktts.agent.mind import ScriptedLLMService, make_mind
from mktts.agent.settings import AgentSettings, from_environment
from mktts.errors import AgentError

NOON = datetime(2026, 1, 1, 12, 0)
OFFLINE_EARS = needs("pocketsphinx")
PAUSE = bytes(user_speech.USER_RATE_HZ)  # half a second


def said(*messages: str) -> Turn:
    return Turn(said=messages, now=NOON)


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(intents.grammar(), user_speech.USER_RATE_HZ)


@OFFLINE_EARS
@pytest.mark.parametrize("text", user_speech.TEXTS)
def test_the_offline_ears_understand_every_recording(decoder, text):
    assert decode(decoder, user_speech.load(text).tobytes() + PAUSE) == text


@OFFLINE_EARS
@pytest.mark.parametrize("level", [0, 3_000])
def test_what_is_no_speech_gives_no_transcript(decoder, level):
    noise = np.random.default_rng(0).normal(0, level, user_speech.USER_RATE_HZ).astype("<i2")
    assert decode(decoder, noise.tobytes()) == ""


def test_the_recordings_are_small_and_begin_and_end_with_sound():
    sizes = [user_speech.recording(text).stat().st_size for text in user_speech.TEXTS]
    assert sum(sizes) < 400_000
    for text in user_speech.TEXTS:
        pcm = user_speech.load(text)
        assert abs(int(pcm[0])) > 100 and abs(int(pcm[-1])) > 100
    with pytest.raises(AgentError, match="'hello'"):
        user_speech.recording("no such text")


@OFFLINE_EARS
def test_a_grammar_with_unknown_words_is_refused_by_name():
    with pytest.raises(AgentError, match="JSGF"):
        make_decoder("#JSGF V1.0;\ngrammar g;\npublic <x> = zzyzxq;\n", user_speech.USER_RATE_HZ)


def spellings(phrase: str) -> list[str]:
    """All texts of a phrase with [optional] words and (a | b) choices."""
    parts = re.findall(r"\[[^]]*\]|\([^)]*\)|[^\[(]+", phrase)
    choices = [["", part[1:-1]] if part[0] == "[" else part.strip("()").split("|") for part in parts]
    return [" ".join(" ".join(each).split()) for each in itertools.product(*choices)]


def test_every_phrase_of_the_grammar_gets_its_own_intents_answer():
    for intent in INTENTS:
        for text in itertools.chain(*map(spellings, intent.phrases)):
            assert intents.answer(text, said("Hello.")) == intent.answer(said("Hello.")), text
    assert {text for text in intents.hints()} <= {
        text for intent in INTENTS for phrase in intent.phrases for text in spellings(phrase)
    }


@pytest.mark.parametrize(
    ("hour", "minute", "words"),
    [
        (9, 7, "It is seven minutes past nine."),
        (21, 1, "It is one minute past nine."),
        (0, 0, "It is twelve o'clock."),
        (12, 45, "It is forty-five minutes past twelve."),
        (23, 30, "It is thirty minutes past eleven."),
    ],
)
def test_the_time_is_told_in_words(hour, minute, words):
    assert intents.spoken_time(datetime(2026, 1, 1, hour, minute)) == words


def test_the_story_goes_on_where_the_context_says_the_listener_was():
    cut = STORY[: STORY.index("singing")].strip()  # in the second sentence
    go_on = intents.answer("go on", said("Hello.", cut, "All right."))
    assert STORY.endswith(go_on) and go_on.startswith("It lived under a desk")
    second_cut = go_on[: go_on.index("scales")].strip()
    assert intents.answer("go on", said(cut, second_cut)).startswith("Every night")
    assert "story" in intents.answer("go on", said(STORY))
    assert "story" in intents.answer("go on", said("Hello."))


async def replied(messages: list[dict], **options) -> list:
    talk = Talk(ScriptedLLMService(tokens_per_s=1_000, now=lambda: NOON, **options))
    async with talk:
        await talk.say(LLMContextFrame(LLMContext(messages)))
        await talk.until(lambda: talk.of(LLMFullResponseEndFrame))
    return talk.of(LLMFullResponseStartFrame, LLMTextFrame, LLMFullResponseEndFrame)


async def test_the_script_streams_tokens_between_start_and_end():
    frames = await replied([{"role": "user", "content": "What time is it?"}])
    kinds = [type(frame) for frame in frames]
    assert kinds[0] is LLMFullResponseStartFrame and kinds[-1] is LLMFullResponseEndFrame
    assert [frame.text for frame in frames[1:-1]] == ["It", " is", " twelve", " o'clock."]


async def test_the_script_knows_of_itself_only_what_the_context_holds():
    heard = "Once upon a time there"
    frames = await replied([{"role": "assistant", "content": heard}, {"role": "user", "content": "say that again"}])
    assert "".join(frame.text for frame in frames[1:-1]) == heard


async def test_an_utterance_that_was_not_understood_is_asked_for_again():
    frames = await replied([{"role": "user", "content": "hello"}, {"role": "developer", "content": "not recognized"}])
    assert "did not understand" in "".join(frame.text for frame in frames[1:-1])


async def test_an_interruption_ends_the_scripts_writing():
    talk = Talk(ScriptedLLMService(tokens_per_s=10))  # seconds of margin on a busy machine
    async with talk:
        await talk.say(LLMContextFrame(LLMContext([{"role": "user", "content": "tell me a story"}])))
        await talk.until(lambda: len(talk.of(LLMTextFrame)) > 2)
        await talk.say(InterruptionFrame())
        await talk.until(lambda: talk.of(InterruptionFrame))
    assert len(talk.of(LLMTextFrame)) < len(STORY.split()) / 2


@pytest.mark.parametrize(
    ("environment", "ears", "mind", "words"),
    [
        pytest.param({}, PocketsphinxSTTService, ScriptedLLMService, "a script", marks=OFFLINE_EARS),
        ({"DEEPGRAM_API_KEY": "secret"}, DeepgramSTTService, ScriptedLLMService, "a script"),
        (
            {"OPENAI_API_KEY": "secret", "DEEPGRAM_API_KEY": "secret"},
            DeepgramSTTService,
            OpenAILLMService,
            "gpt-4.1 at OpenAI",
        ),
        (
            {"OPENAI_BASE_URL": "http://localhost:1/v1", "OPENAI_MODEL": "mine", "DEEPGRAM_API_KEY": "secret"},
            DeepgramSTTService,
            OpenAILLMService,
            "mine at http://localhost:1/v1",
        ),
    ],
)
def test_the_environment_chooses_who_hears_and_who_thinks(environment, ears, mind, words):
    settings = from_environment(environment)
    assert type(make_ears(settings)) is ears
    assert type(make_mind(settings)) is mind
    assert words in settings.parts()["mind"]
    assert "secret" not in repr(settings) + "".join(settings.describe())


def test_arguments_go_before_the_environment():
    settings = from_environment({"OPENAI_API_KEY": "k", "MKTTS_VOICE": "ryan"}, mind="scripted", voice="vivian")
    assert (settings.mind, settings.voice) == ("scripted", "vivian")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ears": "deepgram"}, "DEEPGRAM_API_KEY"),
        ({"mind": "openai"}, "OPENAI_BASE_URL"),
        ({"turn_end": "never"}, "smart, timeout"),
    ],
)
def test_a_choice_that_cannot_be_is_told_with_what_to_do(changes, words):
    with pytest.raises(AgentError, match=words):
        AgentSettings(**changes)


async def test_latencies_are_counted_from_the_end_and_the_onset_of_speech(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(latency, "time", SimpleNamespace(time=lambda: now[0]))
    observer = latency.LatencyObserver()

    async def at(now_s: float, *frames) -> None:
        now[0] = now_s
        for frame in frames:
            await observer.on_push_frame(FramePushed(None, None, frame, FrameDirection.DOWNSTREAM, 0))

    audio = TTSAudioRawFrame(b"\0\0", 24_000, 1)
    await at(100.0, BotStartedSpeakingFrame())  # a greeting: no turn of the user
    await at(101.0, VADUserStartedSpeakingFrame(start_secs=0.2, timestamp=100.9))
    await at(101.1, BotStoppedSpeakingFrame(), LLMTextFrame("stale"), audio)
    await at(102.0, VADUserStoppedSpeakingFrame(stop_secs=0.2, timestamp=101.9))
    await at(102.1, TranscriptionFrame("hello", "", ""))
    await at(102.2, LLMFullResponseStartFrame(), LLMTextFrame("Hi "))
    await at(102.4, LLMTextFrame("there."), audio)
    await at(102.5, BotStartedSpeakingFrame())
    await at(103.0, VADUserStartedSpeakingFrame(start_secs=0.2, timestamp=103.0))
    (turn,) = observer.turns
    assert (turn.turn, turn.user, turn.reply) == (1, "hello", "Hi there.")
    times = [getattr(turn, name) for name in latency.TIMES]
    assert times == pytest.approx([400, 500, 700, 800, 400])  # from 101.7, the last from 100.7
    assert latency.table([turn]).splitlines()[1].split() == ["1", "400", "500", "700", "800", "400", "hello"]


@pytest.mark.parametrize(
    ("transport", "hidden", "words"), [("local", "pyaudio", "portaudio19-dev"), ("webrtc", None, "aiortc")]
)
def test_a_missing_package_is_told_by_name(transport, hidden, words, monkeypatch, capsys):
    if hidden is not None:
        monkeypatch.setitem(sys.modules, hidden, None)
        monkeypatch.delitem(sys.modules, "pipecat.transports.local.audio", raising=False)
    monkeypatch.setattr("mktts.agent.web.has_webrtc", lambda: False)
    assert cli.main(["agent", "--transport", transport, "--port", "0"]) == 2
    assert words in capsys.readouterr().err
