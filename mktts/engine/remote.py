"""An engine in a process of its own (`Child`), behind the engine's interface (`RemoteEngine`): in one process, the
worker and an event loop with its sockets would wait for the interpreter lock thousands of times a second."""

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial, partialmethod
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from mktts.audio.pcm import FULL_SCALE
from mktts.checkpoint import open_checkpoint
from mktts.common import python_path
from mktts.engine.admission import Capacity
from mktts.engine.engine import ManyStreams
from mktts.engine.options import Chunk, FinishReason, Plan, Timings
from mktts.engine.runner import EngineStats
from mktts.engine.script import Script
from mktts.engine.stream import EngineName, Notifier, Utterance
from mktts.errors import EngineError, MkttsError

_REPORT_S = 0.01  # between two reports of what consumers have taken: about as long as a tick
_END_S = 10.0  # the longest wait for the other process to end
_DEAD_S = 0.5  # the longest wait for the status of a process that is gone
_STATE_S = 0.1  # between two reports of the engine's state
_PROGRAM = (
    "import sys; from mktts import Synthesizer; from mktts.engine.remote import run_child; "
    "run_child(int(sys.argv[1]), Synthesizer.load)"
)
_LOG = logging.getLogger(__name__)
# A method of `Child`, its engine or `RemoteEngine`, its arguments, and the number of the reply, if one is wanted.
Call = tuple[str, tuple[Any, ...], int | None]


class Wire(Connection):
    """The connection of the two processes: any thread may `send` calls, one receives them by `recv`. Once the other
    process is gone both raise OSError, and `recv` also EOFError."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end.detach())
        self._sending = threading.Lock()

    def send(self, *calls: Call) -> None:
        data = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.send_bytes(data)

    def shutdown(self) -> None:
        """Ends `recv` in both processes, even where a thread waits in it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:  # may be closed already
            end.shutdown(socket.SHUT_RDWR)


