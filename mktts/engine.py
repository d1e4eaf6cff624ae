"""The worker thread that owns the model, and the turns of the open streams on it.

Every open stream makes one frame a turn. A stream that waits for text or for its consumer is passed over; with
nothing to do the worker sleeps. A new stream has the next turn: its first frame waits for one frame of another stream
at most, or for the few that a lone stream had asked for ahead. Nothing here takes a lock that a garbage-collected
stream could need: the worker learns of new streams, cancelled ones and emptied buffers from one `queue.SimpleQueue`,
whose `put` may be called from anywhere, finalizers included.

Threads: `open`, `wake` and `close` may be called from any thread. A job has one consumer at a time. Forks: threads do
not survive `os.fork`, so an engine is usable only in the process that made it; in a child, make another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from mktts.errors import EngineError
from mktts.options import Chunk, FinishReason

_WAKE, _CLOSE, _END = object(), object(), object()
_EXIT_WAIT_S = 5.0  # at interpreter exit: a step in flight may finish, a hung device must not hang the exit


class Work(Protocol):
    """What the worker can drive: `mktts.generation.Generation` and `mktts.fallback.UpstreamGeneration`."""

    codes: list[Tensor]
    finish_reason: FinishReason | None
    cancelled: bool
    alone: bool  # nobody else waits for a turn
    pending_frames: int  # made, not yet in a chunk

    def ready(self) -> bool: ...

    def step(self) -> Chunk | None: ...


class Job:
    """One utterance between the worker, which makes it, and its consumer, which takes its chunks."""

    def __init__(self, work: Work, buffer_frames: int, inbox: SimpleQueue[Any]) -> None:
        self.codes = work.codes
        self.cancelled = False
        self.error: BaseException | None = None
        self._work: Work | None = work  # None once the utterance is over: its caches are free then
        self._buffer_frames = buffer_frames
        self._inbox = inbox
        self._chunks: SimpleQueue[Any] = SimpleQueue()
        self._made_frames = 0  # in chunks; written by the worker
        self._taken_frames = 0  # written by the consumer
        self._reason: FinishReason | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # ---- consumer, any thread

    @property
    def finish_reason(self) -> FinishReason | None:
        return "cancelled" if self.cancelled else self._reason

    @property
    def over(self) -> bool:
        """Whether nothing more will be made."""
        return self.cancelled or self._work is None

    def cancel(self) -> None:
        """Ends the utterance: no chunk is handed out after this. No effect on one that is over and taken."""
        if self.cancelled or (self._work is None and self._taken_frames == self._made_frames):
            return
        self.cancelled = True
        work = self._work
        if work is not None:
            work.cancelled = True
        self._put(_END)
        self._inbox.put(_WAKE)

    def take(self) -> Chunk | None:
        """Waits for the next chunk; None at the end. Raises what ended the utterance, if something did."""
        return self._accept(self._chunks.get())

    async def take_async(self) -> Chunk | None:
        """As `take`, for an event loop: the worker wakes the loop, no thread waits.

        Other tasks get their turn before every chunk, also while many are waiting to be taken.
        """
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        while True:
            with contextlib.suppress(Empty):
                return self._accept(self._chunks.get_nowait())
            waiter = loop.create_future()
            self._waiter = (loop, waiter)
            try:
                if self._chunks.empty():  # asked again: the worker may have put one before it could see the waiter
                    await waiter
            finally:
                self._waiter = None

    def _accept(self, item: Any) -> Chunk | None:
        if item is _END or self.cancelled:
            self._chunks.put(_END)  # for whoever asks again
            if self.error is not None and not self.cancelled:
                raise self.error
            return None
        self._taken_frames += item.frames
        self._inbox.put(_WAKE)
        return item

    # ---- worker

    def turn(self, alone: bool = False) -> bool:
        """Makes one frame if it can; returns whether it did anything. `alone`: no other stream waits for a turn."""
        work = self._work
        try:
            if self.cancelled:
                self.end(None)
            elif self._full(work) or not work.ready():
                return False
            else:
                work.alone = alone
                chunk = work.step()
                if chunk is not None:
                    self._made_frames += chunk.frames
                    self._put(chunk)
                if work.finish_reason is not None:
                    self.end(work.finish_reason)
        except BaseException as error:  # whatever it is belongs to this stream; the worker and the others go on
            work = None
            traceback.clear_frames(error.__traceback__)  # with `work`, all that would keep the stream's caches
            self.error = error
            self.end(None)
        return True

    def end(self, reason: FinishReason | None) -> None:
        """Lets go of the work and tells the consumer."""
        self._reason = reason
        self._work = None
        self._put(_END)

    @property
    def open(self) -> bool:
        return self._work is not None

    def _full(self, work: Work) -> bool:
        waiting = self._made_frames - self._taken_frames
        return waiting > 0 and waiting + work.pending_frames >= self._buffer_frames

    def _put(self, item: Any) -> None:
        self._chunks.put(item)
        waiter = self._waiter
        if waiter is not None:
            loop, future = waiter
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is waiting any more
                loop.call_soon_threadsafe(_set, future)


class Engine:
    """Owns the worker thread. Close it, or use it as a context manager; dropping it closes it too."""

    def __init__(self, name: str = "mktts", cpu_threads: int | None = None) -> None:
        """`cpu_threads`: for torch's operators on the worker; None leaves torch's own choice."""
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_work, args=(self._inbox, cpu_threads), name=f"{name}-worker", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _abandon, self._inbox, self._thread)  # also at interpreter exit

    def open(self, work: Work, buffer_frames: int) -> Job:
        """Gives `work` its turns from now on. Raises EngineError after `close` and in a forked child."""
        if os.getpid() != self._pid:
            raise EngineError("the worker thread stayed in the parent of this fork: load a synthesizer in the child")
        job = Job(work, buffer_frames, self._inbox)
        with self._lock:
            if self._closed:
                raise EngineError("the synthesizer is closed: load another one")
            self._jobs.add(job)
            self._inbox.put(job)
        return job

    def wake(self) -> None:
        """Says that a stream may have something to do: its text went on."""
        self._inbox.put(_WAKE)

    def close(self) -> None:
        """Ends every open stream as cancelled, within one frame, and waits for the worker to finish."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for job in self._jobs:
                    job.cancel()
                self._inbox.put(_CLOSE)
        if os.getpid() == self._pid and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._closed


