"""The executor of many streams without a worker and without a clock: turns are taken by hand, and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import OFF, FakeBackend, FakeCodec, FakeLanes, fake_model, fake_together

from mktts.engine import one_by_one
from mktts.engine.admission import AdmissionSettings
from mktts.engine.job import Job
from mktts.engine.options import Chunk, Plan, StreamOptions
from mktts.engine.script import FedScript
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling

PATIENT = AdmissionSettings()


class Desk:
    """now_s: the time, which passes only where the executor asks for it. lanes, pages, board: of the executor.

    executors, models: by engine; a subclass may add one.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        backend: FakeBackend | None = None,
        codec: FakeCodec | None = None,
        *,
        lanes: FakeLanes | None = None,
        admission: AdmissionSettings = PATIENT,
        prefix: str = "",
        **of_the_lanes: Any,
    ) -> None:
        self.now_s = 0.0
        self.backend = backend or FakeBackend()
        self.lanes = lanes or FakeLanes(self.backend, codec or FakeCodec(), **of_the_lanes)
        self.together = fake_together(self.lanes, admission, prefix)
        self.executors: dict[str, Any] = {"batch": self.together}
        self.models: dict[str, Any] = {"batch": self.together.model}
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.turns = 0
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(executor, "time", clock)
        monkeypatch.setattr(one_by_one, "time", clock)

    @property
    def board(self) -> Any:
        return self.together._board

    @property
    def pages(self) -> Any:
        return self.lanes.pages

    def say(
        self,
        *texts: str,
        seed: int = 1,
        frames: int | None = None,
        options: StreamOptions = OFF,
        paced: bool = True,
        reference: torch.Tensor | None = None,
        engine: str = "batch",
    ) -> Job:
        """A stream of these segments."""
        voice = None if reference is None else SimpleNamespace(codes=reference)
        requests = [Request(text, voice=voice) for text in texts or ("Hello.",)]
        work = self.models[engine].speak(requests, Plan(Sampling(), seed, frames, options), self.now_s)
        return self._opened(work, options.buffer_frames, paced, engine)

    def listen(
        self,
        seed: int = 1,
        frames: int | None = None,
        options: StreamOptions = OFF,
        max_chars: int = 100,
        paced: bool = True,
        engine: str = "batch",
    ) -> tuple[Job, Writer]:
        """A stream whose text is fed to the script."""
        plan = Plan(Sampling(), seed, frames, options)
        work, script = self.models[engine].listen(Request(""), max_chars, plan)
        job = self._opened(work, options.buffer_frames, paced, engine)
        return job, Writer(script, job)

    def _opened(self, work: Any, buffer_frames: int, paced: bool, engine: str) -> Job:
        job = Job(buffer_frames, self.inbox, paced=paced)
        job.begin(work, engine)
        self.executors[engine].take(job)
        return job

    def hear(self) -> None:
        """The executors hear the news that has come."""
        while not self.inbox.empty():
            job = self.inbox.get().job
            self.executors[job.engine].hear(job)

    def turn(self) -> float:
        """One turn now, with the news that has come."""
        self.turns += 1
        self.hear()
        wake_s = self.together.turn(self.now_s, False)
        self.check()
        return wake_s

    def run(self, turns: int = 100_000, until_s: float = math.inf) -> None:
        """Turns until nothing is to be done without news, or before `until_s`; it is that late then."""
        for _ in range(turns):
            wake_s = self.turn()
            if wake_s == math.inf and until_s == math.inf:
                return
            if wake_s >= until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, wake_s) + 1e-6
        raise AssertionError(f"no rest after {turns} turns")

    def check(self) -> None:
        """The books agree with one another."""
        together, board, pages = self.together, self.board, self.pages
        slots = set(together._jobs)
        assert len(together._free) + len(slots) == self.lanes.slots and not slots & set(together._free)
        assert set(board.open.nonzero()[0].tolist()) == slots
        assert set(together._waiting) <= set(together._awake)
        asleep = set(together._asleep.values())
        assert not asleep & set(together._awake) and asleep | set(together._awake) == slots
        assert not board.text_known[list(asleep)].any()
        assert all(
            job.open for job in (*together._jobs.values(), *together._arrived, *together._outside, *together._in_line)
        )
        assert together._door.line == len(together._in_line)
        for slot, job in together._jobs.items():
            coming = sum(lane.job is job for running in together._running for lane in running.lanes)
            assert board.frames_made[slot] == len(job.codes) + coming
        held = {page for slot in slots for page in pages.table[slot].tolist()} - {0}
        kept = {page for prefix in pages._kept.values() for page in prefix.pages}
        assert pages.free + len(held | kept) == len(pages._users) - 1
        assert not (held | kept) & set(pages._free)
        assert not [slot for slot in range(self.lanes.slots) if pages.is_open(slot) and slot not in slots]

    def all_free(self) -> bool:
        """Whether nothing is held by anybody, kept prefixes aside."""
        self.check()
        together = self.together
        return (
            together.open_jobs == 0
            and len(together._free) == self.lanes.slots
            and self.pages.free + self.pages.kept == len(self.pages._users) - 1
            and not (self.lanes.codecs or self.lanes.segments or together._running or together._waiting)
        )


@dataclass
class Writer:
    """Feeds a script as a session does."""

    script: FedScript
    job: Job

    def feed(self, piece: str) -> None:
        self.script.feed(piece)
        self.job.tell()

    def finish(self) -> None:
        self.script.finish()
        self.job.tell()


def chunks_of(job: Job) -> list[Chunk]:
    """The chunks that are ready; raises what ended the stream."""
    chunks = []
    while not job._chunks.empty() and (chunk := job.take()) is not None:
        chunks.append(chunk)
    return chunks


def alone(texts: Sequence[str], seed: int, eos_after: int | None, prefix: str = "") -> list[list[int]]:
    """The codes of a stream that is made by itself, frame by frame, without lanes."""
    model = fake_model(FakeBackend(eos_after=eos_after), prefix=prefix)
    work = model.speak([Request(text) for text in texts], Plan(Sampling(), seed, None, OFF), 0.0)
    while work.finish_reason is None:
        work.step()
    return [frame.tolist() for frame in work.codes]


def frames_of(job: Job) -> list[list[int]]:
    return [frame.tolist() for frame in job.codes]


def fails_at(monkeypatch: pytest.MonkeyPatch, of: object, name: str, calls: set[int], error: Exception) -> None:
    """The calls of those numbers raise instead; a tick that could not be collected is over all the same."""
    original, count = getattr(of, name), iter(range(10**9))

    def call(*args, **kwargs):
        fails = next(count) in calls
        made = None if fails and name != "collect" else original(*args, **kwargs)
        if fails:
            raise error
        return made

    monkeypatch.setattr(of, name, call)
