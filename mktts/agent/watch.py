"""What a listener notices: whether the bot speaks, how often it has begun to, and whether it goes on when cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    ErrorFrame,
    InterruptionFrame,
    TTSAudioRawFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.processors.frame_processor import FrameDirection

from mktts.errors import AgentError
from mktts.pipecat import MkttsTTSService


class Watch(BaseObserver):
    """Follows a pipeline on behalf of whoever converses with it.

    started: the pipeline runs. speaking: the bot speaks. begun: how often it has begun to. error: the last one.
    stale_frames: audio that left the voice after the interruption of its utterance.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Initialize the observer.

        Args:
            **kwargs: Additional arguments passed to parent class.
        """
        super().__init__(observe_every_push=False, **kwargs)
        self.started = False
        self.speaking = False
        self.begun = 0
        self.stale_frames = 0
        self.error: str | None = None
        self._spoken: set[str | None] = set()  # audio contexts since the last interruption
        self._cut: set[str | None] = set()
        self._changed = asyncio.Event()

    async def on_pipeline_started(self) -> None:
        """Take note that the pipeline runs."""
        self.started = True
        self._changed.set()

    async def on_push_frame(self, data: FramePushed) -> None:
        """Take note of a frame.

        Args:
            data: The frame, where it came from and where it goes.
        """
        frame = data.frame
        if isinstance(frame, TTSAudioRawFrame):
            if isinstance(data.source, MkttsTTSService):
                self._spoken.add(frame.context_id)
                self.stale_frames += frame.context_id in self._cut
            return
        if isinstance(frame, ErrorFrame):
            self.error = frame.error
        elif data.direction != FrameDirection.DOWNSTREAM:
            return
        elif isinstance(frame, InterruptionFrame):
            # Pushed on its way to the voice: what is on its way from there already is not stale.
            self._cut |= self._spoken
            self._spoken.clear()
        elif isinstance(frame, BotStartedSpeakingFrame):
            self.speaking = True
            self.begun += 1
        elif isinstance(frame, BotStoppedSpeakingFrame):
            self.speaking = False
        else:
            return
        self._changed.set()

    async def until(self, condition: Callable[[], Any], limit_s: float, what: str) -> None:
        """Wait.

        Args:
            condition: For this to hold.
            limit_s: At most so long.
            what: `condition` in words.

        Raises:
            AgentError: After `limit_s`, or when the pipeline reports an error.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    if self.error is not None:
                        raise AgentError(f"while waiting for {what}: {self.error}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AgentError(f"waited {limit_s:g} s for {what}: it did not come") from None
