"""What an engine in a process of its own and its client say to each other: pickled messages over a socket pair.

Both processes are of this package and started by one user. A voice is sent once and goes by a number from then on, so
that what the engine caches for it is found again.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from mktts.engine.guard import FinishReason
from mktts.engine.options import Timings
from mktts.errors import EngineError
from mktts.model.voice import Voice

VOICES = 256
_LENGTH = struct.Struct("<Q")


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
    """`send` from any thread, `receive` from one. Both raise OSError where the other process is gone.

    A voice goes by its digest once it was sent, while it is one of the last VOICES; both processes count the same.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._reader = end, end.makefile("rb")
        self._sending = threading.Lock()
        self._sent: OrderedDict[str, None] = OrderedDict()  # digests, the newest last
        self._voices: OrderedDict[str, Voice] = OrderedDict()  # that came

    def send(self, *messages: Any) -> None:
        """An error that cannot be pickled is told in words."""
        with self._sending:
            try:
                data = self._pickled(messages)
            except OSError:
                raise
            except Exception:
                self._sent.clear()  # what was not sent is not there
                data = self._pickled(tuple(map(_in_words, messages)))
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...]:
        """The next messages."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        reader = pickle.Unpickler(io.BytesIO(self._read(length)))
        reader.persistent_load = self._voice
        return reader.load()

    def _read(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise ConnectionError("the other process has closed its end")
        return data

    def close(self) -> None:
        """The other process's `receive` ends, and this one's, though a thread waits in it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other process has gone already

    def _pickled(self, messages: tuple[Any, ...]) -> bytes:
        buffer = io.BytesIO()
        writer = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        writer.persistent_id = self._reference
        writer.dump(messages)
        return buffer.getvalue()

    def _reference(self, thing: Any) -> tuple[str, tuple[Any, ...] | None] | None:
        """Of a voice: its digest, and where the other process does not have it what it consists of."""
        if not isinstance(thing, Voice):
            return None
        fields = None
        if thing.digest not in self._sent:
            fields = thing.embedding, thing.codes, thing.transcript, thing.model_size
        _used(self._sent, thing.digest, None)
        return thing.digest, fields

    def _voice(self, reference: tuple[str, tuple[Any, ...] | None]) -> Voice:
        digest, fields = reference
        voice = self._voices[digest] if fields is None else Voice(*fields)
        _used(self._voices, digest, voice)
        return voice


def _used(kept: OrderedDict[str, Any], digest: str, value: Any) -> None:
    """Puts it last, and lets go of the oldest beyond VOICES."""
    kept[digest] = value
    kept.move_to_end(digest)
    if len(kept) > VOICES:
        kept.popitem(last=False)


def _in_words(message: Any) -> Any:
    if isinstance(message, Reply) and message.error is None:
        return message._replace(value=None)
    if isinstance(message, (Reply, Over)) and message.error is not None:
        return message._replace(error=EngineError(f"{type(message.error).__name__}: {message.error}"))
    return message
