"""The worker thread that owns the model, and the executors that make the open streams on it, tick by tick.

Nothing here takes a lock that a garbage-collected stream could need: the worker learns of new streams, cancelled ones
and emptied buffers from one `queue.SimpleQueue`, whose `put` may be called from anywhere, finalizers included. With
nothing to do the worker sleeps.

Threads: `expect`, `begin`, `add` and `close` may be called from any thread. A job has one consumer at a time.
Forks: threads do not survive `os.fork`, so an engine is usable only in the process that made it; in a child, make
another one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from mktts.errors import EngineError
from mktts.speech.executor import Executor, Standing, Wishes
from mktts.speech.job import Away, Bell, EngineName, Job, News, Tally, Work
from mktts.speech.serving import ManyStreams

_LOG = logging.getLogger(__name__)
_CLOSE = object()
_EXIT_WAIT_S = 5.0  # at interpreter exit: a step in flight may finish, a hung device must not hang the exit


class Engine:
    """Owns the worker thread. Close it, or use it as a context manager; dropping it closes it too."""

    def __init__(self, executors: Sequence[Executor], name: str = "mktts", cpu_threads: int | None = None) -> None:
        """cpu_threads: for torch's operators on the worker; None leaves torch's choice."""
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._bell = Bell()
        self._tallies: defaultdict[EngineName, Tally] = defaultdict(Tally)
        self._lock = threading.Lock()
        self.closed = False
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._pid = os.getpid()
        self._worker = _Worker(self._inbox, list(executors), self._bell)
        self._thread = threading.Thread(
            target=_work, args=(self._worker, cpu_threads), name=f"{name}-worker", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _abandon, self._inbox, self._thread)  # also at interpreter exit

    @property
    def open_streams(self) -> int:
        """Streams that have begun and are not over."""
        return sum(tally.open for tally in self._tallies.values())

    @property
    def due_streams(self) -> int:
        """Those of them that wait neither for their text nor for their reader."""
        return sum(tally.due for tally in self._tallies.values())

    def open_on(self, name: EngineName) -> int:
        """Those of `open_streams` that the executor of that name makes."""
        return self._tallies[name].open

    def expect(self, buffer_frames: int, paced: bool = True, away: tuple[Away, int] | None = None) -> Job:
        """A stream that is to `begin`. paced, away: see Job. Raises EngineError after `close` and in a forked child."""
        self._check_process()
        job = Job(buffer_frames, self._inbox, self._bell, paced, away)
        if away is not None:
            self._bell.after = away[0].turn_over
        with self._lock:
            self._check_open()
            self._jobs.add(job)
        return job

    def begin(self, job: Job, work: Work, on: EngineName) -> None:
        """Gives `work` its ticks from now on. on: the executor of that name makes it. Raises as `expect`."""
        self._check_process()
        with self._lock:
            self._check_open()
            tally = self._tallies[on]
            tally.opened += 1
            job.begin(work, on, tally)
            self._inbox.put(job)

    def add(self, executor: Executor) -> None:
        """One more executor, whose streams may be opened from now on. Raises EngineError after `close`."""
        with self._lock:
            self._check_open()
            self._inbox.put(executor)

    def admit(self, wishes: Wishes) -> None:
        """What a server wants of admission, of every executor, those that are added later too."""
        self.ask(partial(self._worker.admit, wishes))

    @property
    def standing(self) -> dict[EngineName, Standing]:
        """How each executor stands at the moment."""
        return {name: executor.standing for name, executor in list(self._worker.executors.items())}

    def ask(self, call: Callable[[], None]) -> None:
        """Has the worker's thread call, between two ticks; after `close`, nobody does."""
        self._inbox.put(call)

    def close(self) -> None:
        """Ends every open stream as cancelled, within one frame, and waits for the worker to finish."""
        with self._lock:
            if not self.closed:
                self.closed = True
                for job in self._jobs:
                    job.cancel()
                self._inbox.put(_CLOSE)
        if os.getpid() == self._pid and self._thread is not threading.current_thread():
            self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError("the worker thread stayed in the parent of this fork: load a synthesizer in the child")

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the synthesizer is closed: load another one")


class _Worker:
    """It knows these only, so that dropping the engine can end its thread. sleeps: nothing is to be done without
    news. executors: by their names, changed by its own thread alone."""

    def __init__(self, inbox: SimpleQueue[Any], executors: list[Executor], bell: Bell) -> None:
        self.sleeps = True
        self._inbox = inbox
        self.executors: dict[EngineName, Executor] = {}
        self._wishes: Wishes | None = None
        self._bell = bell
        self._crowd = ManyStreams()
        for executor in executors:
            self._add(executor)

    def admit(self, wishes: Wishes) -> None:
        self._wishes = wishes
        for executor in self.executors.values():
            executor.admit(wishes)

    def _add(self, executor: Executor) -> None:
        self.executors[executor.name] = executor
        executor.beside(lambda: sum(other.listeners for other in self.executors.values() if other is not executor))
        if self._wishes is not None:
            executor.admit(self._wishes)

    def run(self) -> None:
        wake_s = math.inf
        while self._news(wake_s):
            alone = sum(executor.open_jobs for executor in self.executors.values()) == 1
            wake_s = min(_turn(executor, alone) for executor in self.executors.values())
            self._bell.sound()
            # Here, not in the executor: behind every turn, also one that failed or ended streams before they had begun.
            batch = self.executors.get("batch")
            self._crowd.count(0 if batch is None else batch.open_jobs)
            self.sleeps = wake_s == math.inf
        for executor in self.executors.values():
            try:
                executor.close()
            except BaseException:
                _LOG.exception("an executor could not be closed")
        self._crowd.count(0)
        for executor in self.executors.values():
            executor.beside(lambda: 0)  # no circle: nothing of it waits for the garbage collector
        self.executors.clear()  # the models are free, whoever keeps the closed engine
        self._bell.sound()

    def _news(self, wake_s: float) -> bool:
        """Takes in what happened outside, waiting for it until `wake_s`. False: the engine was closed."""
        wait_s = wake_s - time.perf_counter()
        try:
            item = self._inbox.get(wait_s > 0, None if math.isinf(wait_s) else max(wait_s, 0.0))
            self.sleeps = False
            while True:
                if item is _CLOSE:
                    return False
                if isinstance(item, Job):
                    self.executors[item.engine].take(item)
                elif isinstance(item, News):
                    if item.job.engine is not None:  # else it was cancelled before it had begun
                        self.executors[item.job.engine].hear(item.job)
                elif callable(item):
                    _called(item)
                else:
                    self._add(item)
                item = self._inbox.get_nowait()
        except Empty:
            return True


def _called(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        _LOG.exception("a call in the worker's thread failed")


def _turn(executor: Executor, alone: bool) -> float:
    """An executor's turn; one that fails as a whole loses its streams, and the worker goes on."""
    try:
        return executor.turn(time.perf_counter(), alone)
    except BaseException as error:
        _LOG.exception("the streams of the engine %r end: a turn failed", executor.name)
        try:
            executor.abandon(error)
        except BaseException:
            _LOG.exception("its books could not be cleared")
        return math.inf


def _work(worker: _Worker, cpu_threads: int | None) -> None:
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)  # OpenMP keeps the number per calling thread: others are not touched
    with torch.inference_mode():
        worker.run()


def _abandon(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(_CLOSE)
    if thread is not threading.current_thread():
        thread.join(_EXIT_WAIT_S)
