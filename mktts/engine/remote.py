"""An engine in a process of its own, behind the engine's interface.

A server of many listeners has two busy threads: the engine's worker, and the event loop with its sockets. In one
process they share one interpreter, whose lock each gives up and waits for thousands of times a second; in two, each
has its own. `mktts.engine.child` is the other process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from mktts.audio.pcm import FULL_SCALE
from mktts.common import python_path
from mktts.engine.admission import AdmissionLimits, Capacity
from mktts.engine.messages import (
    BeginFed,
    Call,
    ChunkMade,
    DropVoice,
    Feed,
    Idle,
    Load,
    Reply,
    Stats,
    Submit,
    Taken,
    Wire,
)
from mktts.engine.options import Chunk, Plan
from mktts.engine.process_settings import ManyStreams
from mktts.engine.runner import EngineStats
from mktts.engine.script import Script
from mktts.engine.stream import EngineName, Notifier, StreamUpdate, Utterance
from mktts.errors import EngineError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice

_TOLD_S = 0.01  # what listeners have taken is told together: the engine plans ticks of as much
_END_S = 10.0  # for the other process to go
_DEAD_S = 0.5  # until the system says that it is dead
_LOG = logging.getLogger(__name__)


class _SentText(Script):
    """Text that another process speaks. say: sends it a piece, or with None the end."""

    voice = None
    started_s = 0.0  # the other process counts from when the text comes

    def __init__(self, say: Callable[[str | None], None]) -> None:
        self.feed = say

    def finish(self) -> None:
        self.feed(None)


class RemoteEngine:
    """As `mktts.engine.engine.Engine`, as far as a synthesizer needs one; codes stay in the other process.

    Loading is waited for and raises what it raises there. Where the other process dies, every stream ends with
    EngineError, the engine is `gone`, and `on_gone` is called, from a thread of this.
    """

    def __init__(self, checkpoint: str, revision: str | None, settings: dict[str, Any]) -> None:
        """What the other process loads, by the arguments of `open_checkpoint` and `Synthesizer.load`."""
        self.gone = self.closed = False
        self.on_gone: Callable[[], None] | None = None
        self.runners: dict[EngineName, Any] = {}  # are in the other process
        # To the teller: what consumers do, voices that are dropped and streams (by number) that are over; None: closed.
        self._inbox: SimpleQueue[StreamUpdate | DropVoice | int | None] = SimpleQueue()
        self._notifier = Notifier()
        self._utterances: dict[int, Utterance] = {}
        self._ids: dict[Utterance, int] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, SimpleQueue[Reply]] = {0: SimpleQueue()}
        self._state = Stats({}, Capacity(1, "not measured"))
        self._ended = False
        self._many = ManyStreams()
        self._lock = threading.Lock()
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", "mktts.engine.child", str(there.fileno())]
            environment = {**os.environ, **python_path()}
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        self._wire = Wire(Connection(here.detach()), self._inbox)
        self._threads = [threading.Thread(target=call, daemon=True) for call in (self._hear, self._tell)]
        for thread in self._threads:
            thread.start()
        self._send(Load(checkpoint, revision, settings))
        try:
            self.backend_name, self.device, self.dtype, self.makes_many = self._answered(0)
        except BaseException:
            self.close()
            raise

    # ---- streams

    def submit(self, requests: Sequence[Request], plan: Plan, started_s: float, *, paced: bool = True) -> Utterance:
        """As `Engine.submit`; timings count from when the other process has it."""
        utterance = self.reserve(plan, paced=paced)
        id = self._begin(utterance, _SentText(lambda text: None))
        self._send(Submit(id, requests, plan, paced))
        return utterance

    def reserve(self, plan: Plan, *, paced: bool = True) -> Utterance:
        """As `Engine.reserve`."""
        self._check_open()
        utterance = Utterance(plan, self._inbox, self._notifier, paced)
        utterance.watched = True  # what is taken is told
        return utterance

    def begin_fed(self, utterance: Utterance, request: Request, max_chars: int, texts: Sequence[str]) -> Script:
        """As `Engine.begin_fed`."""

        def say(text: str | None) -> None:
            if not utterance.over:
                self._send(Feed(id, text))

        script = _SentText(say)
        id = self._begin(utterance, script)
        self._send(BeginFed(id, request, utterance.plan, max_chars, texts))
        return script

    def _begin(self, utterance: Utterance, script: Script) -> int:
        with self._lock:
            self._check_open()
            id = next(self._numbers)
            self._utterances[id], self._ids[utterance] = utterance, id
        utterance.begin(script, "batch")
        return id

    def check(self, sampling: Sampling) -> None:
        """As `Engine.check`, but of the draws, which the other process looks at."""
        self._check_open()

    # ---- all of them

    @property
    def open_streams(self) -> int:
        return len(self._utterances)

    @property
    def stats(self) -> dict[EngineName, EngineStats]:
        """As `Engine.stats`, a tenth of a second ago at most."""
        return self._state.stats

    @property
    def capacity(self) -> Capacity:
        """As `Engine.capacity`, likewise."""
        return self._state.capacity

    def set_limits(self, limits: AdmissionLimits) -> None:
        self._call("set_limits", limits)

    def warm_up(self, request: Request) -> None:
        self._call("warm_up", request)

    def measure_capacity(self, request: Request, renew: bool = False, only_kept: bool = False) -> Capacity:
        return self._call("measure_capacity", request, renew, only_kept)

    def forget(self, voice: Voice) -> None:
        """As `Engine.forget`; not waited for."""
        self._send(Call(-1, "forget", (voice,)))

    def close(self) -> None:
        """Ends every stream and the other process. Idempotent."""
        with self._lock:
            self.closed = True
            was_ended, self._ended = self._ended, True
        if was_ended:
            return
        self._inbox.put(None)
        self._wire.shut()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)
        self._wire.close()
        self._end_all(None)

    # ---- the wire

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the synthesizer is closed: load another one")

    def _send(self, message: Any) -> None:
        try:
            self._wire.send(message)
        except OSError:
            raise self._death() from None

    def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._asked[number] = SimpleQueue()
        self._send(Call(number, method, arguments))
        return self._answered(number)

    def _answered(self, number: int) -> Any:
        reply = self._asked[number].get()
        del self._asked[number]
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _tell(self) -> None:
        """Thread: tells what consumers have taken, and which streams they are done with."""
        with contextlib.suppress(EngineError):
            while self._told(self._inbox.get()):  # whose names are gone when it waits again: it keeps no stream
                pass

    def _told(self, news: Any) -> bool:
        """Tells an update, and what comes within _TOLD_S of it. False: the engine was closed."""
        time.sleep(_TOLD_S if news is not None else 0.0)
        taken: dict[int, int] = {}
        dropped: list[int] = []
        while news is not None:
            if isinstance(news, DropVoice):
                self._send(news)
            elif isinstance(news, int):
                dropped.append(news)
            elif (id := self._ids.get(news.state)) is not None:  # else it had not begun, or is over
                if news.state.cancelled:
                    dropped.append(id)
                    self._utterances.pop(id, None)
                    self._ids.pop(news.state, None)
                else:
                    taken[id] = news.state.taken_frames
            try:
                news = self._inbox.get_nowait()
            except Empty:
                break
        else:
            return False
        self._send(Taken([(id, frames) for id, frames in taken.items() if id not in dropped], dropped))
        return True

    def _hear(self) -> None:
        """Thread: hands on what the other process says."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                for message in self._wire.receive():
                    self._take(message)
                message = None  # it keeps no voice and no error while it waits
                self._notifier.flush()
                self._many.count(len(self._utterances))
        self._many.count(0)
        closed, self.closed = self.closed, True
        error = None if closed else self._death()
        self._end_all(error)
        for asked in list(self._asked.values()):
            asked.put(Reply(0, None, error or EngineError("the synthesizer is closed: load another one")))
        self._notifier.flush()
        if not closed:
            self.gone = True
            _LOG.error("%s", error)
            if self.on_gone is not None:
                self.on_gone()

    def _take(self, message: Any) -> None:
        if isinstance(message, Stats):
            self._state = message
        elif isinstance(message, Reply):
            if (asked := self._asked.get(message.number)) is not None:
                asked.put(message)
        elif (utterance := self._utterances.get(message.id)) is None:
            return  # it was cancelled
        elif isinstance(message, ChunkMade):
            pcm = np.frombuffer(message.pcm16, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
            utterance.deliver(Chunk(pcm, message.start_s, message.frames, message.timings, message.pcm16))
        elif isinstance(message, Idle):
            utterance.late_s = message.late_s
            utterance.set_idle(message.idle)
        else:
            del self._utterances[message.id]
            self._ids.pop(utterance, None)
            utterance.end(message.reason) if message.error is None else utterance.fail(message.error)
            self._inbox.put(message.id)

    def _end_all(self, error: EngineError | None) -> None:
        while self._utterances:
            _, utterance = self._utterances.popitem()
            utterance.cancel() if error is None else utterance.fail(self._death())
        self._ids.clear()

    def _death(self) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEAD_S)
        status = self._process.returncode
        how = "has closed its connection" if status is None else f"has ended with status {status}"
        return EngineError(f"the engine's process {how}: its messages stand above; start the server again")
