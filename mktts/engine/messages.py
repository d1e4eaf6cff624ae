"""What an engine in a process of its own and its client say to each other: pickled messages over a socket pair.

Both processes are of this package and started by one user.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from mktts.engine.options import FinishReason, Timings
from mktts.errors import EngineError, MkttsError


class Call(NamedTuple):
    """To the engine: calls a method of `mktts.engine.child.Child`. number: of the `Reply`; None: none is wanted."""

    method: str
    arguments: tuple[Any, ...]
    number: int | None = None


class Reply(NamedTuple):
    """From the engine, to a `Call` of this number."""

    number: int
    value: Any = None
    error: BaseException | None = None


class State(NamedTuple):
    """From the engine, every tenth of a second: `Engine.stats` and `Engine.capacity`."""

    stats: dict[str, Any]
    capacity: Any


class ChunkMade(NamedTuple):
    """From the engine: a chunk of a stream, its samples in 16 bits."""

    id: int
    pcm16: bytes
    start_s: float
    frames: int
    timings: Timings


class Idle(NamedTuple):
    """From the engine: whether a stream waits for its text or its reader, and how late it has been so far."""

    id: int
    idle: bool
    late_s: float


class Over(NamedTuple):
    """From the engine: a stream has ended, or failed."""

    id: int
    reason: FinishReason | None
    error: BaseException | None


class Wire:
    """`send` from any thread, `receive` from one. Both raise OSError where the other process is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))
        self._sending = threading.Lock()

    def send(self, *messages: Any) -> None:
        data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> tuple[Any, ...]:
        """The next messages."""
        try:
            return self._connection.recv()
        except EOFError:
            raise ConnectionError("the other process has closed its end") from None

    def close(self) -> None:
        """The other process's `receive` ends, and this one's, though a thread waits in it."""
        with contextlib.suppress(OSError):  # the other process has gone already
            self._socket.shutdown(socket.SHUT_RDWR)


def sendable(error: BaseException | None) -> BaseException | None:
    """The error, where it is one of ours; others, which may hold what cannot be pickled, in words."""
    if error is None or isinstance(error, MkttsError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")
