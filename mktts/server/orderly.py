"""A uvicorn server that ends in order on a signal, and leaves the rest of the process to who called."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn


class OrderlyServer(uvicorn.Server):
    """stopped_by: the signal that ended it; None while none has."""

    stopped_by: int | None = None

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for an orderly end, a second one for an end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = number

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again at the end: who called has a model to close first."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
