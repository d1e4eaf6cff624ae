"""One utterance on its way to one connection, from its admission to its record."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING

from mktts.server.access.request_id import current_id, new_id
from mktts.server.gathering import gathered
from mktts.server.problems import Problem, from_error
from mktts.server.schemas import Route, StreamState
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.speech.player import Player

if TYPE_CHECKING:
    from mktts.speech.options import Chunk
    from mktts.speech.stream import Stream

_HELD_UP_S = 0.05  # that a write took: it waited for the client

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
        self._player = Player()
        self._peeked: Chunk | None = None
        self.on_first_byte: Callable[[float], None] = lambda seconds: None
        self.on_underrun: Callable[[float], None] = lambda late_s: None

    async def begun(self) -> None:
        """Waits for the first chunk, which `chunks` then begins with, or for the end. Raises Problem where the stream
        was refused, or failed."""
        self._peeked = await self._take()

    def chunks(self) -> AsyncGenerator[Chunk]:
        """Chunks as they are to be written: at once, or several together where the listener has time. Ends where the
        stream does. Raises Problem where the generation failed. Call `sent` with every write."""
        return gathered(self._take, self._lead_s)

    def sent(self, duration_s: float) -> None:
        """Sound of so many seconds is being written to the connection now."""
        now_s = time.perf_counter()
        if self._player.dry_s is None:
            self.on_first_byte(now_s - self._started_s)
        _, late_s = self._player.play(now_s, duration_s)
        if late_s > 0:
            self.on_underrun(late_s)

    @contextlib.contextmanager
    def sending(self, duration_s: float) -> Iterator[None]:
        """Around a write of sound of so many seconds. One that waits for the client makes nothing late."""
        self.sent(duration_s)
        began_s = time.perf_counter()
        yield
        if (now_s := time.perf_counter()) - began_s > _HELD_UP_S:
            self._player.pause(now_s)

    @property
    def is_behind(self) -> bool:
        """Whether its listener has played all that went out, and waits for more to be made."""
        return not self.closed and not self._stream.rests and self._lead_s() < 0

    def _lead_s(self) -> float:
        return self._player.lead_s(time.perf_counter())

    async def _take(self, within_s: float | None = None) -> Chunk | None:
        """The next chunk as it is made; None at the end. Raises Problem, and TimeoutError where `within_s` is over."""
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        try:
            chunk = await self._stream.take(within_s)
        except TimeoutError:
            raise
        except Exception as error:
            if self.problem is None:
                self.problem = from_error(error)
                if self.problem.status >= 500:
                    log.exception("stream %s failed", self.id)
            raise self.problem from error
        if chunk is None:
            if self.problem is not None:  # the server ended it
                raise self.problem
            return None
        if self._first_audio_s is None:
            self._first_audio_s = time.perf_counter() - self._started_s
        self._frames += chunk.frames
        self._samples += len(chunk.pcm)
        return chunk

    def fed(self, text: str = "") -> None:
        """Text has come, or its end. With the first that can be seen the clock of the first audio starts; to a listener
        who waited for text nothing is late for a frame's time from now on."""
        now_s = time.perf_counter()
        if self.chars == 0 and text.strip():
            self._started_s = now_s
        self.chars += len(text)
        if self._stream.rests:
            self._player.pause(now_s + 1 / FRAME_RATE_HZ)

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
        log.info("stream %s: %s, %d characters, seed %d, %s", self.id, self.route, self.chars, self.seed, self._outcome)

    @property
    def _outcome(self) -> str:
        """How it ended, for the log. Of a problem's message only busy's, which has numbers in it: others may quote the
        text, which is not logged."""
        problem, first_ms = self.problem, self.first_audio_ms
        heard = "no audio" if first_ms is None else f"{self._frames} frames, first audio after {first_ms} ms"
        if problem is None:
            return f"{heard}, {self._reason}"
        why = f"{problem.code}: {problem}" if problem.code == "busy" else problem.code
        if first_ms is None and problem.status < 500:
            return f"refused, {why}"
        return f"{heard}, {self._reason}, {why}"

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
