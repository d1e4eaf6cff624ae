"""The language model: OpenAI or a compatible server, a Qwen3 text model in this process, or scripted answers."""

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

PROMPT_TOKENS = 768  # with a reply, fits in the 1 024 rows of the prefill's CUDA graphs
REPLY_TOKENS = 256
SCRIPT_TOKENS_PER_S = 50.0  # the speed of a small model on a desktop, so that the pipeline runs as with a real model
_WARM_UP_TOKENS = 2
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def create_llm(settings: AgentSettings) -> LLMService:
    """Creates the LLM service that `settings` select. The first one for a Qwen3 model takes seconds to load it. Raises
    CheckpointError, BackendUnavailable."""
    if settings.llm == "qwen3":
        return Qwen3LLMService(shared_model(settings), instructions=settings.instructions, seed=settings.seed)
    if settings.llm == "openai":
        from pipecat.services.openai.llm import OpenAILLMService

        return OpenAILLMService(
            api_key=settings.openai_key or "none",  # OpenAI's client requires a key, even for a local server
            base_url=settings.openai_url,
            settings=OpenAILLMService.Settings(model=settings.openai_model, system_instruction=settings.instructions),
        )
    return ScriptedLLMService()


class LocalLLMService(LLMService):
    """Answers each context with `_answer`. An MkttsError is pushed upstream, and the service goes on."""

    def __init__(self, model: str, *, instructions: str | None = None, seed: int | None = None) -> None:
        """model: its name. instructions: the system prompt. seed: makes the replies of a conversation repeatable."""
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
            permanent = isinstance(error, EngineError)  # after a CUDA error all later calls fail, too
            await self.push_error(f"the model failed: {error}", exception=error, force_treat_as_permanent=permanent)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(frames.LLMFullResponseEndFrame())

    @abstractmethod
    async def _answer(self, messages: list[Message]) -> None:
        """Pushes the reply token by token, and stops the TTFB metrics at the first one."""


def _text_of(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content or () if isinstance(part, dict) and part.get("type") == "text")


class ScriptedLLMService(LocalLLMService):
    """Answers from `mktts.agent.intents`, token by token. Like any model, it knows only the context."""

    def __init__(self) -> None:
        super().__init__("scripted")

    async def _answer(self, messages: list[Message]) -> None:
        said = [message.content for message in messages if message.role == "assistant"]
        # If the user's speech gave no transcript, Pipecat's last message has the role "developer".
        question = messages[-1].content if messages and messages[-1].role == "user" else ""
        reply = intents.answer(question, said, datetime.now())
        for number, word in enumerate(reply.split(" ")):
            await asyncio.sleep(1 / SCRIPT_TOKENS_PER_S)
            await self.stop_ttfb_metrics()
            await self.push_frame(frames.LLMTextFrame(f" {word}" if number else word))  # spaces as in most tokenizers


class TextConversation:
    """Generates replies to a growing list of messages. Prompt and replies stay in the key-value cache, so that each
    turn only computes its new tokens. Use it on the decoder's thread only.

    computed_tokens, kept_tokens: of the last reply's prompt; the kept ones were already in the cache."""

    def __init__(self, decoder: TextDecoder, reply_tokens: int = REPLY_TOKENS) -> None:
        """reply_tokens: the longest reply. A prompt longer than PROMPT_TOKENS loses its oldest messages."""
        self.template = ChatTemplate.of(decoder.checkpoint.folder, decoder.vocabulary)
        self.computed_tokens = self.kept_tokens = 0
        positions = decoder.checkpoint.config.stack.max_position_embeddings
        self._decoder = decoder
        self._reply_tokens = min(reply_tokens, positions // 2)
        self._prompt_tokens = min(PROMPT_TOKENS, positions - self._reply_tokens)
        self._left_out = 0  # number of oldest messages left out
        self._read: list[int] = []  # the last prompt
        self._said: TokenStream | None = None
        self._state: Any = None

    def reply(self, messages: Sequence[Message], seed: int | None = None) -> TokenStream:
        """Starts a reply, which is read token by token; cancels the previous reply if it still runs. Raises TextError
        if there are no messages or they are too long, and what `TextDecoder.generate` raises."""
        ids, self._left_out = self.template.ids_within(messages, self._prompt_tokens, self._left_out)
        said, state, keep = self._said, self._state, 0
        self._state = self._said = None  # after a failure below, the next reply starts afresh
        if said is not None:
            said.cancel()
            if not said.failed:
                held = [*self._read, *said.ids[:-1]]  # the newest token is not in the cache
                keep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids[:-1], strict=False)))
        stream = self._decoder.generate(ids, seed=seed, max_tokens=self._reply_tokens, after=(state, keep))
        self.kept_tokens, self.computed_tokens = keep, len(ids) - keep
        self._read, self._said, self._state = ids, stream, stream.state
        return stream


class ThreadedDecoder:
    """A text model and its worker thread, which conversations share token by token."""

    def __init__(self, decoder: TextDecoder) -> None:
        self.decoder = decoder
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mktts-llm")

    async def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """Runs `call` on the worker thread, and returns or raises what it does. Cancelling drops a queued call, but
        does not stop one that is running."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, call, *given)

    def close(self) -> None:
        """Waits for the running call, cancels queued ones, and releases the model."""
        self.thread.shutdown(cancel_futures=True)
        self.decoder.close()


_models: dict[Hashable, ThreadedDecoder] = {}
_loading = threading.Lock()


def shared_model(settings: AgentSettings) -> ThreadedDecoder:
    """The process's Qwen3 model for these settings. The first call loads it for seconds: not on an event loop. Raises
    CheckpointError, BackendUnavailable."""
    backend = settings.backend if settings.backend in get_args(TextBackendName) else "auto"
    key = (settings.llm_checkpoint, backend, settings.device)
    with _loading:
        if key not in _models:
            decoder = TextDecoder.load(settings.llm_checkpoint, backend=backend, device=settings.device)
            conversation = TextConversation(decoder)  # refuses a model without chat tokens
            list(islice(conversation.reply([Message("user", "Hello.")]), _WARM_UP_TOKENS))
            _models[key] = ThreadedDecoder(decoder)
        return _models[key]


def close_shared_models() -> None:
    """Closes all shared models; `shared_model` loads them again."""
    with _loading:
        while _models:
            _models.popitem()[1].close()


class Qwen3LLMService(LocalLLMService):
    """Answers contexts with a Qwen3 text model in this process. An interruption ends a reply within one token; the
    reply and the conversation before it stay in the key-value cache."""

    def __init__(self, model: ThreadedDecoder, *, instructions: str | None = None, seed: int | None = None) -> None:
        """instructions: the system prompt. seed: None draws a new one for every reply."""
        super().__init__(model.decoder.checkpoint.folder.name, instructions=instructions, seed=seed)
        self.conversation = TextConversation(model.decoder)
        self._model = model

    @property
    def runs(self) -> str:
        """A description of backend and device to append to the "llm" of `AgentSettings.parts`."""
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
            silent = False  # inside a <think> block, which the model may write although the template forbids it
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
