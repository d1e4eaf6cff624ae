"""The agent's parts, what it recognises, answers and measures; language models; a whole conversation offline."""

import itertools
import json
import re
import sys
import threading
from datetime import datetime
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import uvicorn
from absent import needs
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pipecat.frames import frames
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.observers.base_observer import FramePushed
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.transcriptions.language import Language
from pipecat_fakes import Talk, metrics
from served import running
from torch import Tensor

from mktts.agent import intents, latency, stt, user_speech
from mktts.agent.intents import INTENTS, STORY
from mktts.agent.llm import Qwen3LLMService, ScriptedLLMService, TextConversation, ThreadedDecoder, create_llm
from mktts.agent.scripted import UserTurn, converse
from mktts.agent.settings import AgentSettings, from_environment
from mktts.agent.stt import PocketsphinxSTTService, create_stt, decode, make_decoder
from mktts.errors import AgentError, EngineError
from mktts.llm.decoder import TextDecoder
from mktts.llm.tokens import Message
from mktts.model.qwen3 import Qwen3Stack
from mktts.pipecat import MkttsTTSService
from mktts.server.settings import Limits, listen
from mktts.spec import SAMPLE_RATE_HZ

NOON = datetime(2026, 1, 1, 12, 0)
OFFLINE_STT = needs("pocketsphinx")  # the speech to text that the agent has without a key
PAST_TWELVE = "forty-five minutes past twelve"
with_whisper = partial(AgentSettings, stt="whisper", device="cpu")
DEEPGRAM = {"DEEPGRAM_API_KEY": "secret"}
OPENAI = {"OPENAI_API_KEY": "secret", **DEEPGRAM}
OLLAMA = {"OPENAI_BASE_URL": "http://localhost:1/v1", "OPENAI_MODEL": "mine", **DEEPGRAM}


@OFFLINE_STT
def test_the_grammar_recognises_every_recording_and_nothing_in_noise():
    decoder = make_decoder(user_speech.USER_RATE_HZ)
    for text in user_speech.TEXTS:
        assert decode(decoder, user_speech.load(text).tobytes() + bytes(user_speech.USER_RATE_HZ)) == text  # and 0.5 s
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
    assert intents.answer("go on", [cut, go_on[: go_on.index("scales")].strip()], NOON).startswith("Every night")
    assert "story" in intents.answer("go on", [STORY], NOON)
    assert "story" in intents.answer("go on", ["Hello."], NOON)


async def ask(talk: Talk, *messages: dict, answers: int = 1) -> None:
    await talk.say(frames.LLMContextFrame(LLMContext(list(messages))))
    await talk.until(lambda: len(talk.of(frames.LLMFullResponseEndFrame)) == answers)


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
        await ask(talk, *({"role": role, "content": text} for role, text in messages))
    start, end = frames.LLMFullResponseStartFrame, frames.LLMFullResponseEndFrame
    first, *tokens, last = talk.of(start, frames.LLMTextFrame, end)
    assert isinstance(first, start) and isinstance(last, end)
    said = [frame.text for frame in tokens]
    assert said == words or (words is None and "did not understand" in "".join(said))


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
    assert type(create_stt(settings)) is stt and type(create_llm(settings)) is llm
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
    for model, words in (("org/absent", "no network and no cache"), ("base.en", "cannot transcribe")):
        with pytest.raises(AgentError, match=words) as refused:
            create_stt(with_whisper(stt_model=model, language="german"))
        assert "\n" not in str(refused.value)


# ---- language models: a tiny Qwen3 of random weights

ASKED = {"role": "user", "content": "Who are you?"}
INSTRUCTIONS = "Be brief."
REPLY_TOKENS = 12
SYSTEM, HELLO = Message("system", "Be brief.\nAlways."), Message("user", "Hello there, what is 3 + 4?")
WORDS = ["I am", " a small", " model."]


@pytest.fixture(scope="module")
def model(checkpoint_cache):
    made = ThreadedDecoder(TextDecoder.load("random:tiny", device="cpu"))
    yield made
    made.close()


