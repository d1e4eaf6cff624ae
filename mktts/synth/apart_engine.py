"""The process that owns the model: opens what it is asked for, and sends what the worker makes, a turn at a time.

The two processes say everything in pickled messages over a socket; both are of this package, started by one user."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from mktts.errors import EngineError
from mktts.speech.guard import FinishReason
from mktts.speech.job import Job
from mktts.speech.options import Chunk, Timings
from mktts.speech.serving import many_streams
from mktts.speech.stream import Session, Stream

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


_STANDING_S = 0.1  # between two accounts of how the engines stand


class Sender:
    """Where the chunks of all streams go instead of to a consumer: see `mktts.speech.job.Away`.

    What a turn of the worker gives is one message, sent by a thread of its own: the worker waits for nobody.
    """

    def __init__(self, wire: Wire, standing: Callable[[], Stands]) -> None:
        self._wire, self._standing = wire, standing
        self._made: list[Any] = []  # in this turn; the worker's
        self._out: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="mktts-sender", daemon=True)
        self._thread.start()

    def put(self, job: Job, chunk: Chunk | None, at_once: bool) -> None:
        """A chunk of `job`, or its end. at_once: from another thread than the worker's."""
        id = job.name
        if chunk is not None:
            self._made.append(ChunkMessage(id, chunk.pcm16, chunk.start_s, chunk.frames, chunk.timings))
        elif at_once:
            self._out.put([Over(id, "cancelled", None)])
        else:
            self._made.append(Over(id, job.finish_reason, job.error))

    def rested(self, job: Job) -> None:
        """It waits for its text or its reader, or does so no more."""
        self._made.append(Rests(job.name, job.resting))

    def turn_over(self) -> None:
        """Worker: what there is goes out."""
        if self._made:
            made, self._made = self._made, []
            self._out.put(made)

    def say(self, message: Any) -> None:
        """Behind what was made before, and with how the engines stand by now."""
        self._out.put([self._standing(), message])

    def close(self) -> None:
        """Sends what there is, and ends."""
        self._out.put(None)
        self._thread.join(5.0)

    def _send(self) -> None:
        told_s = 0.0
        try:
            while True:
                try:
                    messages = self._out.get(timeout=_STANDING_S)
                    if messages is None:
                        return
                except Empty:
                    messages = []
                if time.monotonic() - told_s >= _STANDING_S:
                    messages, told_s = [*messages, self._standing()], time.monotonic()
                self._wire.send(messages)
        except OSError:  # the other side is gone: `receive` says so too
            pass


class Maker:
    """Does what it is told until the other side goes away."""

    def __init__(self, wire: Wire, synthesizer: Any, sender: Sender) -> None:
        self._wire, self._synthesizer, self._sender = wire, synthesizer, sender
        self._streams: dict[int, Stream] = {}
        self._voices: dict[int, Any] = {}

    def run(self) -> None:
        """Returns when the other side is gone."""
        try:
            while True:
                self._do(*self._wire.receive())  # whose names are gone when it waits again: it keeps no voice
        except (EOFError, OSError):
            pass

    def _do(self, *messages: Any) -> None:
        for message in messages:
            if isinstance(message, Read):
                self._read(message)
            elif isinstance(message, Open):
                self._open(message)
            elif isinstance(message, Feed):
                self._feed(message)
            elif isinstance(message, KeepVoice):
                self._voices[message.number] = message.voice
            elif isinstance(message, DropVoice):
                self._voices.pop(message.number, None)
            elif isinstance(message, Ask):
                self._sender.say(self._answer(message))

    def _open(self, order: Open) -> None:
        settings = dict(order.settings)
        if order.voice is not None:
            settings["voice"] = self._voices[order.voice]
        try:
            stream = self._synthesizer.open_away(order.text, (self._sender, order.id), settings)
        except Exception as error:
            self._sender.say(Over(order.id, None, error))
        else:
            self._streams[order.id] = stream

    def _feed(self, order: Feed) -> None:
        session = self._streams.get(order.id)
        if not isinstance(session, Session):  # over, or it was refused
            return
        try:
            session.finish() if order.text is None else session.feed(order.text)
        except Exception as error:
            self._streams.pop(order.id).cancel()
            self._sender.say(Over(order.id, None, error))

    def _read(self, news: Read) -> None:
        for id, frames in news.taken:
            if (stream := self._streams.get(id)) is not None:
                stream.read_away(frames)
        for id in news.cancelled:  # by its listener, or it is over and nobody asks for it any more
            if (stream := self._streams.pop(id, None)) is not None:
                stream.cancel()

    def _answer(self, order: Ask) -> Answer:
        arguments = order.arguments if order.voice is None else (self._voices[order.voice],)
        try:
            return Answer(order.number, None, getattr(self._synthesizer, order.method)(*arguments))
        except Exception as error:
            return Answer(order.number, error)


def main(handle: int) -> None:
    """The process, with the socket of that number."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group: the other process decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    wire = Wire(Connection(socket.socket(fileno=handle).detach()))
    try:
        load: Load = wire.receive()[0]
    except (EOFError, OSError):
        return
    try:
        from mktts.checkpoint import open_checkpoint
        from mktts.synth.synthesizer import Synthesizer

        synthesizer = Synthesizer.load(open_checkpoint(load.checkpoint, load.revision), **load.settings)
    except BaseException as error:
        wire.send(Answer(0, error))
        return
    with synthesizer, many_streams():
        sender = Sender(wire, lambda: Stands(synthesizer.standing))
        facts = (synthesizer.backend_name, str(synthesizer.device), synthesizer.dtype, synthesizer.serves_many)
        sender.say(Answer(0, None, facts))
        Maker(wire, synthesizer, sender).run()
    sender.close()
    os._exit(0)  # without teardown: nothing here is to be kept, and a thread of a library may hold it up


if __name__ == "__main__":
    from mktts.synth import apart_engine  # messages are of that module, not of __main__

    apart_engine.main(int(sys.argv[1]))
