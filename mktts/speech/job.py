"""One utterance between the worker that makes it and the consumer that hears it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from mktts.errors import EngineError
from mktts.speech.guard import FinishReason
from mktts.speech.options import Chunk

_END = object()
# After a lone stream's first chunk. Nothing hands the interpreter's lock over: who waits for it gets it when the worker
# sleeps, or after the 5 ms of sys.getswitchinterval; on a CPU a first chunk was read 1.3 to 2.4 ms late.
_LET_IN_S = 20e-6
EngineName = Literal["single", "batch"]


class Work(Protocol):
    """One utterance as the worker drives it: a `mktts.speech.utterance.Utterance`, or what behaves like one."""

    codes: list[Tensor | np.ndarray]
    finish_reason: FinishReason | None
    cancelled: bool
    pending_frames: int  # made, not yet in a chunk

    def ready(self) -> bool: ...

    def close(self) -> None: ...


class Away(Protocol):
    """Where a job's chunks go that are taken in another process."""

    def put(self, job: Job, chunk: Chunk | None, at_once: bool) -> None:
        """A chunk, None at the end; `at_once` from another thread than the worker's."""

    def rested(self, job: Job) -> None:
        """`job.resting` has changed. Worker."""

    def turn_over(self) -> None:
        """Behind all that a turn of the worker gave. Worker."""


