"""The worker thread that owns the model, and the ticks of the open streams on it.

A tick makes one frame of as many streams as the model's `Maker` serves at once, in turn. A stream that waits for text
or for its consumer is passed over; with nothing to do the worker sleeps. A new stream is in the next tick: its first
frame waits for the present one at most, or for the few frames that a lone stream had asked for ahead. Nothing here
takes a lock that a garbage-collected stream could need: the worker learns of new streams, cancelled ones and emptied
buffers from one `queue.SimpleQueue`, whose `put` may be called from anywhere, finalizers included.

Threads: `open`, `wake` and `close` may be called from any thread. A job has one consumer at a time. Forks: threads do
not survive `os.fork`, so an engine is usable only in the process that made it; in a child, make another one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from mktts.errors import EngineError
from mktts.speech.job import WAKE, Job, Work
from mktts.speech.options import Chunk

_CLOSE = object()
_EXIT_WAIT_S = 5.0  # at interpreter exit: a step in flight may finish, a hung device must not hang the exit


class Maker(Protocol):
    """Makes frames: of one utterance a tick, or of many."""

    lanes: int  # utterances that one tick serves

    def tick(self, jobs: Sequence[Job], alone: bool) -> None:
        """Takes every job, all runnable and at most `lanes`, a frame further (`Job.advance`).

        alone: no other utterance is open.
        """


class OneByOne:
    """One utterance a tick: it makes its own frame. A lone one may ask for several frames of one launch."""

    lanes = 1

    def tick(self, jobs: Sequence[Job], alone: bool) -> None:
        def step(work: Any) -> Chunk | None:
            work.alone = alone
            return work.step()

        (job,) = jobs
        job.advance(step)


class Engine:
    """Owns the worker thread. Close it, or use it as a context manager; dropping it closes it too."""

    def __init__(self, maker: Maker | None = None, name: str = "mktts", cpu_threads: int | None = None) -> None:
        """maker: None takes `OneByOne`. cpu_threads: for torch's operators on the worker; None leaves torch's
        choice.
        """
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_work, args=(self._inbox, maker or OneByOne(), cpu_threads), name=f"{name}-worker", daemon=True
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
        self._inbox.put(WAKE)

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
    def __init__(self, inbox: SimpleQueue[Any], maker: Maker) -> None:
        self._inbox = inbox
        self._maker = maker
        self._turns: deque[Job] = deque()  # whose turn is next, first
        self._idle = True  # the last look at every stream found nothing to do

    def run(self) -> None:
        while self._news():
            self._tick()
        for job in self._turns:
            job.cancel()
            job.end(None)

    def _news(self) -> bool:
        """Takes in what happened outside; sleeps while no stream can go on. False: the engine was closed."""
        wait = self._idle
        arrived: list[Job] = []
        closed = False
        with contextlib.suppress(Empty):
            while not closed:
                item = self._inbox.get(block=wait)
                wait = False
                closed = item is _CLOSE
                if isinstance(item, Job):
                    arrived.append(item)
        self._turns.extendleft(reversed(arrived))
        return not closed

    def _tick(self) -> None:
        picked: list[Job] = []
        for _ in range(len(self._turns)):
            job = self._turns.popleft()
            if job.runnable():
                picked.append(job)
                if len(picked) == self._maker.lanes:
                    break
            elif job.open:
                self._turns.append(job)
        self._idle = not picked
        if picked:
            self._maker.tick(picked, alone=len(picked) == 1 and not self._turns)
            self._turns.extend(job for job in picked if job.open)


def _work(inbox: SimpleQueue[Any], maker: Maker, cpu_threads: int | None) -> None:
    # The thread knows inbox and maker only, so that dropping the engine can end it.
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)  # OpenMP keeps the number per calling thread: others are not touched
    with torch.inference_mode():
        _Worker(inbox, maker).run()


def _abandon(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(_CLOSE)
    if thread is not threading.current_thread():
        thread.join(_EXIT_WAIT_S)
