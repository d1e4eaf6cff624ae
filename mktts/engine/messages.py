"""What a process with an engine and its client say to each other: pickled messages over a socket pair.

Both processes are of this package and started by one user. A voice is sent once and then goes by a number, so that
what the engine caches for it is found again.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from mktts.engine.guard import FinishReason
from mktts.engine.options import Plan, Timings
from mktts.errors import EngineError
from mktts.model.prompt import Request
from mktts.model.voice import Voice

# ---- to the engine


class Load(NamedTuple):
    """The first message. settings: of `Synthesizer.load`."""

    checkpoint: str
    revision: str | None
    settings: dict[str, Any]


class Call(NamedTuple):
    """Calls a method of the engine, which is answered by a `Reply` of this number."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Submit(NamedTuple):
    """A stream of known text: see `Engine.submit`."""

    id: int
    requests: Sequence[Request]
    plan: Plan
    paced: bool


class BeginFed(NamedTuple):
    """A stream whose text comes by `Feed`: see `Engine.begin_fed`."""

    id: int
    request: Request
    plan: Plan
    max_chars: int
    texts: Sequence[str]


class Feed(NamedTuple):
    """More text; None says that no more comes."""

    id: int
    text: str | None


class Taken(NamedTuple):
    """Frames that consumers have taken in all, by stream; and streams that they cancelled, or that are over."""

    frames: list[tuple[int, int]]
    dropped: list[int]


class KeepVoice(NamedTuple):
    """A voice that messages name by this number from now on."""

    number: int
    voice: Voice


class DropVoice(NamedTuple):
    """The voice of this number is named no more."""

    number: int


# ---- from the engine


class Reply(NamedTuple):
    """To `Call` or, with number 0, to `Load`."""

    number: int
    value: Any = None
    error: BaseException | None = None


class Stats(NamedTuple):
    """The state of the engine, every tenth of a second."""

    stats: dict[str, Any]
    capacity: Any


class ChunkMade(NamedTuple):
    """A chunk of a stream, its samples in 16 bits."""

    id: int
    pcm16: bytes
    start_s: float
    frames: int
    timings: Timings


class Idle(NamedTuple):
    """Whether a stream waits for its text or its reader, and by how much it has been late so far."""

    id: int
    idle: bool
    late_s: float


class Over(NamedTuple):
    """A stream has ended, or failed."""

    id: int
    reason: FinishReason | None
    error: BaseException | None


class Wire:
    """Sends and receives messages; `send` from any thread, `receive` from one. Both raise EOFError or OSError where the
    other process is gone. dropped: gets `DropVoice` for a voice that nothing here holds any more, from a finalizer."""

    def __init__(self, connection: Connection, dropped: SimpleQueue[Any] | None = None) -> None:
        self._connection, self._dropped = connection, dropped
        self._sending = threading.RLock()
        self._numbers = itertools.count(1)
        self._sent: dict[int, tuple[int, weakref.ref[Voice]]] = {}  # voices' numbers, by the object's id
        self._voices: dict[int, Voice] = {}  # that the other process sent, by number

    def send(self, message: Any) -> None:
        """A message, or a list of them. An error that cannot be sent is told in words."""
        with self._sending:
            try:
                data = self._pickled(message)
            except OSError:
                raise
            except Exception:
                data = self._pickled(_told(message))
            self._connection.send_bytes(data)

    def receive(self) -> list[Any]:
        """The next messages, at least one."""
        reader = pickle.Unpickler(io.BytesIO(self._connection.recv_bytes()))
        reader.persistent_load = self._voices.__getitem__
        messages = reader.load()
        messages = messages if isinstance(messages, list) else [messages]
        for message in messages:
            if isinstance(message, KeepVoice):
                self._voices[message.number] = message.voice
            elif isinstance(message, DropVoice):
                self._voices.pop(message.number, None)
        return [message for message in messages if not isinstance(message, (KeepVoice, DropVoice))]

    def shut(self) -> None:
        """The other process's `receive` ends, and this one's, though a thread waits in it."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same, contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)  # fails where the other process has gone already

    def close(self) -> None:
        """Nothing is sent or received any more."""
        self._connection.close()

    def _pickled(self, message: Any) -> bytes:
        buffer = io.BytesIO()
        writer = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        if not isinstance(message, KeepVoice):
            writer.persistent_id = lambda thing: self._number(thing) if isinstance(thing, Voice) else None
        writer.dump(message)
        return buffer.getvalue()

    def _number(self, voice: Voice) -> int:
        found = self._sent.get(id(voice))
        if found is not None and found[1]() is voice:
            return found[0]
        number, key = next(self._numbers), id(voice)
        self._sent[key] = number, weakref.ref(voice, lambda _: self._drop(key, number))
        self._connection.send_bytes(self._pickled(KeepVoice(number, voice)))
        return number

    def _drop(self, key: int, number: int) -> None:
        if self._sent.get(key, (None,))[0] == number:
            del self._sent[key]
        if self._dropped is not None:
            self._dropped.put(DropVoice(number))  # in a finalizer: no lock may be waited for


def _told(message: Any) -> Any:
    if isinstance(message, list):
        return [_told(one) for one in message]
    if isinstance(message, Reply) and message.error is None:
        return message._replace(value=None)
    if isinstance(message, (Reply, Over)) and message.error is not None:
        return message._replace(error=EngineError(f"{type(message.error).__name__}: {message.error}"))
    return message