def service(model: ThreadedDecoder, reply_tokens: int = REPLY_TOKENS) -> Qwen3LLMService:
    made = Qwen3LLMService(model, instructions=INSTRUCTIONS, seed=3)
    made.conversation = TextConversation(model.decoder, reply_tokens=reply_tokens)
    return made


def words(talk: Talk) -> str:
    return "".join(frame.text for frame in talk.of(frames.LLMTextFrame))


async def test_the_words_are_the_models_and_a_second_turn_keeps_the_first(model):
    async with Talk(service(model)) as talk:
        await ask(talk, ASKED)
        said = words(talk)
        await ask(talk, ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}, answers=2)
    alone = TextConversation(model.decoder, reply_tokens=REPLY_TOKENS)
    assert said and said == alone.reply([Message("system", INSTRUCTIONS), Message("user", "Who are you?")], 3).read()
    assert len(talk.of(frames.LLMFullResponseStartFrame)) == 2 and len(talk.of(frames.LLMTextFrame)) > 2
    first, second = [data.value for data in metrics(talk, LLMUsageMetricsData)]
    prompt = alone.template.ids([Message("system", INSTRUCTIONS), Message("user", "Who are you?")])
    assert (first.prompt_tokens, first.cache_read_input_tokens) == (len(prompt), 0)
    assert second.cache_read_input_tokens == prompt.index(alone.template.think)  # all but the thought's place


async def test_an_interruption_ends_a_reply_within_one_token(model, monkeypatch):
    """The model is held inside a token while the interruption passes: that token is its last, and is not pushed."""
    inside, go_on, made = threading.Event(), threading.Event(), []
    step = type(model.decoder._backend).step

    def held(backend, state):
        if len(made) == 3:
            inside.set()
            assert go_on.wait(60)
        made.append(step(backend, state))
        return made[-1]

    monkeypatch.setattr(type(model.decoder._backend), "step", held)
    llm = service(model, reply_tokens=60)
    async with Talk(llm) as talk:
        await talk.say(frames.LLMContextFrame(LLMContext([ASKED])))
        await talk.until(inside.is_set)
        before = b"".join(map(model.decoder.vocabulary.data, made)).decode()
        await talk.until(lambda: words(talk) == before)
        await talk.say(frames.InterruptionFrame())
        await talk.until(lambda: talk.of(frames.InterruptionFrame))  # it waits for no token
        go_on.set()
        await model.run(lambda: None)  # the thread is done with what was asked of it
        assert len(made) == 4 and llm.conversation._said.finish_reason == "cancelled"
        assert words(talk) == before
        await ask(talk, {"role": "user", "content": "Go on."}, answers=2)  # and it answers again
    assert len(words(talk)) > len(before) and not talk.of(frames.ErrorFrame)


async def test_a_failed_model_is_said_and_the_turn_ends_and_leaves_nothing_to_go_on_from(model, monkeypatch):
    llm = service(model)
    with monkeypatch.context() as broken:
        broken.setattr(type(model.decoder._backend), "step", Mock(side_effect=EngineError("the kernel stopped")))
        async with Talk(llm) as talk:
            await ask(talk, ASKED)
            (error,) = [frame for frame in talk.up if isinstance(frame, frames.ErrorFrame)]
    assert "the kernel stopped" in error.error and llm.conversation._said.failed
    llm.conversation.reply([Message("system", INSTRUCTIONS), Message("user", "Who are you?")], seed=1)
    assert llm.conversation.kept_tokens == 0


def test_the_arguments_choose_it_and_speak_its_tokens(checkpoint_cache):
    settings = from_environment({}, llm="qwen3", llm_checkpoint="random:tiny", device="cpu")
    assert settings.tokens and "random:tiny" in settings.parts()["llm"]
    llm, again = create_llm(settings), create_llm(settings)
    assert isinstance(llm, Qwen3LLMService) and llm._model is again._model
    assert not from_environment({}, llm="qwen3", tokens=False).tokens and not from_environment({}).tokens


# ---- the cache of a conversation


