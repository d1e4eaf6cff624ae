"""The language model: OpenAI or a server of its shape, Qwen3 text in this process, or a script that reads a table."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime
from itertools import islice, takewhile
from typing import Any, get_args

from pipecat.frames import frames
from pipecat.metrics.metrics import LLMTokenUsage
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.llm_service import LLMService
from pipecat.services.settings import LLMSettings

from mktts.agent import intents
from mktts.agent.settings import AgentSettings
from mktts.errors import EngineError, MkttsError
from mktts.llm.decoder import TextBackendName, TextDecoder, TokenStream
from mktts.llm.tokens import ChatTemplate, Message

PROMPT_TOKENS = 768  # together with a reply within the 1 024 rows that the prefill's graphs take
REPLY_TOKENS = 256
SCRIPT_TOKENS_PER_S = 50.0  # a small model on a desktop: the rest of the pipeline runs as it would behind a real one
_WARM_UP_TOKENS = 2
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def create_llm(settings: AgentSettings) -> LLMService:
    """The service that `settings` name; the first of a Qwen3 model loads it, for seconds. Raises CheckpointError,
    BackendUnavailable."""
    if settings.llm == "qwen3":
        return Qwen3LLMService(shared_model(settings), instructions=settings.instructions, seed=settings.seed)
    if settings.llm == "openai":
        from pipecat.services.openai.llm import OpenAILLMService

        return OpenAILLMService(
            api_key=settings.openai_key or "none",  # a local server wants no key, but OpenAI's client demands one
            base_url=settings.openai_url,
            settings=OpenAILLMService.Settings(model=settings.openai_model, system_instruction=settings.instructions),
        )
    return ScriptedLLMService()


class LocalLLMService(LLMService):
    """Answers a context by `_answer`. A named error is pushed upstream, and the next context answered again."""

    def __init__(self, model: str, *, instructions: str | None = None, seed: int | None = None) -> None:
        """model: its name. instructions: what the model is told first. seed: repeats the replies of a conversation."""
        settings: dict[str, Any] = dict.fromkeys(field.name for field in fields(LLMSettings))
        settings |= {"model": model, "system_instruction": instructions, "seed": seed, "extra": {}}
        settings |= {"filter_incomplete_user_turns": False, "use_provider_thinking_default": False}
        super().__init__(settings=LLMSettings(**settings))

    def can_generate_metrics(self) -> bool:
        return True

    async def process_frame(self, frame: frames.Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, frames.LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        try:
            await self.push_frame(frames.LLMFullResponseStartFrame())
            await self.start_processing_metrics()
            await self.start_ttfb_metrics()
            given = [one for one in frame.context.get_messages() if isinstance(one, dict)]
            await self._answer([Message(one["role"], _text_of(one.get("content"))) for one in given])
        except MkttsError as error:
            permanent = isinstance(error, EngineError)  # after a CUDA error every later call fails too
            await self.push_error(f"the model failed: {error}", exception=error, force_treat_as_permanent=permanent)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(frames.LLMFullResponseEndFrame())

    @abstractmethod
    async def _answer(self, messages: list[Message]) -> None:
        """Pushes the reply, token by token; stops the metrics of the first byte at the first one."""


def _text_of(content: Any) -> str:
    """What stands in a message, its parts that are text joined."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content or () if isinstance(part, dict) and part.get("type") == "text")


class ScriptedLLMService(LocalLLMService):
    """Answers from `mktts.agent.intents`, one token after another. What it knows is the context, as for any model."""

    def __init__(self) -> None:
        super().__init__("scripted")

    async def _answer(self, messages: list[Message]) -> None:
        said = [message.content for message in messages if message.role == "assistant"]
        # Pipecat asks with a developer's message where the user spoke and was not understood.
        question = messages[-1].content if messages and messages[-1].role == "user" else ""
        reply = intents.answer(question, said, datetime.now())
        for number, word in enumerate(reply.split(" ")):
            await asyncio.sleep(1 / SCRIPT_TOKENS_PER_S)
            await self.stop_ttfb_metrics()
            await self.push_frame(frames.LLMTextFrame(f" {word}" if number else word))  # as most models write


