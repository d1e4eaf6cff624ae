"""A synthesizer in a process of its own, behind the interface of one in this process.

A server of many listeners has two busy threads: the engine's worker, and the event loop with its sockets. In one
process they share one interpreter, whose lock each gives up and waits for thousands of times a second; in two, each
has its own. `mktts.synth.apart_engine` is the other process.
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
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import torch

from mktts.audio.pcm import FULL_SCALE
from mktts.checkpoint import Checkpoint
from mktts.common import python_path
from mktts.errors import EngineError, PromptError
from mktts.model.sampling import drawn_seed
from mktts.model.voice import Voice
from mktts.speech.executor import Standing, Wishes
from mktts.speech.job import Bell, EngineName, Job, News
from mktts.speech.options import Chunk, StreamOptions
from mktts.speech.stream import Session, Stream
from mktts.speech.text import clean_text
from mktts.synth.apart_engine import (
    Answer,
    Ask,
    ChunkMessage,
    DropVoice,
    Feed,
    KeepVoice,
    Load,
    Open,
    Over,
    Read,
    Rests,
    Stands,
    Wire,
)
from mktts.synth.synthesizer import StreamSettings


class _SentScript:
    """Text that another process speaks. say: tells that one a piece, or with None the end."""

    started_s = 0.0  # told to nobody: the other process counts from when the text comes

    def __init__(self, job: Job, say: Callable[[str | None], None]) -> None:
        self._job, self.feed = job, say

    def finish(self) -> None:
        if not self._job.over:
            self.feed(None)


_TOLD_S = 0.01  # what listeners have taken is told together: the engine plans ticks of as much
_END_S = 10.0  # for the other process to go
_DEAD_S = 0.5  # until the system says that it is dead

_LOG = logging.getLogger(__name__)


class ApartSynthesizer:
    """As `mktts.synth.Synthesizer`, as far as servers use one; samples have gone through 16 bits, and codes stay there.

    Loading, warming up and calibrating are waited for, and raise what they raise there. Where the other process dies,
    every stream ends with EngineError, it is `gone`, and `on_gone` is called, from a thread of this.
    """

    gone = False
    on_gone: Callable[[], None] | None = None

    def __init__(self, checkpoint: Checkpoint, name: str, revision: str | None, settings: dict[str, Any]) -> None:
        """checkpoint: for this process to look at. name, revision, settings: that the other one loads with."""
        self.checkpoint, self.sampling = checkpoint, checkpoint.sampling()
        # To the teller: what consumers do, which voices and (by its number) which stream are over here; None: closed.
        self._inbox: SimpleQueue[News | DropVoice | int | None] = SimpleQueue()
        self._bell = Bell()
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._asked: dict[int, SimpleQueue[Answer]] = {0: SimpleQueue()}
        self._voices: dict[int, tuple[int, weakref.ref[Voice]]] = {}  # their numbers there, by the object's here
        self._standing: dict[EngineName, Standing] = {}
        self._closed = self._ended = False  # no more streams; nothing is left
        self._lock = threading.Lock()
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", "mktts.synth.apart_engine", str(there.fileno())]
            environment = {**os.environ, **python_path()}
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        self._wire = Wire(Connection(here.detach()))
        self._threads = [
            threading.Thread(target=call, name=f"mktts-{name}", daemon=True)
            for name, call in (("hears", self._hear), ("tells", self._tell))
        ]
        for thread in self._threads:
            thread.start()
        self._wire.send(Load(name, revision, settings))
        try:
            self.backend_name, device, self.dtype, self.serves_many = self._answered(0)
        except BaseException:
            self.close()
            raise
        self.device = torch.device(device)

    # ---- streams

    def stream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """As `Synthesizer.stream`; what is wrong with the settings is raised by the stream."""
        job, seed = self._open(clean_text(text), settings)
        return Stream(self, job, seed)

    def open(self, **settings: Unpack[StreamSettings]) -> Session:
        """As `Synthesizer.open`; what a front end has no words for ends the stream with its TextError."""
        if settings.get("layout") == "whole":
            raise PromptError("text that arrives later needs the streaming layout, got layout='whole'")
        job, seed = self._open(None, settings)
        script = _SentScript(job, lambda text: self._say(Feed(job.name, text)))
        return Session(self, job, seed, lambda: (None, script, "batch"))

    def begin(self, job: Job, work: Any, on: EngineName) -> None:
        """Of `mktts.speech.stream.Begins`: the other process does."""

    def _open(self, text: str | None, settings: StreamSettings) -> tuple[Job, int]:
        seed = settings.get("seed")
        seed = drawn_seed() if seed is None else seed
        options = settings.get("options") or StreamOptions()
        voice = settings.get("voice")
        sent = {**settings, "seed": seed, "options": options}
        sent.pop("voice", None)
        job = Job(options.buffer_frames, self._inbox, self._bell)
        job.name, job.watched = next(self._ids), True  # what is taken is told
        job.begin(SimpleNamespace(codes=[], close=lambda: None), "batch")  # nothing is made or held here
        with self._lock:
            if self._closed:
                raise EngineError("the synthesizer is closed: load another one")
            self._jobs[job.name] = job
        self._say(Open(job.name, text, sent, None if voice is None else self._number(voice)))
        return job, seed

    def _number(self, voice: Voice) -> int:
        found = self._voices.get(id(voice))
        if found is not None and found[1]() is voice:
            return found[0]
        number, key = next(self._ids), id(voice)
        self._voices[key] = number, weakref.ref(voice, lambda _: self._drop(key, number))
        self._say(KeepVoice(number, voice))
        return number

    def _drop(self, key: int, number: int) -> None:
        if self._voices.get(key, (None,))[0] == number:
            del self._voices[key]
        self._inbox.put(DropVoice(number))  # in a finalizer: no lock may be waited for

    # ---- the rest of the interface

    def admit(self, wishes: Wishes) -> None:
        self._ask("admit", wishes)

    def warm_up(self) -> None:
        self._ask("warm_up")

    def calibrate(self) -> None:
        self._ask("calibrate")

    def forget(self, voice: Voice) -> None:
        """As `Synthesizer.forget`; not waited for."""
        self._say(Ask(next(self._ids), "forget", (), self._number(voice)))

    @property
    def standing(self) -> dict[EngineName, Standing]:
        """As `Synthesizer.standing`, a tenth of a second ago at most."""
        return self._standing

    @property
    def carries(self) -> int:
        return max((one.carries for one in self._standing.values()), default=1)

    def close(self) -> None:
        """Ends every stream and the other process. Idempotent."""
        with self._lock:
            self._closed = True
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

    def __enter__(self) -> ApartSynthesizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the wire

    def _say(self, message: Any) -> None:
        try:
            self._wire.send(message)
        except OSError:
            raise self._gone() from None

    def _ask(self, method: str, *arguments: Any) -> Any:
        number = next(self._ids)
        self._asked[number] = SimpleQueue()
        self._say(Ask(number, method, arguments))
        return self._answered(number)

    def _answered(self, number: int) -> Any:
        answer = self._asked[number].get()
        del self._asked[number]
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _tell(self) -> None:
        """Thread: tells what consumers have taken, and who wants no more."""
        with contextlib.suppress(EngineError):
            while self._told(self._inbox.get()):  # whose names are gone when it waits again: it keeps no stream
                pass

    def _told(self, news: News | DropVoice | int | None) -> bool:
        """Tells news, and what comes within _TOLD_S of them. False: this synthesizer was closed."""
        time.sleep(_TOLD_S if news is not None else 0.0)
        taken: dict[int, int] = {}
        gone: list[int] = []
        while news is not None:
            if isinstance(news, DropVoice):
                self._say(news)
            elif isinstance(news, int):
                gone.append(news)
            elif news.job.cancelled:
                gone.append(news.job.name)
            else:
                taken[news.job.name] = news.job.taken_frames
            try:
                news = self._inbox.get_nowait()
            except Empty:
                break
        else:
            return False
        for id in gone:
            taken.pop(id, None)
            self._jobs.pop(id, None)
        self._say(Read(list(taken.items()), gone))
        return True

    def _hear(self) -> None:
        """Thread: hands on what the other process says."""
        try:
            while True:
                self._take(*self._wire.receive())
                self._bell.sound()
        except (EOFError, OSError):
            pass
        closed, self._closed = self._closed, True
        error = None if closed else self._gone()
        self._end_all(error)
        for asked in list(self._asked.values()):
            asked.put(Answer(0, error or EngineError("the synthesizer is closed: load another one")))
        self._bell.sound()
        if not closed:
            self.gone = True
            _LOG.error("%s", error)
            if self.on_gone is not None:
                self.on_gone()

    def _take(self, *messages: Any) -> None:
        for message in messages:
            if isinstance(message, Stands):
                self._standing = message.engines
            elif isinstance(message, Answer):
                if (asked := self._asked.get(message.number)) is not None:
                    asked.put(message)
            elif (job := self._jobs.get(message.id)) is not None:  # else it was cancelled
                self._hand_on(message, job)

    def _hand_on(self, message: ChunkMessage | Rests | Over, job: Job) -> None:
        if isinstance(message, ChunkMessage):
            pcm = np.frombuffer(message.pcm16, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
            job.deliver(Chunk(pcm, message.start_s, message.frames, message.timings, message.pcm16))
        elif isinstance(message, Rests):
            job.rest(message.resting)
        else:
            del self._jobs[message.id]
            job.end(message.reason) if message.error is None else job.fail(message.error)
            self._inbox.put(message.id)

    def _end_all(self, error: EngineError | None) -> None:
        while self._jobs:
            _, job = self._jobs.popitem()
            job.cancel() if error is None else job.fail(self._gone())

    def _gone(self) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEAD_S)
        status = self._process.returncode
        how = "has closed its connection" if status is None else f"has ended with status {status}"
        return EngineError(f"the process that speaks {how}: its messages stand above; start the server again")