def test_what_an_interruption_left_is_kept_and_the_rest_is_computed(model, monkeypatch):
    rows: list[int] = []
    advance = Qwen3Stack.advance

    def counted(stack: Qwen3Stack, x: Tensor, *caches: object) -> Tensor:
        rows.append(len(x))
        return advance(stack, x, *caches)

    monkeypatch.setattr(Qwen3Stack, "advance", counted)
    conversation = TextConversation(model.decoder)
    cut = conversation.reply([SYSTEM, HELLO], seed=1)
    assert rows == [conversation.computed_tokens] and conversation.kept_tokens == 0
    for _ in range(3):
        next(cut)
    cut.cancel()
    assert list(cut) == [] and cut.finish_reason == "cancelled"
    rows.clear()
    heard = [SYSTEM, HELLO, Message("assistant", "Other words."), Message("user", "Stop.")]
    stream, ids = conversation.reply(heard, seed=1), conversation.template.ids(heard)
    # up to the thought that the template has told it not to think
    assert conversation.kept_tokens == conversation.template.ids([SYSTEM, HELLO]).index(conversation.template.think)
    assert rows == [conversation.computed_tokens] == [len(ids) - conversation.kept_tokens]
    alone = model.decoder.generate(ids, seed=1, max_tokens=6)
    assert [next(stream).id for _ in range(6)] == [token.id for token in alone]


# ---- a server of OpenAI's shape


async def test_a_server_of_ones_own_answers_without_a_key():
    app, asked = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def complete(body: dict) -> StreamingResponse:
        asked.append(body)
        part = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        choices = [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in WORDS]
        events = [json.dumps({**part, "choices": [choice]}) for choice in choices]
        return StreamingResponse(iter([f"data: {event}\n\n" for event in (*events, "[DONE]")]))

    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with listen("127.0.0.1", 0, Limits()) as bound, running(server, bound) as url:
        environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "mine"}
        async with Talk(create_llm(from_environment(environment, instructions=INSTRUCTIONS))) as talk:
            await ask(talk, ASKED)
    assert [frame.text for frame in talk.of(frames.LLMTextFrame)] == WORDS
    (body,) = asked
    assert (body["model"], body["stream"]) == ("mine", True)
    assert body["messages"] == [{"role": "system", "content": INSTRUCTIONS}, ASKED]


# ---- a conversation: recorded user speech in, an interruption, a context that holds what was heard


@OFFLINE_STT
async def test_a_text_that_was_not_recorded_is_told_before_anything_is_loaded():
    with pytest.raises(AgentError, match="'hello'.*no such text"):
        await converse(from_environment({}, checkpoint="absent-folder"), [UserTurn("no such text")])


@OFFLINE_STT
async def test_a_conversation_with_an_interruption(checkpoint_cache):
    script = (UserTurn("tell me a story"), UserTurn("stop please", after_s=1.0))
    settings = from_environment({}, checkpoint="random:tiny", turn_end="timeout", greeting="", seed=1)
    talk = await converse(settings, script)
    story, stop = talk.turns
    assert [turn.user for turn in talk.turns] == [turn.text for turn in script]
    for turn in talk.turns:
        assert 0 < turn.transcript_ms <= turn.first_token_ms <= turn.first_audio_ms <= turn.speaking_ms
    assert story.silence_ms is None and stop.silence_ms > 0 and story.interrupted and not stop.interrupted
    # The context holds what was heard of the story, and all of the answer to the interruption.
    roles = [(message["role"], message["content"]) for message in talk.messages]
    assert roles[0] == ("user", "tell me a story") and roles[2] == ("user", "stop please")
    heard = roles[1][1]
    assert STORY.startswith(heard) and 0 < len(heard) < len(STORY) / 2 and heard == story.heard
    assert roles[3] == ("assistant", stop.reply) and stop.reply == stop.heard
    assert talk.stale_frames == 0
    assert len(talk.user) == len(talk.bot) > SAMPLE_RATE_HZ
    assert np.abs(talk.user).max() > 0.3 and np.abs(talk.bot).max() > 0.05 and talk.random_weights