class TextConversation:
    """Replies of one decoder to a growing list of messages; what it has read and said stays in its key-value cache, so
    that a turn costs its own tokens and not the conversation's. Belongs to the decoder's thread.

    computed_tokens, kept_tokens: of the last reply's prompt; the kept ones were in the cache already."""

    def __init__(self, decoder: TextDecoder, reply_tokens: int = REPLY_TOKENS) -> None:
        """reply_tokens: at most; the oldest messages are left out of a prompt of more than PROMPT_TOKENS."""
        self.template = ChatTemplate.of(decoder.checkpoint.folder, decoder.vocabulary)
        self.computed_tokens = self.kept_tokens = 0
        positions = decoder.checkpoint.config.stack.max_position_embeddings
        self._decoder = decoder
        self._reply_tokens = min(reply_tokens, positions // 2)
        self._prompt_tokens = min(PROMPT_TOKENS, positions - self._reply_tokens)
        self._left_out = 0  # of the oldest messages
        self._read: list[int] = []  # the last prompt
        self._said: TokenStream | None = None
        self._state: Any = None

    def reply(self, messages: Sequence[Message], seed: int | None = None) -> TokenStream:
        """The reply, token by token; the reply before it ends here, if it has not ended. Raises TextError for messages
        that are none or too long, and what `TextDecoder.generate` raises."""
        ids, self._left_out = self.template.ids_within(messages, self._prompt_tokens, self._left_out)
        said, state, keep = self._said, self._state, 0
        self._state = self._said = None  # a failure below leaves nothing to go on from
        if said is not None:
            said.cancel()
            if not said.failed:
                held = [*self._read, *said.ids[:-1]]  # the newest token was never computed
                keep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids[:-1], strict=False)))
        stream = self._decoder.generate(ids, seed=seed, max_tokens=self._reply_tokens, after=(state, keep))
        self.kept_tokens, self.computed_tokens = keep, len(ids) - keep
        self._read, self._said, self._state = ids, stream, stream.state
        return stream


class ThreadedDecoder:
    """A text model and the thread that it works on. Conversations take turns on it, token by token."""

    def __init__(self, decoder: TextDecoder) -> None:
        self.decoder = decoder
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mktts-llm")

    async def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """What `call` returns or raises, called on the thread when its turn comes. Cancelling the wait stops no call
        that runs; one that has not begun never does."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *given)

    def close(self) -> None:
        """Waits for the call that runs, then drops the model."""
        self.thread.shutdown(cancel_futures=True)
        self.decoder.close()


_models: dict[Hashable, ThreadedDecoder] = {}
_loading = threading.Lock()


def shared_model(settings: AgentSettings) -> ThreadedDecoder:
    """The process's Qwen3 model for these settings, loaded at the first call: seconds, so not from an event loop.
    Raises CheckpointError, BackendUnavailable."""
    backend = settings.backend if settings.backend in get_args(TextBackendName) else "auto"
    key = (settings.llm_checkpoint, backend, settings.device)
    with _loading:
        if key not in _models:
            decoder = TextDecoder.load(settings.llm_checkpoint, backend=backend, device=settings.device)
            conversation = TextConversation(decoder)  # a model without turns is refused here
            list(islice(conversation.reply([Message("user", "Hello.")]), _WARM_UP_TOKENS))
            _models[key] = ThreadedDecoder(decoder)
        return _models[key]


def close_shared_models() -> None:
    """Drops the models. The next call loads again."""
    with _loading:
        while _models:
            _models.popitem()[1].close()


class Qwen3LLMService(LocalLLMService):
    """Answers a context with a Qwen3 text model of this process. An interruption ends a reply within the token that is
    being made; its tokens, and the conversation before it, stay in the cache."""

    def __init__(self, model: ThreadedDecoder, *, instructions: str | None = None, seed: int | None = None) -> None:
        """instructions: what the model is told first. seed: None draws a new one for every reply."""
        super().__init__(model.decoder.checkpoint.folder.name, instructions=instructions, seed=seed)
        self.conversation = TextConversation(model.decoder)
        self._model = model

    @property
    def runs(self) -> str:
        """How the model runs, in words that follow `AgentSettings.parts`."""
        decoder = self._model.decoder
        meaning = ", random weights: its words mean nothing" if decoder.checkpoint.is_random else ""
        return f", {decoder.backend_name} on {decoder.device}{meaning}"

    async def _answer(self, messages: list[Message]) -> None:
        conversation, model, first = self.conversation, self._model, self._settings.system_instruction
        said = [Message("system", first), *messages] if first else messages
        said = [Message(_ROLES[role], text) for role, text in said if role in _ROLES and text]
        stream: TokenStream | None = None
        try:
            stream = await model.run(conversation.reply, said, self._settings.seed)
            silent = False  # inside a thought: a model that is not to think may do so all the same
            while (token := await model.run(next, stream, None)) is not None:
                await self.stop_ttfb_metrics()
                if token.id in (conversation.template.think, conversation.template.thought):
                    silent = token.id == conversation.template.think
                elif token.text and not silent:
                    await self.push_frame(frames.LLMTextFrame(token.text))
        finally:
            if stream is not None:
                model.thread.submit(stream.cancel)
        kept, said = conversation.kept_tokens, len(stream.ids)
        read = kept + conversation.computed_tokens
        usage = LLMTokenUsage(
            prompt_tokens=read, completion_tokens=said, total_tokens=read + said, cache_read_input_tokens=kept
        )
        await self.start_llm_usage_metrics(usage)
