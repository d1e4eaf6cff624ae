"""The process that owns an engine for `mktts.engine.remote`: does what that says, and sends what the worker makes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mktts.engine.options import Chunk, Plan
from mktts.engine.remote import Call, Wire
from mktts.engine.stream import Utterance
from mktts.errors import EngineError, MkttsError

if TYPE_CHECKING:
    from mktts.model.prompt import Request
    from mktts.text.parts import Pause

_STATE_S = 0.1


def sendable(error: BaseException | None) -> BaseException | None:
    """The error, where it is one of ours; others, which may hold what cannot be pickled, in words."""
    if error is None or isinstance(error, MkttsError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


class StreamSink:
    """Where a stream's chunks go: see `Utterance`."""

    def __init__(self, id: int, child: Child) -> None:
        self._id, self._child = id, child

    def put(self, state: Utterance, chunk: Chunk | None, at_once: bool) -> None:
        if chunk is not None:
            self._child.add("_on_chunk", self._id, chunk.pcm16, chunk.start_s, chunk.frames, chunk.timings)
        elif not at_once:  # otherwise it was cancelled, by the other process
            self._child.add("_on_over", self._id, state.finish_reason, sendable(state.error))

    def idle(self, state: Utterance) -> None:
        self._child.add("_on_idle", self._id, state.idle, state.late_s)


class Child:
    """Does what it is told until the other process goes away. What a turn of the worker gives is sent together, by a
    thread of its own: the worker waits for no socket."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._streams: dict[int, tuple[Utterance, Callable[[Any], None] | None]] = {}
        self._made: list[Call] = []  # in this turn; the worker's
        self._out: SimpleQueue[list[Call]] = SimpleQueue()

    def run(self) -> None:
        """Returns when the other process is gone."""
        with contextlib.suppress(OSError):
            while True:
                for call in self._wire.receive():
                    self._do(call)
                call = None  # it keeps no voice while it waits

    def add(self, method: str, *arguments: Any) -> None:
        """Worker: goes out behind its turn."""
        self._made.append(Call(method, arguments))

    def flush(self) -> None:
        if self._made:
            made, self._made = self._made, []
            self._out.put(made)

    def _send(self) -> None:
        sent_s = 0.0
        with contextlib.suppress(OSError):  # the other process is gone: `receive` says so too
            while True:
                try:
                    calls = self._out.get(timeout=_STATE_S)
                except Empty:
                    calls = []
                if time.monotonic() - sent_s >= _STATE_S:
                    sent_s = time.monotonic()
                    calls.append(self._state())
                self._wire.send(*calls)

    def _state(self) -> Call:
        return Call("_on_state", (self._engine.stats, self._engine.capacity))

    def _do(self, call: Call) -> None:
        of = self if hasattr(self, call.method) else self._engine
        value = error = None
        try:
            value = getattr(of, call.method)(*call.arguments)
        except Exception as raised:
            error = sendable(raised)
            if call.number is None:
                logging.getLogger(__name__).exception("%s failed", call.method)
        if call.number is not None:
            state = [self._state()] if error is None else []
            self._wire.send(*state, Call("_on_reply", (call.number, value, error)))

    # ---- what the other process calls

    def load(self, checkpoint: str, revision: str | None, settings: dict[str, Any]) -> tuple[Any, ...]:
        """The first call: see `RemoteEngine`."""
        from mktts.checkpoint import open_checkpoint
        from mktts.synth import Synthesizer

        synthesizer = Synthesizer.load(open_checkpoint(checkpoint, revision), **settings)
        self._engine = synthesizer.engine
        self._engine.notifier.after = self.flush
        threading.Thread(target=self._send, daemon=True).start()
        return synthesizer.backend_name, str(synthesizer.device), synthesizer.dtype

    def submit(self, id: int, parts: Sequence[Request | Pause], plan: Plan, paced: bool) -> None:
        """A stream of known text: see `Engine.submit`."""
        with self._errors_of(id):
            sink = StreamSink(id, self)
            self._streams[id] = self._engine.submit(parts, plan, time.perf_counter(), paced=paced, sink=sink), None

    def begin_fed(self, id: int, request: Request, plan: Plan, max_chars: int, texts: Sequence[Any]) -> None:
        """A stream whose text goes on by `feed`: see `Engine.begin_fed`."""
        with self._errors_of(id):
            utterance = self._engine.reserve(plan, sink=StreamSink(id, self))
            self._streams[id] = utterance, self._engine.begin_fed(utterance, request, max_chars, texts)

    def feed(self, id: int, piece: Any) -> None:
        """As `FedScript.feed`. No effect on a stream that is over."""
        utterance, feed = self._streams.get(id, (None, None))
        if feed is not None:
            feed(piece)
            utterance.update()

    def taken(self, frames: dict[int, int | None]) -> None:
        """Frames that consumers have taken in all, by stream; None: cancelled."""
        for id, count in frames.items():
            utterance, _ = self._streams.get(id, (None, None))
            if utterance is None:
                continue
            if count is None:
                utterance.cancel()
                continue
            utterance.taken_frames = count
            if utterance.watched:
                utterance.update()
        over = [id for id, (utterance, _) in self._streams.items() if utterance.over]
        for id in over:
            del self._streams[id]

    @contextlib.contextmanager
    def _errors_of(self, id: int) -> Any:
        try:
            yield
        except Exception as error:
            self._out.put([Call("_on_over", (id, None, sendable(error)))])


def main(handle: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group: the other process decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    Child(Wire(socket.socket(fileno=handle))).run()
    os._exit(0)  # without teardown: nothing here is to be kept, and a thread of a library may hold it up


if __name__ == "__main__":
    main(int(sys.argv[1]))
