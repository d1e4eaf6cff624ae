"""The agent's language models: a tiny Qwen3 of random weights and a server of OpenAI's shape."""

import json
import threading

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pipecat.frames import frames
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat_fakes import Talk
from served import running
from torch import Tensor

from mktts.agent.llm import Qwen3LLMService, TextConversation, ThreadedDecoder, create_llm
from mktts.agent.settings import from_environment
from mktts.errors import EngineError
from mktts.llm.decoder import TextDecoder
from mktts.llm.tokens import Message
from mktts.model.qwen3 import Qwen3Stack
from mktts.server.settings import Limits, listen

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


async def ask(talk: Talk, *messages: dict, answers: int = 1) -> None:
    await talk.say(frames.LLMContextFrame(LLMContext(list(messages))))
    await talk.until(lambda: len(talk.of(frames.LLMFullResponseEndFrame)) == answers)


async def test_the_words_are_the_models_and_a_second_turn_keeps_the_first(model):
    async with Talk(service(model)) as talk:
        await ask(talk, ASKED)
        said = words(talk)
        await ask(talk, ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}, answers=2)
    alone = TextConversation(model.decoder, reply_tokens=REPLY_TOKENS)
    assert said and said == alone.reply([Message("system", INSTRUCTIONS), Message("user", "Who are you?")], 3).read()
    assert len(talk.of(frames.LLMFullResponseStartFrame)) == 2 and len(talk.of(frames.LLMTextFrame)) > 2
    found = [data for frame in talk.of(frames.MetricsFrame) for data in frame.data]
    first, second = [data.value for data in found if isinstance(data, LLMUsageMetricsData)]
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
    def fail(*_):
        raise EngineError("the kernel stopped")

    llm = service(model)
    with monkeypatch.context() as broken:
        broken.setattr(type(model.decoder._backend), "step", fail)
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
