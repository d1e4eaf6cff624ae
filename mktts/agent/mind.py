"""The language model: OpenAI or a server of its shape, Qwen3 in this process, or a script that answers from a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from pipecat.frames.frames import LLMTextFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.llm_service import LLMService

from mktts.agent import intents
from mktts.agent.answering import AnsweringService
from mktts.agent.settings import AgentSettings

_TOKENS_PER_S = 50.0  # a small model on a desktop; so that the rest of the pipeline runs as it would behind a real one


def load_mind(settings: AgentSettings) -> str:
    """Loads the model of a mind in this process, unless it is already; returns how it runs, in words that follow
    `AgentSettings.parts`, "" for a mind that is elsewhere. Raises CheckpointError, BackendUnavailable."""
    if settings.mind != "qwen3":
        return ""
    from mktts.agent.qwen import shared_thinker

    decoder = shared_thinker(settings).decoder
    meaning = ", random weights: its words mean nothing" if decoder.checkpoint.is_random else ""
    return f", {decoder.backend_name} on {decoder.device}{meaning}"


def close_minds() -> None:
    """Lets go of the models of this process."""
    from mktts.agent.qwen import close_shared_thinkers

    close_shared_thinkers()


def make_mind(settings: AgentSettings) -> LLMService:
    """The service that `settings` name. Raises as `load_mind`."""
    if settings.mind == "qwen3":
        from mktts.agent.qwen import Qwen3LLMService, shared_thinker

        return Qwen3LLMService(shared_thinker(settings), instructions=settings.instructions, seed=settings.seed)
    if settings.mind == "openai":
        from pipecat.services.openai.llm import OpenAILLMService

        return OpenAILLMService(
            api_key=settings.openai_key or "none",  # a local server wants no key, but OpenAI's client demands one
            base_url=settings.openai_url,
            settings=OpenAILLMService.Settings(model=settings.openai_model, system_instruction=settings.instructions),
        )
    return ScriptedLLMService()


class ScriptedLLMService(AnsweringService):
    """Answers from `mktts.agent.intents`, one token after another. What it knows is the context, as for any model."""

    def __init__(
        self,
        *,
        tokens_per_s: float = _TOKENS_PER_S,
        now: Callable[[], datetime] = datetime.now,
        **kwargs: Any,
    ) -> None:
        """Initialize the service.

        Args:
            tokens_per_s: How fast it writes; the first token takes as long as any other.
            now: The local time.
            **kwargs: Additional arguments passed to ``LLMService``.
        """
        super().__init__("scripted", **kwargs)
        self._token_s = 1 / tokens_per_s
        self._local_time = now

    async def run_inference(self, context: LLMContext, *_: Any, **__: Any) -> str | None:
        """Answer a context outside the pipeline.

        Args:
            context: The conversation so far.

        Returns:
            The whole reply.
        """
        return self._reply(context)

    async def _answer(self, context: LLMContext) -> None:
        for token in tokens(self._reply(context)):
            await asyncio.sleep(self._token_s)
            await self.stop_ttfb_metrics()
            await self.push_frame(LLMTextFrame(token))

    def _reply(self, context: LLMContext) -> str:
        messages = [message for message in context.get_messages() if isinstance(message, dict)]
        said = [intents.text_of(message) for message in messages if message["role"] == "assistant"]
        # Pipecat asks with a developer's message where the user spoke and was not understood.
        asked = intents.text_of(messages[-1]) if messages and messages[-1]["role"] == "user" else ""
        return intents.answer(asked, intents.Turn(said=said, now=self._local_time()))


def tokens(text: str) -> list[str]:
    """`text` in words, each with the space before it, as most models write."""
    words = text.split(" ")
    return words[:1] + [f" {word}" for word in words[1:]]
