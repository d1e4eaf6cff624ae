"""A language model of this process as Pipecat takes it: contexts in, the tokens of a reply out."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pipecat.frames.frames import Frame, LLMContextFrame, LLMFullResponseEndFrame, LLMFullResponseStartFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.llm_service import LLMService
from pipecat.services.settings import LLMSettings

from mktts.errors import EngineError, MkttsError


class AnsweringService(LLMService):
    """Answers a context by `_answer`. A named error is pushed upstream, and the next context answered again."""

    def __init__(self, model: str, *, instructions: str | None = None, seed: int | None = None, **kwargs: Any) -> None:
        """Initialize the service.

        Args:
            model: Its name.
            instructions: What the model is told first.
            seed: Makes the same conversation the same replies, where a reply is drawn.
            **kwargs: Additional arguments passed to the parent ``LLMService``.
        """
        super().__init__(
            settings=LLMSettings(
                model=model,
                system_instruction=instructions,
                temperature=None,
                max_tokens=None,
                top_p=None,
                top_k=None,
                frequency_penalty=None,
                presence_penalty=None,
                seed=seed,
                filter_incomplete_user_turns=False,
                user_turn_completion_config=None,
                use_provider_thinking_default=False,
            ),
            **kwargs,
        )

    def can_generate_metrics(self) -> bool:
        """Indicate that this service supports TTFB, processing and usage metrics."""
        return True

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        """Answer a context.

        Args:
            frame: The frame to process.
            direction: The direction of frame processing.
        """
        await super().process_frame(frame, direction)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        try:
            await self.push_frame(LLMFullResponseStartFrame())
            await self.start_processing_metrics()
            await self.start_ttfb_metrics()
            await self._answer(frame.context)
        except MkttsError as error:
            permanent = isinstance(error, EngineError)  # after a CUDA error every later call fails too
            await self.push_error(f"the mind failed: {error}", exception=error, force_treat_as_permanent=permanent)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(LLMFullResponseEndFrame())

    @abstractmethod
    async def _answer(self, context: LLMContext) -> None:
        """Pushes the reply, token by token; stops the metrics of the first byte at the first one."""