class RemoteEngine:
    """What a synthesizer needs of `mktts.engine.engine.Engine`, run in another process, where the codes stay.

    The constructor returns once the other process has loaded the model, and raises what fails there. If that process
    dies, every stream ends with EngineError, the engine is `gone`, and one of its threads calls `on_gone`."""

    def __init__(self, checkpoint: str, revision: str | None, settings: dict[str, Any]) -> None:
        """checkpoint, revision: as for `open_checkpoint`. settings: as for `Synthesizer.load`."""
        self.gone = self.closed = False
        self.on_gone: Callable[[], None] | None = None
        self.runners: dict[EngineName, Any] = {}  # they are in the other process
        self._inbox: SimpleQueue[Utterance | None] = SimpleQueue()
        self._notifier, self._many = Notifier(), ManyStreams()
        self._utterances: dict[int, Utterance] = {}
        self._numbers = itertools.count()
        self._replies: dict[int, Future[Any]] = {}
        # As those of `Engine`, at most a tenth of a second old.
        self.stats: dict[EngineName, EngineStats] = {}
        self.capacity = Capacity(1, "not measured")
        self._lock = threading.Lock()
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-c", _PROGRAM, str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=os.environ | python_path())
        self._wire = Wire(here)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._report)]
        for thread in self._threads:
            thread.start()
        try:
            loaded = self._call("load", checkpoint, revision, settings)
        except BaseException:
            self.close()
            raise
        self.backend_name, self.device, self.dtype = loaded

    def reserve(self, plan: Plan) -> Utterance:
        self._check_open()
        utterance = Utterance(plan, self._inbox, self._notifier)
        utterance.watched = True  # so that every chunk taken is reported
        return utterance

    def begin(self, utterance: Utterance, script: Callable[[Any], Script]) -> None:
        """As `Engine.begin`; `script` must be picklable."""
        with self._lock:
            self._check_open()
            id = next(self._numbers)
            self._utterances[id], utterance.number = utterance, id
        utterance.begin(None, "batch")
        self._send("begin", id, utterance.plan, script)
        if utterance.cancelled:  # by another thread, perhaps before the other process knew the stream: reports it again
            self._utterances[id] = utterance
            utterance.update()

    def feed(self, utterance: Utterance, texts: Sequence[Any]) -> None:
        if texts and utterance.number in self._utterances:
            self._send("feed", utterance.number, texts)

    def close(self) -> None:
        """Ends every stream and the other process. Idempotent."""
        with self._lock:
            self.closed = True
        self._inbox.put(None)
        self._wire.shutdown()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def _check_open(self) -> None:
        if self.closed:
            raise self._end()

    def _send(self, method: str, *arguments: Any, number: int | None = None) -> None:
        try:
            self._wire.send((method, arguments, number))
        except OSError:
            raise self._end() from None

    def _call(self, method: str, *arguments: Any) -> Any:
        number, reply = next(self._numbers), Future()
        with self._lock:
            self._check_open()
            self._replies[number] = reply
        self._send(method, *arguments, number=number)
        return reply.result()  # raises if the other process ends

    set_limits = partialmethod(_call, "set_limits")
    warm_up = partialmethod(_call, "warm_up")
    measure_capacity = partialmethod(_call, "measure_capacity")
    forget = partialmethod(_send, "forget")  # without a reply

    def _report(self) -> None:
        """Thread: reports what consumers have taken, and which streams are cancelled."""
        while not self.closed:
            updated = [self._inbox.get()]
            time.sleep(_REPORT_S)
            while not self._inbox.empty():
                updated.append(self._inbox.get())
            here = [one for one in updated if one is not None and one.number in self._utterances]  # begun, and not over
            taken = {one.number: None if one.cancelled else one.taken_frames for one in here}
            for id in [one.number for one in here if one.cancelled]:
                self._utterances.pop(id, None)
            updated = here = None  # keeps no stream alive while it waits
            with contextlib.suppress(EngineError):
                self._send("taken", taken)

    def _receive(self) -> None:
        """Thread: handles the calls of the other process, until that is gone."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                for method, arguments, _ in self._wire.recv():
                    getattr(self, method)(*arguments)
                arguments = None  # keeps no error alive while it waits
                self._notifier.flush()
                self._many.count(len(self._utterances))
        self._many.count(0)
        with self._lock:
            self.gone, self.closed = not self.closed, True
        self._inbox.put(None)
        for utterance in list(self._utterances.values()):
            utterance.fail(self._end()) if self.gone else utterance.cancel()
        self._utterances.clear()
        for reply in self._replies.values():
            reply.set_exception(self._end())
        self._notifier.flush()
        if self.gone:
            _LOG.error("%s", self._end())
            if self.on_gone is not None:
                self.on_gone()

    def _end(self) -> EngineError:
        """The error that says why there can be no further call."""
        if self.closed and not self.gone:
            return EngineError("the synthesizer is closed: load another one")
        how = "has closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = f"has ended with status {self._process.wait(_DEAD_S)}"
        return EngineError(f"the engine's process {how}: see its messages above, and start the server again")

    # ---- called by the other process; streams that were cancelled are unknown here

    def _on_state(self, stats: dict[EngineName, EngineStats], capacity: Capacity) -> None:
        self.stats, self.capacity = stats, capacity

    def _on_reply(self, number: int, value: Any, error: BaseException | None) -> None:
        reply = self._replies.pop(number)
        reply.set_result(value) if error is None else reply.set_exception(error)

    def _on_chunk(self, id: int, pcm16: bytes, start_s: float, frames: int, timings: Timings) -> None:
        if (utterance := self._utterances.get(id)) is not None:
            pcm = np.frombuffer(pcm16, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
            utterance.deliver(Chunk(pcm, start_s, frames, timings, pcm16))

    def _on_idle(self, id: int, idle: bool, late_s: float) -> None:
        if (utterance := self._utterances.get(id)) is not None:
            utterance.late_s = late_s
            utterance.set_idle(idle)

    def _on_over(self, id: int, reason: FinishReason | None, error: BaseException | None) -> None:
        if (utterance := self._utterances.pop(id, None)) is not None:
            utterance.end(reason) if error is None else utterance.fail(error)


# ---- the other process


def sendable(error: BaseException | None) -> BaseException | None:
    """The error if it is one of ours; otherwise an EngineError with its text, as others may not be picklable."""
    if error is None or isinstance(error, MkttsError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


class Child:
    """Executes the calls of `RemoteEngine`, until its process is gone. The results of one turn of the worker are sent
    together, by another thread, so that the worker waits for no socket."""

    def __init__(self, wire: Wire, load: Callable[..., Any]) -> None:
        """load: `Synthesizer.load`."""
        self._wire, self._load = wire, load
        self._streams: dict[int, Utterance] = {}
        self._made: list[Call] = []  # during this turn; the worker's
        self._out: SimpleQueue[list[Call]] = SimpleQueue()

    def tell(self, id: int, utterance: Utterance, what: str, chunk: Chunk | None) -> None:
        """Worker: the `sink` of an `Utterance`; the calls are sent after the turn."""
        if what == "chunk":
            arguments: tuple[Any, ...] = chunk.pcm16, chunk.start_s, chunk.frames, chunk.timings
        elif what == "idle":
            arguments = utterance.idle, utterance.late_s
        else:
            arguments = utterance.finish_reason, sendable(utterance.error)
            self._streams.pop(id, None)
        self._made.append((f"_on_{what}", (id, *arguments), None))

    def flush(self) -> None:
        if self._made:
            made, self._made = self._made, []
            self._out.put(made)

    def _send(self) -> None:
        sent_s = 0.0
        with contextlib.suppress(OSError):  # the other process is gone: `recv` raises too
            while True:
                calls: list[Call] = []
                with contextlib.suppress(Empty):
                    calls = self._out.get(timeout=_STATE_S)
                if time.monotonic() - sent_s >= _STATE_S:
                    sent_s = time.monotonic()
                    calls.append(self._state())
                self._wire.send(*calls)

    def _state(self) -> Call:
        return "_on_state", (self._engine.stats, self._engine.capacity), None

    def do(self, method: str, arguments: tuple[Any, ...], number: int | None) -> None:
        of = self if hasattr(self, method) else self._engine
        value = error = None
        try:
            value = getattr(of, method)(*arguments)
        except Exception as raised:
            error = sendable(raised)
            if method == "begin":
                self._streams.pop(arguments[0], None)
                self._out.put([("_on_over", (arguments[0], None, error), None)])
            elif number is None:
                _LOG.exception("%s failed", method)
        if number is not None:
            state = [self._state()] if error is None else []
            self._wire.send(*state, ("_on_reply", (number, value, error), None))

    # ---- what `RemoteEngine` calls

    def load(self, checkpoint: str, revision: str | None, settings: dict[str, Any]) -> tuple[Any, ...]:
        """The first call: see `RemoteEngine`."""
        synthesizer = self._load(open_checkpoint(checkpoint, revision), **settings)
        self._engine = synthesizer.engine
        self._engine.notifier.after = self.flush
        threading.Thread(target=self._send, daemon=True).start()
        return synthesizer.backend_name, str(synthesizer.device), synthesizer.dtype

    def begin(self, id: int, plan: Plan, script: Callable[[Any], Script]) -> None:
        utterance = self._streams[id] = self._engine.reserve(plan, sink=partial(self.tell, id))
        self._engine.begin(utterance, script)

    def feed(self, id: int, texts: Sequence[Any]) -> None:
        """See `Engine.feed`."""
        if (utterance := self._streams.get(id)) is not None:
            self._engine.feed(utterance, texts)

    def taken(self, frames: dict[int, int | None]) -> None:
        """Notes how many frames the consumer of each stream has taken in all; None: it has cancelled the stream."""
        for id, count in frames.items():
            utterance = self._streams.get(id)
            if utterance is not None and count is None:
                utterance.cancel()
            elif utterance is not None:
                utterance.taken_frames = count
                utterance.lately_read.append(utterance)
                if utterance.watched:
                    utterance.update()


def run_child(handle: int, load: Callable[..., Any]) -> None:
    """What the other process does, until this one is gone. handle: of its socket. load: `Synthesizer.load`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group, but the parent decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    wire = Wire(socket.socket(fileno=handle))
    child = Child(wire, load)
    with contextlib.suppress(OSError, EOFError):
        while True:
            for call in wire.recv():
                child.do(*call)
            call = None  # keeps no voice alive while it waits
    os._exit(0)  # without teardown: there is nothing to save, and a library's thread may block it