class _Worker:
    def __init__(self, inbox: SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._turns: deque[Job] = deque()
        self._idle_turns = 0  # in a row

    def run(self) -> None:
        while self._news():
            if self._turns:
                self._turn()
        for job in self._turns:
            job.cancel()
            job.turn()

    def _news(self) -> bool:
        """Takes in what happened outside; sleeps while no stream can go on. False: the engine was closed."""
        wait = self._idle_turns >= len(self._turns)
        arrived: list[Job] = []
        closed = False
        with contextlib.suppress(Empty):
            while not closed:
                item = self._inbox.get(block=wait)
                wait = False
                self._idle_turns = 0
                closed = item is _CLOSE
                if isinstance(item, Job):
                    arrived.append(item)
        self._turns.extendleft(reversed(arrived))
        return not closed

    def _turn(self) -> None:
        job = self._turns.popleft()
        self._idle_turns = 0 if job.turn(alone=not self._turns) else self._idle_turns + 1
        if job.open:
            self._turns.append(job)


def _work(inbox: SimpleQueue[Any], cpu_threads: int | None) -> None:
    # The thread knows the inbox only, so that dropping the engine can end it.
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)  # OpenMP keeps the number per calling thread: others are not touched
    with torch.inference_mode():
        _Worker(inbox).run()


def _abandon(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(_CLOSE)
    if thread is not threading.current_thread():
        thread.join(_EXIT_WAIT_S)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
