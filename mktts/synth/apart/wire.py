"""What the two processes say to each other. One pickle a message; both are of this package, started by one user."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from mktts.errors import EngineError
from mktts.speech.guard import FinishReason
from mktts.speech.options import Timings

# ---- to the one that makes


class Load(NamedTuple):
    """First of all. settings: of `Synthesizer.load`."""

    checkpoint: str
    revision: str | None
    settings: dict[str, Any]


class Ask(NamedTuple):
    """Calls a method of the synthesizer, or with `voice` one of that voice, and is answered under `number`."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    voice: int | None = None


class KeepVoice(NamedTuple):
    """A voice that streams name by number from now on: what is cached for it is found by the object."""

    number: int
    voice: Any


class DropVoice(NamedTuple):
    """The voice of that number is named no more."""

    number: int


class Open(NamedTuple):
    """A new stream. text: None where it comes later. settings: of `Synthesizer.stream`, voice by its number."""

    id: int
    text: str | None
    settings: dict[str, Any]
    voice: int | None


class Feed(NamedTuple):
    """More text; None says that no more comes."""

    id: int
    text: str | None


class Read(NamedTuple):
    """What listeners did since the last one: frames that they have taken in all, by stream; and who wants no more."""

    taken: list[tuple[int, int]]
    cancelled: list[int]


# ---- from it


class Answer(NamedTuple):
    """To `Ask` or, with number 0, to `Load`. value: what the method returned, if it can be sent."""

    number: int
    error: BaseException | None = None
    value: Any = None


class Stands(NamedTuple):
    """How the engines stand: `Synthesizer.standing`."""

    engines: dict[str, Any]


class ChunkMessage(NamedTuple):
    """A chunk of a stream: 16-bit samples, and the rest of `mktts.speech.options.Chunk`."""

    id: int
    pcm16: bytes
    start_s: float
    frames: int
    timings: Timings


class Rests(NamedTuple):
    """Whether a stream waits for its text, or for its reader."""

    id: int
    resting: bool


class Over(NamedTuple):
    """A stream has ended, or failed."""

    id: int
    reason: FinishReason | None
    error: BaseException | None


class Wire:
    """Messages over a connection; `send` from any thread, `receive` from one. Both raise EOFError or OSError where the
    other side is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """A message, or a list of them. An error that cannot be sent is told in words."""
        try:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            data = pickle.dumps(_told(message), protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> list[Any]:
        """The next messages, at least one."""
        message = pickle.loads(self._connection.recv_bytes())
        return message if isinstance(message, list) else [message]

    def shut(self) -> None:
        """The other side's `receive` ends, and this one's, though a thread waits in it."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same, contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)  # fails where the other side has gone already

    def close(self) -> None:
        """Nothing is sent or received any more."""
        self._connection.close()


def _told(message: Any) -> Any:
    if isinstance(message, list):
        return [_told(one) for one in message]
    if isinstance(message, (Answer, Over)) and message.error is not None:
        error = EngineError(f"{type(message.error).__name__}: {message.error}")
        return message._replace(error=error, **({"value": None} if isinstance(message, Answer) else {}))
    return message
