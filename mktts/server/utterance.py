"""One utterance on its way to one connection, from its admission to its record."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from mktts.server.access.request_id import current_id, new_id
from mktts.server.problems import Problem, from_error
from mktts.server.schemas import Route, StreamState
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.speech.options import Chunk
    from mktts.speech.stream import Stream

log = logging.getLogger(__name__)


class Utterance:
    """Belongs to the event loop's thread. `close` must be called, once or more; it ends what still runs.

    id: the request's, where it speaks once; None makes one. request_id: of the request or the WebSocket that it is
    spoken for; None outside of one. problem: what ended it, if something did: the generation
    failed, or the server ended it and says why.
    """

    def __init__(
        self, route: Route, stream: Stream, chars: int, on_close: Callable[[Utterance], None], id: str | None = None
    ) -> None:
        self.id = id or new_id()
        self.request_id = current_id()
        self.route: Route = route
        self.seed = stream.seed
        self.problem: Problem | None = None
        self.closed = False
        self.chars = chars
        self._stream = stream
        self._on_close = on_close
        self._started_s = time.perf_counter()
        self._reason: str | None = None
        self._frames = 0
        self._samples = 0
        self._first_audio_s: float | None = None

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Chunks as they are made; ends where the stream does. Raises Problem where the generation failed."""
        try:
            async for chunk in self._stream:
                if self._first_audio_s is None:
                    self._first_audio_s = time.perf_counter() - self._started_s
                self._frames += chunk.frames
                self._samples += len(chunk.pcm)
                yield chunk
        except Exception as error:
            self.problem = from_error(error)
            if self.problem.status >= 500:
                log.exception("stream %s failed", self.id)
            raise self.problem from error
        if self.problem is not None:  # the server ended it
            raise self.problem

    def heard(self) -> None:
        """The clock of the first audio starts now: at the first text of a stream that is fed."""
        self._started_s = time.perf_counter()

    def fail(self, problem: Problem) -> None:
        """Ends the generation for a reason that the client receives."""
        self.problem = self.problem or problem
        self.close()

    def close(self) -> None:
        """Ends the generation within one frame if it still runs, and gives the place back."""
        if self.closed:
            return
        self.closed = True
        self._stream.cancel()
        self._reason = "error" if self.problem is not None else self._stream.finish_reason or "cancelled"
        self._on_close(self)
        log.info(
            "stream %s: %s, %d characters, seed %d, %d frames, first audio after %s ms, %s",
            self.id, self.route, self.chars, self.seed, self._frames, self.first_audio_ms, self._reason,
        )  # fmt: skip

    @property
    def first_audio_ms(self) -> float | None:
        return None if self._first_audio_s is None else round(self._first_audio_s * 1_000, 3)

    @property
    def frames(self) -> int:
        """Handed to the connection so far."""
        return self._frames

    @property
    def audio_s(self) -> float:
        return self._samples / SAMPLE_RATE_HZ

    @property
    def state(self) -> StreamState:
        return StreamState(
            id=self.id,
            route=self.route,
            state="ended" if self.closed else "running",
            finish_reason=self._reason,
            seed=self.seed,
            frames=self._frames,
            audio_s=self.audio_s,
            first_audio_ms=self.first_audio_ms,
            error=self.problem.detail(self.id) if self.problem is not None else None,
        )
