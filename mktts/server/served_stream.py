"""One stream of speech on its way to one connection, from its admission to its record."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mktts import audio
from mktts.engine.metrics import Player
from mktts.engine.options import Chunk, Timings
from mktts.errors import MkttsError
from mktts.server.api_errors import ApiError, current_id, from_error, new_id
from mktts.server.meters import Meters
from mktts.server.schemas import Route, StreamState
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.engine.stream import Session, Stream

KEPT_LEAD_S = 0.5  # that a listener has to play while something is held back
MAX_HELD_FRAMES = round(FRAME_RATE_HZ)  # a second
_HELD_UP_S = 0.05  # a write that took longer waited for the client

log = logging.getLogger(__name__)


class ServedStream:
    """Belongs to the event loop's thread. `close` must be called, once or more; it ends what still runs.

    stream: what makes the speech. chars: of the text, so far. check_chars: raises ApiError for too many of them.
    on_close: called once, with this. error: what ended it; None otherwise.
    """

    def __init__(
        self,
        route: Route,
        stream: Stream | Session,
        chars: int,
        meters: Meters,
        check_chars: Callable[[int], None],
        on_close: Callable[[ServedStream], None],
    ) -> None:
        # A request over HTTP speaks once; its id is that of its stream.
        self.id = new_id() if route == "tts_ws" else (current_id.get() or new_id())
        self.route: Route = route
        self.seed = stream.seed
        self.error: ApiError | None = None
        self.closed = False
        self.chars = chars
        self.frames = 0  # handed to the connection so far
        self.first_audio_ms: float | None = None
        self._samples = 0
        self._stream = stream
        self._meters = meters
        self._check_chars = check_chars
        self._on_close = on_close
        self._started_s = time.perf_counter()
        self._reason: str | None = None
        self._player = Player()
        self._peeked: Chunk | None = None

    async def begun(self) -> None:
        """Waits for the first chunk, which `chunks` then begins with, or for the end. Raises ApiError where the stream
        was refused, or failed."""
        self._peeked = await self._take()

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Chunks as they are to be written, each within `sending`: at once, or several together where the listener has
        time. A write costs the event loop about the same whatever it holds, and the network a packet. Ends where the
        stream does. Raises ApiError where the generation failed, behind what was held back."""
        held: list[Chunk] = []
        ended, error = False, None
        while not ended:
            late = False
            try:
                chunk = await self._take(max(0.0, self._lead_s() - KEPT_LEAD_S) if held else None)
            except TimeoutError:
                late = True
            except ApiError as raised:
                ended, error = True, raised
            else:
                ended = chunk is None
                held += [] if ended else [chunk]
            frames = sum(one.frames for one in held)
            if held and (late or ended or self._lead_s() <= KEPT_LEAD_S or frames >= MAX_HELD_FRAMES):
                yield _joined(held)
                held = []
        if error is not None:
            raise error

    @contextlib.contextmanager
    def sending(self, duration_s: float) -> Iterator[None]:
        """Around a write of sound of so many seconds. One that waits for the client makes nothing late."""
        began_s = time.perf_counter()
        if self._player.dry_s is None:
            self._meters.first_byte_s.labels(self.route).observe(began_s - self._started_s)
        _, late_s = self._player.play(began_s, duration_s)
        if late_s > 0:
            self._meters.underruns.inc()
            self._meters.late_s.inc(late_s)
        yield
        if (now_s := time.perf_counter()) - began_s > _HELD_UP_S:
            self._player.pause(now_s)

    @property
    def is_behind(self) -> bool:
        """Whether its listener has played all that was sent, and waits for more to be made."""
        return not self.closed and not self._stream.idle and self._lead_s() < 0

    def _lead_s(self) -> float:
        return self._player.lead_s(time.perf_counter())

    async def _take(self, within_s: float | None = None) -> Chunk | None:
        """The next chunk as it is made; None at the end. Raises ApiError, and TimeoutError after `within_s`."""
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        try:
            chunk = await self._stream.take(within_s)
        except TimeoutError:
            raise
        except Exception as error:
            if self.error is None:
                self.error = from_error(error)
                if self.error.status >= 500:
                    log.exception("stream %s failed", self.id)
            raise self.error from error
        if chunk is None:
            if self.error is not None:  # the server ended it
                raise self.error
            return None
        if self.first_audio_ms is None:
            self.first_audio_ms = round((time.perf_counter() - self._started_s) * 1_000, 3)
        self.frames += chunk.frames
        self._samples += len(chunk.pcm)
        return chunk

    def feed(self, text: str) -> None:
        """More text of a session; the stream fails where it cannot be spoken, or is too long. The clock of the first
        audio starts with the first text that can be seen."""
        if self.chars == 0 and text.strip():
            self._started_s = time.perf_counter()
        self.chars += len(text)
        self._forgive_lateness()
        try:
            self._check_chars(self.chars)
            self._stream.feed(text)
        except MkttsError as error:
            self.fail(from_error(error))

    def finish(self) -> None:
        """No more text comes."""
        self._forgive_lateness()
        try:
            self._stream.finish()
        except MkttsError as error:
            self.fail(from_error(error))

    def _forgive_lateness(self) -> None:
        """Where the stream waited for text, nothing is late until a frame's time after it."""
        if self._stream.idle:
            self._player.pause(time.perf_counter() + 1 / FRAME_RATE_HZ)

    def fail(self, error: ApiError) -> None:
        """Ends the generation for a reason that the client receives."""
        self.error = self.error or error
        self.close()

    def close(self) -> None:
        """Ends the generation within one frame if it still runs, and gives the place back."""
        if self.closed:
            return
        self.closed = True
        self._stream.cancel()
        self._reason = "error" if self.error is not None else self._stream.finish_reason or "cancelled"
        self._on_close(self)
        log.info("stream %s: %s, %d characters, seed %d, %s", self.id, self.route, self.chars, self.seed, self._outcome)

    @property
    def _outcome(self) -> str:
        """How it ended, for the log. Of an error's message only busy's, which has numbers in it: others may quote the
        text, which is not logged."""
        error, first_ms = self.error, self.first_audio_ms
        heard = "no audio" if first_ms is None else f"{self.frames} frames, first audio after {first_ms} ms"
        if error is None:
            return f"{heard}, {self._reason}"
        why = f"{error.code}: {error}" if error.code == "busy" else error.code
        return f"refused, {why}" if first_ms is None and error.status < 500 else f"{heard}, {self._reason}, {why}"

    @property
    def state(self) -> StreamState:
        return StreamState(
            id=self.id,
            route=self.route,
            state="ended" if self.closed else "running",
            finish_reason=self._reason,
            seed=self.seed,
            frames=self.frames,
            audio_s=self._samples / SAMPLE_RATE_HZ,
            first_audio_ms=self.first_audio_ms,
            error=self.error.detail(self.id) if self.error is not None else None,
        )


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of several that follow each other; it was ready when the last one was."""
    if len(chunks) == 1:
        return chunks[0]
    times = [chunk.timings for chunk in chunks]
    timings = Timings(
        times[-1].ready_ms,
        sum(one.prefill_ms for one in times),
        sum(one.talker_ms for one in times),
        sum(one.predictor_ms for one in times),
        sum(one.codec_ms for one in times),
    )
    ready = [chunk.ready_pcm16 for chunk in chunks]
    pcm16 = None if None in ready else b"".join(ready)
    frames = sum(chunk.frames for chunk in chunks)
    return Chunk(audio.joined([chunk.pcm for chunk in chunks]), chunks[0].start_s, frames, timings, pcm16)
