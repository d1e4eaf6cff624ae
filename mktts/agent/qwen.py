"""A mind on the same kernel: Qwen3 text through `mktts.llm`, its tokens pushed as they are made.

One model a process, on one thread; conversations take turns on it, token by token. What a conversation has said and
heard stays in its key-value cache, so that a turn costs its own tokens and not the conversation's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

from pipecat.frames.frames import LLMTextFrame
from pipecat.metrics.metrics import LLMTokenUsage
from pipecat.processors.aggregators.llm_context import LLMContext

from mktts.agent.answering import AnsweringService
from mktts.agent.intents import text_of
from mktts.agent.settings import AgentSettings
from mktts.llm.chat import Message
from mktts.llm.conversation import TextConversation
from mktts.llm.decoder import TextBackendName, TextDecoder
from mktts.llm.stream import Token, TokenStream

_WARM_UP_TOKENS = 2


class Thinker:
    """A text model and the thread that it works on."""

    def __init__(self, decoder: TextDecoder) -> None:
        self.decoder = decoder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mktts-mind")

    async def run(self, call: Callable[..., Any], *given: Any) -> Any:
        """What `call` returns or raises, called on the thread when its turn comes. Who stops waiting stops no call that
        runs, and one that has not begun never does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    def post(self, call: Callable[..., Any], *given: Any) -> None:
        """As `run`, for a call that nobody waits for."""
        self._thread.submit(call, *given)

    def close(self) -> None:
        """Waits for the call that runs; the model is let go of."""
        self._thread.shutdown(cancel_futures=True)
        self.decoder.close()


_thinkers: dict[Hashable, Thinker] = {}
_loading = threading.Lock()


def shared_thinker(settings: AgentSettings) -> Thinker:
    """The process's thinker for these settings, loaded at the first call: seconds, so not from an event loop.

    Raises CheckpointError, BackendUnavailable.
    """
    backend = settings.backend if settings.backend in get_args(TextBackendName) else "auto"
    key = (os.getpid(), settings.mind_checkpoint, backend, settings.device)
    with _loading:
        if key not in _thinkers:
            decoder = TextDecoder.load(settings.mind_checkpoint, backend=backend, device=settings.device)
            conversation = TextConversation(decoder)  # a model without turns is refused here
            for _ in zip(range(_WARM_UP_TOKENS), conversation.reply([Message("user", "Hello.")]), strict=False):
                pass
            _thinkers[key] = Thinker(decoder)
        return _thinkers[key]


def close_shared_thinkers() -> None:
    """Lets go of the models. The next call loads again."""
    with _loading:
        while _thinkers:
            _thinkers.popitem()[1].close()


class Qwen3LLMService(AnsweringService):
    """Answers a context with a Qwen3 text model of this process.

    An interruption ends a reply within the token that is being made; its tokens, and the conversation before it, stay
    in the cache.
    """

    def __init__(
        self, thinker: Thinker, *, instructions: str | None = None, seed: int | None = None, **kwargs: Any
    ) -> None:
        """Initialize the service.

        Args:
            thinker: The model.
            instructions: What the model is told first.
            seed: Makes the same conversation the same replies; None draws a new one for every reply.
            **kwargs: Additional arguments passed to ``LLMService``.
        """
        name = thinker.decoder.checkpoint.folder.name
        super().__init__(name, instructions=instructions, seed=seed, **kwargs)
        self.conversation = TextConversation(thinker.decoder)
        self._thinker = thinker

    async def run_inference(self, context: LLMContext, *_: Any, **__: Any) -> str | None:
        """Answer a context outside the pipeline, and outside its conversation's cache.

        Args:
            context: The conversation so far.

        Returns:
            The whole reply.
        """
        aside = TextConversation(self._thinker.decoder)
        return await self._thinker.run(lambda: aside.reply(self._messages(context), self._settings.seed).read())

    async def _answer(self, context: LLMContext) -> None:
        conversation, thinker = self.conversation, self._thinker
        stream: TokenStream | None = None
        try:
            stream = await thinker.run(conversation.reply, self._messages(context), self._settings.seed)
            silent = False  # inside a thought: a model that was told not to think may do so all the same
            while (token := await thinker.run(_next, stream)) is not None:
                await self.stop_ttfb_metrics()
                if token.id in (conversation.template.think, conversation.template.thought):
                    silent = token.id == conversation.template.think
                elif token.text and not silent:
                    await self.push_frame(LLMTextFrame(token.text))
        finally:
            if stream is not None:
                thinker.post(stream.cancel)
        await self._report(stream)

    async def _report(self, stream: TokenStream) -> None:
        kept, computed = self.conversation.kept_tokens, self.conversation.computed_tokens
        usage = LLMTokenUsage(
            prompt_tokens=kept + computed,
            completion_tokens=len(stream.ids),
            total_tokens=kept + computed + len(stream.ids),
            cache_read_input_tokens=kept,
        )
        await self.start_llm_usage_metrics(usage)

    def _messages(self, context: LLMContext) -> list[Message]:
        given = [message for message in context.get_messages() if isinstance(message, dict)]
        said = [Message(_ROLES[m["role"]], text_of(m)) for m in given if m["role"] in _ROLES]
        first = [Message("system", self._settings.system_instruction)] if self._settings.system_instruction else []
        return first + [message for message in said if message.content]


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _next(stream: TokenStream) -> Token | None:
    return next(stream, None)
