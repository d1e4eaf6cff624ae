"""One utterance as its consumer sees it: an iterator and an async iterator of chunks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mktts.errors import EngineError, TextError
from mktts.spec import NUM_CODEBOOKS
from mktts.speech.guard import FinishReason
from mktts.speech.job import EngineName, Job
from mktts.speech.options import Chunk
from mktts.speech.text import check_length, clean_piece

if TYPE_CHECKING:
    from mktts.speech.front import FrontEndFeed


class Begins(Protocol):
    """The engine, as far as a stream knows it: kept alive, and given what makes it when text has come."""

    def begin(self, job: Job, work: Any, on: EngineName) -> None: ...


class TextInput(Protocol):
    """A script that text is fed through, as a stream knows it."""

    started_s: float

    def feed(self, piece: str) -> None: ...

    def finish(self) -> None: ...


class Stream:
    """Chunks of one utterance, in order, made while they are taken.

    Iterate with `for` (waits in the calling thread) or with `async for` (the event loop goes on); one consumer at a
    time. Leaving the `with` block, `close`, `aclose`, dropping the object, an exception while waiting (Ctrl-C), and
    cancelling the task that waits all end the generation within one frame. What fails inside is raised here.

    seed: what every draw of this utterance follows from; the same seed and text give the same speech.
    """

    def __init__(self, engine: Begins, job: Job, seed: int) -> None:
        self.seed = seed
        self._engine = engine  # kept: dropping the synthesizer must not end a stream that is being read
        self._job = job
        # Called once, it holds the job no more, whose error may hold this, by the frames that it was raised through.
        self._give_up = weakref.finalize(self, job.cancel)
        self._give_up.atexit = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs, and when it failed."""
        return self._job.finish_reason

    @property
    def rests(self) -> bool:
        """Whether it waits for its text, or for its reader."""
        return self._job.resting

    @property
    def codes(self) -> Tensor:
        """The frames made so far, (T, 16) int64, of all segments; it may be ahead of the chunks taken."""
        frames = [torch.as_tensor(codes) for codes in list(self._job.codes)]
        return torch.stack(frames) if frames else torch.empty((0, NUM_CODEBOOKS), dtype=torch.int64)

    @property
    def engine(self) -> EngineName | None:
        """What makes it: "single", one stream a step, or "batch", many together; None as long as it has no text. A
        stream stays where it began."""
        return self._job.engine

    def cancel(self) -> None:
        """Ends the generation within one frame; no chunk comes after this. Any thread, any number of times."""
        self._job.cancel()

    close = cancel

    def read_away(self, frames: int) -> None:
        """Of a stream whose chunks go away: see `mktts.speech.job.Job.has_taken`."""
        self._job.has_taken(frames)

    def when_over(self, call: Callable[[], None]) -> None:
        """Has `call` called, perhaps twice, when the generation has ended, however it did; at once if it has already.
        It runs in the worker's thread, where it must neither wait nor raise. For a stream whose text is known."""
        self._job.when_over(call)

    async def aclose(self) -> None:
        """`cancel`, for contextlib.aclosing."""
        self._job.cancel()

    def read(self) -> np.ndarray:
        """All PCM that is left, (S,) float32; waits for the end. Raises EngineError as `__iter__`."""
        return _join([chunk.pcm for chunk in self])

    async def aread(self) -> np.ndarray:
        """As `read`, for an event loop."""
        return _join([chunk.pcm async for chunk in self])

    def __repr__(self) -> str:
        state = self.finish_reason or ("over" if self._job.over else "open")
        return f"<{type(self).__name__}: {len(self._job.codes)} frames, {state}, seed {self.seed}>"

    def __iter__(self) -> Stream:
        """Raises EngineError where the chunks were taken to the end already: they are not kept."""
        self._job.check_unread()
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = self._job.take()
        except BaseException:
            self._give_up()
            raise
        if chunk is None:
            raise StopIteration
        return chunk

    async def take(self, within_s: float | None = None) -> Chunk | None:
        """The next chunk; None at the end. Raises as `__anext__`, and TimeoutError where there is none within
        `within_s`: the stream goes on."""
        try:
            return await self._job.take_async(within_s)
        except TimeoutError:
            if within_s is None:
                self._give_up()
            raise
        except BaseException:  # cancelling the task that waits cancels the generation
            self._give_up()
            raise

    def __aiter__(self) -> Stream:
        self._job.check_unread()
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.cancel()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._job.cancel()


class Session(Stream):
    """A stream whose text is written while it is spoken.

    `feed` and `finish` never wait and may be called from any thread. The model does not step while it waits for
    text, and other streams go on. A word is spoken once it is complete, that is, when the next one begins; where
    the checkpoint names a text front end, once its reading is certain: numbers and names wait for the words around
    them, other words for the end of the next one.
    """

    def __init__(
        self,
        engine: Begins,
        job: Job,
        seed: int,
        make: Callable[[], tuple[Any, TextInput, EngineName]],
        front_end: FrontEndFeed | None = None,
    ) -> None:
        """make: called when the first visible text has come; until then nothing knows of the stream but its owner.
        Gives what makes it, the script that it is fed through, and the engine that it begins on.
        front_end: what the text goes through."""
        super().__init__(engine, job, seed)
        self._make = make
        self._front_end = front_end
        self._script: TextInput | None = None
        self._early: list[str] = []  # pieces without anything visible
        self._writing = threading.Lock()
        self._chars = 0
        self._finished = False

    def feed(self, piece: str) -> None:
        """Adds text; an empty piece is allowed, and text for a stream that is over is dropped.

        Raises TextError when `piece` is not a str, the whole exceeds MAX_TEXT_CHARS, or the checkpoint's front end has
        no words for its letters; such a piece is not taken. Raises EngineError after `finish` and in a forked child.
        """
        piece = clean_piece(piece)
        with self._writing:
            if self._finished:
                raise EngineError("feed after finish: open another session for more text")
            if self._job.over:
                return
            check_length(self._chars + len(piece))
            words = piece if self._front_end is None else self._front_end.push(piece)
            self._chars += len(piece)
            if self._script is not None:
                self._script.feed(words)
                self._job.tell()
            elif piece.strip():
                self._begin(words, time.perf_counter())
            else:
                self._early.append(words)

    def finish(self) -> None:
        """Says that no more text comes; a second call does nothing.

        Raises TextError when nothing visible was fed, or where there is a front end, no letter or digit; the stream is
        then cancelled.
        """
        with self._writing:
            if self._finished:
                return
            self._finished = True
            if self._script is not None:
                self._end(self._script)
            elif not self._job.over:
                self._job.cancel()
                raise TextError("expected text to speak before finish, got none")

    def _end(self, script: TextInput) -> None:
        if self._front_end is not None and not self._job.over:
            try:
                script.feed(self._front_end.finish())
            except TextError:
                self._job.cancel()
                raise
        script.finish()
        self._job.tell()

    def _begin(self, words: str, started_s: float) -> None:
        try:
            work, script, on = self._make()
            script.started_s = started_s
            for text in (*self._early, words):
                script.feed(text)
            self._engine.begin(self._job, work, on)
            self._script = script
        except EngineError:
            if not self._job.over:  # else the engine was closed meanwhile
                raise


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
