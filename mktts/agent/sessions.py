"""The conversations of one server: each over its own transport, all with the same voice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from loguru import logger
from pipecat.frames.frames import InputTransportMessageFrame, OutputTransportMessageUrgentFrame
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection
from pipecat.transports.base_transport import BaseTransport

from mktts.agent.conversation import Conversation, build
from mktts.agent.messages import PageMessages
from mktts.agent.settings import AgentSettings

CONNECT_S = 8.0  # for a peer that has sent an offer; behind a NAT without a relay none ever comes
_IDLE_S = 600.0  # a page that was left open
_CLOSE_S = 2.0
MOST_TYPED_CHARS = 2_000


class Sessions:
    """Runs conversations, at most `limit` at once."""

    def __init__(self, settings: AgentSettings, limit: int) -> None:
        self.settings = settings
        self._limit = limit
        self._running: set[asyncio.Task[None]] = set()
        self._workers: set[PipelineWorker] = set()
        self._closing = False

    @property
    def full(self) -> bool:
        """Whether no other conversation may begin."""
        return self._closing or len(self._running) >= self._limit

    def begin(self, transport: BaseTransport, arrived: Callable[[], bool] = lambda: True) -> asyncio.Task[None]:
        """Holds a conversation over `transport`; done when it has ended. arrived: whether the other side is there; if
        it is not within CONNECT_S, the conversation ends, and its place is free."""
        task = asyncio.create_task(self._hold(transport, arrived))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Ends every conversation, and begins no more."""
        self._closing = True
        for worker in [*self._workers]:
            await worker.cancel()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    async def _hold(self, transport: BaseTransport, arrived: Callable[[], bool]) -> None:
        session = uuid.uuid4().hex[:8]

        async def send(message: dict[str, Any]) -> None:
            await conversation.worker.queue_frame(OutputTransportMessageUrgentFrame(message=message))

        page = PageMessages(send, transport.output())
        typed = _FromThePage(page)
        # In a thread: it loads models, and nobody else's audio is to wait for them.
        conversation = await asyncio.to_thread(
            build, transport, self.settings, observers=[page, typed], idle_timeout_s=_IDLE_S
        )
        typed.conversation = conversation
        conversation.latency.on_turn = page.send_latency

        @transport.event_handler("on_client_connected")
        async def connected(*_: Any) -> None:
            await send({"type": "ready", "session": session})

        @transport.event_handler("on_client_disconnected")
        async def disconnected(*_: Any) -> None:
            await conversation.worker.cancel()

        logger.info(f"conversation {session} begins")
        self._workers.add(conversation.worker)
        waiting = asyncio.create_task(self._wait_for(conversation, arrived, session))
        try:
            await conversation.run()
        finally:
            waiting.cancel()
            self._workers.discard(conversation.worker)
            logger.info(f"conversation {session} has ended after {len(conversation.turns)} turns")

    async def _wait_for(self, conversation: Conversation, arrived: Callable[[], bool], session: str) -> None:
        await asyncio.sleep(CONNECT_S)
        if not arrived():
            logger.warning(f"conversation {session} ends: nobody connected within {CONNECT_S:g} s")
            await conversation.worker.cancel()


class _FromThePage(BaseObserver):
    """Greets once the page says that it can play, and answers what is typed there."""

    def __init__(self, page: PageMessages) -> None:
        super().__init__(observe_every_push=False)
        self.conversation: Conversation | None = None
        self._page = page
        self._greeted = False
        self._answering = asyncio.Lock()  # what is typed is answered in its order
        self._tasks: set[asyncio.Task[None]] = set()

    async def on_push_frame(self, data: FramePushed) -> None:
        frame = data.frame
        if not isinstance(frame, InputTransportMessageFrame) or data.direction != FrameDirection.DOWNSTREAM:
            return
        if self.conversation is None or not isinstance(frame.message, dict):
            return
        kind, text = frame.message.get("type"), frame.message.get("text")
        if kind == "hello" and not self._greeted:
            self._greeted = True
            await self.conversation.greet()
        elif kind == "text" and isinstance(text, str) and (text := text.strip()[:MOST_TYPED_CHARS]):
            task = asyncio.create_task(self._answer(self.conversation, text))  # frames go on meanwhile
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, conversation: Conversation, text: str) -> None:
        async with self._answering:
            await conversation.answer(text)
            await self._page.send_typed(text)