class Bell:
    """Wakes event loops: those that the worker rang for are woken together, one call a loop. after: called with every
    `sound`, behind all that a turn gave."""

    after: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._rung: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)

    def ring(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        """Worker: `waiter` is done at the next `sound`."""
        self._rung[loop].append(waiter)

    def let_in(self) -> None:
        """Worker, in the middle of a turn: who waits for what it has given takes that now."""
        self.sound()
        time.sleep(_LET_IN_S)

    def sound(self) -> None:
        """Worker."""
        if self._rung:
            rung, self._rung = self._rung, defaultdict(list)
            for loop, waiters in rung.items():
                _wake(loop, waiters)
        if self.after is not None:
            self.after()


class Tally:
    """Streams of an engine by what became of them, as counted by those that open (under their lock) and by the worker.

    resting: open, and waiting for their text or for their reader.
    """

    def __init__(self) -> None:
        self.opened = self.ended = self.resting = 0

    @property
    def open(self) -> int:
        return self.opened - self.ended

    @property
    def due(self) -> int:
        """Open streams that frames are made for."""
        return self.open - self.resting


class News(NamedTuple):
    """To the worker, of a stream that it has: its text went on, its full buffer was read from, or it was cancelled."""

    job: Job


class Job:
    """One utterance between the worker, which makes it, and its consumer, which takes its chunks.

    paced: somebody listens in real time; otherwise frames are wanted as soon as others allow it. engine: that makes it,
    None before `begin`. codes: see Work. resting: it waits for its text, or for its consumer.
    """

    def __init__(
        self,
        buffer_frames: int,
        inbox: SimpleQueue[Any],
        bell: Bell | None = None,
        paced: bool = True,
        away: tuple[Away, int] | None = None,
    ) -> None:
        """bell: None wakes an event loop at once. away: where its chunks go instead of to `take`, and as what."""
        self._away, self.name = away or (None, 0)
        self.codes: list[Tensor | np.ndarray] = []
        self.cancelled = False
        self.resting = False
        self.error: BaseException | None = None
        self.paced = paced
        self.engine: EngineName | None = None
        self.buffer_frames = buffer_frames
        self.made_frames = 0  # in chunks; written by the worker
        self.taken_frames = 0  # written by the consumer
        self._work: Work | None = None  # before `begin`, and once the utterance is over: its caches are free then
        self._begun = False
        self._inbox = inbox
        self._bell = bell
        self._tally = Tally()
        self.watched = False  # the worker has found the buffer full: what the consumer takes wakes it
        self._chunks: SimpleQueue[Any] = SimpleQueue()
        self._reason: FinishReason | None = None
        self._read = False  # the consumer has seen the end
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._when_over: Callable[[], None] | None = None

    def begin(self, work: Work, engine: EngineName, tally: Tally | None = None) -> None:
        """Before the worker is given it, once: what makes the utterance."""
        self.codes, self.engine, self._tally = work.codes, engine, tally or Tally()
        self._work = work
        self._begun = True

    # ---- consumer, any thread

    @property
    def finish_reason(self) -> FinishReason | None:
        return "cancelled" if self.cancelled else self._reason

    @property
    def over(self) -> bool:
        """Whether nothing more will be made."""
        return self.cancelled or (self._begun and self._work is None)

    def cancel(self) -> None:
        """Ends the utterance: no chunk is handed out after this. No effect on one that is over and taken."""
        if self.cancelled or (self._begun and self._work is None and self.taken_frames == self.made_frames):
            return
        self.cancelled = True
        work = self._work
        if work is not None:
            work.cancelled = True
        self._put(_END, at_once=True)
        self.tell()

    def tell(self) -> None:
        """Lets the worker look at it again. Any thread."""
        self._inbox.put(News(self))

    def when_over(self, call: Callable[[], None]) -> None:
        """Has `call` called, quickly and perhaps twice, when the worker is done with an utterance that has begun: from
        its thread, or from here where it is already."""
        self._when_over = call
        if self._work is None:  # asked behind the line above: the worker saw that, or we see this
            call()

    def check_unread(self) -> None:
        """Raises EngineError where every chunk was taken; cancelled utterances stay empty without a word."""
        if self._read and not self.cancelled and self.error is None:
            raise EngineError("this stream was read to its end, and chunks are not kept: make another stream")

    def take(self) -> Chunk | None:
        """Waits for the next chunk; None at the end. Raises what ended the utterance, if something did."""
        return self._accept(self._chunks.get())

    async def take_async(self, within_s: float | None = None) -> Chunk | None:
        """As `take`, for an event loop: the worker wakes the loop, no thread waits. Raises TimeoutError where there is
        nothing within `within_s`; nothing is lost by that.

        Other tasks get their turn before every chunk, also while many are waiting to be taken.
        """
        loop = asyncio.get_running_loop()
        if not self._chunks.empty():  # otherwise the wait for it is their turn
            await asyncio.sleep(0)
        alarm: asyncio.TimerHandle | None = None
        over: list[bool] = []
        try:
            while True:
                try:
                    return self._accept(self._chunks.get_nowait())
                except Empty:
                    pass
                if over:
                    raise TimeoutError
                waiter = loop.create_future()
                self._waiter = (loop, waiter)
                if within_s is not None:
                    alarm = alarm or loop.call_later(within_s, self._ring, over)
                if self._chunks.empty():  # asked again: the worker may have put one before it could see the waiter
                    await waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()

    def _ring(self, over: list[bool]) -> None:
        """In the consumer's loop: it has waited long enough."""
        over.append(True)
        if self._waiter is not None:
            _set([self._waiter[1]])

    def _accept(self, item: Any) -> Chunk | None:
        if item is _END or self.cancelled:
            self._chunks.put(_END)  # for whoever asks again
            self._read = True
            if self.error is not None and not self.cancelled:
                raise self.error
            return None
        self.has_taken(self.taken_frames + item.frames)
        return item

    def has_taken(self, frames: int) -> None:
        """So many frames by now; `take` says it, and whoever takes for a consumer in another process."""
        self.taken_frames = frames
        if self.watched:  # else nobody sleeps over this
            self.tell()

    # ---- worker

    def runnable(self) -> bool:
        """Whether the utterance can go on now. Ends one that was cancelled, and one whose text cannot be spoken."""
        work = self._work
        if self.cancelled:
            self.end(None)
            return False
        if work is None or self.full(work.pending_frames):
            return False
        try:
            return work.ready()
        except BaseException as error:
            work = None
            self.fail(error)
            return False

    def advance(self, make: Callable[[Any], Chunk | None]) -> None:
        """Lets `make` take the work a step further and delivers the chunk it gives. An error ends this job alone."""
        work = self._work
        try:
            if work is None or self.cancelled:
                self.end(None)
                return
            chunk = make(work)
            if chunk is not None:
                first = not self.made_frames
                self.deliver(chunk)
                if first and self._bell is not None and self.engine == "single":
                    self._bell.let_in()
            if work.finish_reason is not None:
                self.end(work.finish_reason)
        except BaseException as error:  # whatever it is belongs to this stream; the worker and the others go on
            work = None
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the utterance; its consumer gets `error`. No effect on one that is over: it ended as it did."""
        if self._work is None:
            return
        traceback.clear_frames(error.__traceback__)  # with the work, all that would keep the stream's caches
        self.error = error
        self.end(None)

    def end(self, reason: FinishReason | None) -> None:
        """Releases the work and ends the queue of chunks."""
        if self._work is None:
            return
        self._reason = reason
        self.rest(False)
        work, self._work = self._work, None
        self._tally.ended += 1
        try:
            work.close()
        finally:  # whatever closing does, nobody waits for more
            self._put(_END)
            if self._when_over is not None:
                self._when_over()

    def rest(self, resting: bool) -> None:
        """Says whether it waits for its text, or for its consumer."""
        if resting is not self.resting:
            self.resting = resting
            self._tally.resting += 1 if resting else -1
            if self._away is not None:
                self._away.rested(self)

    def deliver(self, chunk: Chunk) -> None:
        """A chunk for the consumer."""
        self.made_frames += chunk.frames
        self._put(chunk)

    @property
    def open(self) -> bool:
        return self._work is not None

    @property
    def work(self) -> Any:
        """What makes the utterance; None once it is over."""
        return self._work

    def full(self, pending_frames: int) -> bool:
        """Whether the consumer has to take something first; it then wakes the worker. pending_frames: made or being
        made, and in no chunk."""
        for asked_again in (False, True):
            waiting = self.made_frames - self.taken_frames
            if not waiting or waiting + pending_frames < self.buffer_frames:
                self.watched = False
                return False
            if not asked_again:
                self.watched = True  # what the consumer takes from now on wakes the worker: look once more
        return True

    def watch(self) -> int:
        """From now on it does. Returns the frames that it had taken by then."""
        self.watched = True
        return self.taken_frames

    def _put(self, item: Any, at_once: bool = False) -> None:
        if self._away is not None:
            self._away.put(self, None if item is _END else item, at_once)
            return
        self._chunks.put(item)
        waiter = self._waiter
        if waiter is not None:
            if self._bell is None or at_once:
                _wake(waiter[0], [waiter[1]])
            else:
                self._bell.ring(*waiter)


def _wake(loop: asyncio.AbstractEventLoop, waiters: Sequence[asyncio.Future[None]]) -> None:
    with contextlib.suppress(Exception):  # the loop was closed: nobody is waiting any more; else it is no loop of ours
        loop.call_soon_threadsafe(_set, waiters)


def _set(waiters: Sequence[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
