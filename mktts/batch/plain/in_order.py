"""Work that one thread does, in the order in which it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class InOrder:
    """`do` gives a future of the work's result. Without a thread of its own the caller does the work, at once."""

    def __init__(self, thread: str | None) -> None:
        """thread: the name of a thread, whose operators have that one thread; None: there is none."""
        self._thread = None if thread is None else ThreadPoolExecutor(1, thread, torch.set_num_threads, (1,))

    def do(self, work: Callable, *arguments: object) -> Future:
        """Errors are raised by the future's `result`."""
        if self._thread is not None:
            return self._thread.submit(work, *arguments)
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done
