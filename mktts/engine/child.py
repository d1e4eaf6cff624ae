"""The process that owns an engine for `mktts.engine.remote`: does what messages say, and sends what the worker makes,
a turn at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mktts.engine.messages import BeginFed, Call, ChunkMade, Feed, Idle, Load, Over, Reply, Stats, Submit, Taken, Wire
from mktts.engine.options import Chunk
from mktts.engine.script import Script
from mktts.engine.stream import Utterance

if TYPE_CHECKING:
    from mktts.engine.engine import Engine

_STATS_S = 0.1


class Sender:
    """The sink of all streams. What a turn of the worker gives is one message, sent by a thread of its own: the worker
    waits for no socket."""

    def __init__(self, wire: Wire, stats: Callable[[], Stats]) -> None:
        self.ids: dict[Utterance, int] = {}
        self._wire, self._stats = wire, stats
        self._made: list[Any] = []  # in this turn; the worker's
        self._out: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def put(self, state: Utterance, chunk: Chunk | None, at_once: bool) -> None:
        """As `mktts.engine.stream.Sink`."""
        if (id := self.ids.get(state)) is None:
            return  # cancelled: nobody asks for it any more
        if chunk is not None:
            self._made.append(ChunkMade(id, chunk.pcm16, chunk.start_s, chunk.frames, chunk.timings))
        elif at_once:
            self._out.put([Over(id, "cancelled", None)])
        else:
            self._made.append(Over(id, state.finish_reason, state.error))

    def idle(self, state: Utterance) -> None:
        if (id := self.ids.get(state)) is not None:
            self._made.append(Idle(id, state.idle, state.late_s))

    def flush(self) -> None:
        """Worker, after a turn."""
        if self._made:
            made, self._made = self._made, []
            self._out.put(made)

    def say(self, message: Any) -> None:
        """Behind what was made before, and with the state by now."""
        self._out.put([self._stats(), message])

    def close(self) -> None:
        """Sends what there is, and ends."""
        self._out.put(None)
        self._thread.join(5.0)

    def _send(self) -> None:
        told_s = 0.0
        with contextlib.suppress(OSError):  # the other process is gone: `receive` says so too
            while True:
                try:
                    messages = self._out.get(timeout=_STATS_S)
                    if messages is None:
                        return
                except Empty:
                    messages = []
                if time.monotonic() - told_s >= _STATS_S:
                    messages, told_s = [*messages, self._stats()], time.monotonic()
                self._wire.send(messages)


class Child:
    """Does what it is told until the other process goes away."""

    def __init__(self, wire: Wire, engine: Engine, sender: Sender) -> None:
        self._wire, self._engine, self._sender = wire, engine, sender
        self._utterances: dict[int, tuple[Utterance, Script | None]] = {}

    def run(self) -> None:
        """Returns when the other process is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                for message in self._wire.receive():
                    self._do(message)
                message = None  # it keeps no voice while it waits

    def _do(self, message: Any) -> None:
        if isinstance(message, Taken):
            self._taken(message)
        elif isinstance(message, Call):
            self._call(message)
        elif isinstance(message, Feed):
            if (found := self._utterances.get(message.id)) is not None:  # else it is over, or was refused
                utterance, script = found
                script.finish() if message.text is None else script.feed(message.text)
                utterance.update()
        else:
            self._begin(message)

    def _begin(self, order: Submit | BeginFed) -> None:
        paced = order.paced if isinstance(order, Submit) else True
        try:
            utterance = self._engine.reserve(order.plan, paced=paced, sink=self._sender)
            self._sender.ids[utterance], script = order.id, None
            self._utterances[order.id] = utterance, None
            if isinstance(order, Submit):
                self._engine.begin_known(utterance, order.requests, time.perf_counter())
            else:
                script = self._engine.begin_fed(utterance, order.request, order.max_chars, order.texts)
                self._utterances[order.id] = utterance, script
        except Exception as error:
            self._sender.say(Over(order.id, None, error))

    def _taken(self, news: Taken) -> None:
        for id, frames in news.frames:
            if (found := self._utterances.get(id)) is not None:
                found[0].has_taken(frames)
        for id in news.dropped:  # cancelled by its consumer, or over, and nobody asks for it any more
            if (found := self._utterances.pop(id, None)) is not None:
                self._sender.ids.pop(found[0], None)
                found[0].cancel()

    def _call(self, order: Call) -> None:
        try:
            reply = Reply(order.number, getattr(self._engine, order.method)(*order.arguments))
        except Exception as error:
            reply = Reply(order.number, None, error)
        self._sender.say(reply)


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
        from mktts.synthesizer import Synthesizer

        synthesizer = Synthesizer.load(open_checkpoint(load.checkpoint, load.revision), **load.settings)
    except BaseException as error:
        wire.send(Reply(0, None, error))
        return
    engine = synthesizer.engine
    with synthesizer:
        sender = Sender(wire, lambda: Stats(engine.stats, engine.capacity))
        engine.after_turn(sender.flush)
        facts = synthesizer.backend_name, str(synthesizer.device), synthesizer.dtype, engine.makes_many
        sender.say(Reply(0, facts))
        Child(wire, engine, sender).run()
    sender.close()
    os._exit(0)  # without teardown: nothing here is to be kept, and a thread of a library may hold it up


if __name__ == "__main__":
    from mktts.engine import child  # messages' classes are of their module, not of __main__

    child.main(int(sys.argv[1]))
