"""The runner of many streams without a worker and without a clock: turns are taken by hand, and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import OFF, PATIENT, FakeBackend, FakeCodec, FakeLanes, fake_batch, fake_single

from mktts.engine import runner
from mktts.engine.admission import Admission, AdmissionLimits
from mktts.engine.lanes import SingleLanes
from mktts.engine.options import Chunk, Plan, StreamOptions
from mktts.engine.runner import Runner
from mktts.engine.script import FedScript, Script
from mktts.engine.stream import Notifier, Session, Stream, Utterance
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.synth import Synthesizer


class Desk:
    """now_s: the time, which passes only where the runner asks for it. lanes, pages, table: of the runner. runners: by
    engine; a subclass may add one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend | None = None, *, prefix: str = "",
        lanes: FakeLanes | SingleLanes | None = None, limits: AdmissionLimits = PATIENT, **of_the_lanes: Any,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.backend = backend or FakeBackend()
        self.lanes = lanes or FakeLanes(self.backend, FakeCodec(), **of_the_lanes)
        self.admission = Admission(limits)
        self.batch = fake_batch(self.lanes, self.admission, prefix)
        self.table, self.pages = self.batch._table, self.lanes.pages
        self.runners: dict[str, Any] = {"batch": self.batch}
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.turns = 0
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(runner, "time", clock)

    def say(self, *texts: str, engine: str = "batch", **plan: Any) -> Utterance:
        """A stream of these segments. plan: see `plan_of`."""
        requests = [Request(text) for text in texts or ("Hello.",)]
        return self.begin(Script(requests, self.runners[engine], self.now_s), engine, **plan)

    def listen(self, engine: str = "batch", **plan: Any) -> Utterance:
        """A stream whose text is to be fed."""
        return self.begin(FedScript(Request(""), self.runners[engine], max_chars=100), engine, **plan)

    @staticmethod
    def feed(job: Utterance, *pieces: str | None) -> None:
        """As the engine does. None: the end."""
        if job.script is not None:
            job.script.feed(*pieces)
            job.update()

    def begin(self, script: Script, engine: str = "batch", **plan: Any) -> Utterance:
        job = Utterance(plan_of(**plan), self.inbox, Notifier())
        job.begin(script, engine)
        self.runners[engine].update(job)
        return job

    def hear(self) -> None:
        """The runners get the updates that have come."""
        while not self.inbox.empty():
            job = self.inbox.get()
            self.runners[job.engine].update(job)

    def turn(self) -> float:
        """One turn now, with the news that has come."""
        self.turns += 1
        self.hear()
        wake_s = self.batch.turn(self.now_s)
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
        batch, table, pages = self.batch, self.table, self.pages
        slots = set(batch._streams)
        assert len(batch.free_slots) + len(slots) == self.lanes.slots and not slots & set(batch.free_slots)
        assert set(table.open.nonzero()[0].tolist()) == slots
        assert set(batch._waiting) <= set(batch._awake)
        asleep = set(batch._asleep.values())
        assert set(batch._awake) == slots - asleep and asleep <= slots and not table.text_known[list(asleep)].any()
        queued = [*batch._queue._paced, *batch._queue._unpaced]
        waiting = [*batch._arrived, *batch._textless, *(one.name for one in queued)]
        assert len(batch.open_streams) == len(slots) + len(waiting) and all(job.open for job in batch.open_streams)
        assert batch.open_streams == {job: slot for slot, job in batch._streams.items()} | dict.fromkeys(waiting)
        for slot, job in batch._streams.items():
            assert slot in asleep or job in batch._lately_read or table.frames_taken[slot] == job.taken_frames
            coming = sum(one.stream is job for running in batch._running for _, one in running.lanes)
            assert table.frames_made[slot] == len(job.codes) + coming
        if pages is not None:
            begun = {slot for slot, job in batch._streams.items() if job.segment is not None and job.segment.begun}
            assert begun == set(np.flatnonzero(pages.table.any(1)).tolist())
            held = {page for slot in slots for page in pages.table[slot].tolist()} - {0}
            kept = {page for prefix in pages._kept.values() for page in prefix.pages}
            assert pages.free + len(held | kept) == len(pages._users) - 1
            assert not (held | kept) & set(pages._free)

    def all_free(self) -> bool:
        """Whether nothing is held by anybody, kept prefixes aside."""
        self.check()
        batch, lanes, pages = self.batch, self.lanes, self.pages
        if batch.open_streams or len(batch.free_slots) < lanes.slots or batch._running or batch._waiting:
            return False
        if isinstance(lanes, SingleLanes):
            return not lanes._slots
        return pages.free + pages.kept == len(pages._users) - 1 and not (lanes.codecs or lanes.segments)


def plan_of(seed: int = 1, frames: int | None = None, options: StreamOptions = OFF, paced: bool = True) -> Plan:
    return Plan(Sampling(), seed, frames, options, paced)


def open_streams(synth: Synthesizer) -> int:
    """Streams that have begun and are not over."""
    return sum(job.open for job in list(synth.engine._utterances))


TEXT, WHO = "The quick brown fox jumps over the lazy dog.", {"speaker": "vivian"}


def speak(synth: Synthesizer, text: str = TEXT, frames: int = 12, **settings: Any) -> Stream:
    """On a checkpoint of its own kind."""
    return synth.stream(text, **{"seed": 1, "max_frames": frames, "options": OFF, **WHO, **settings})


def fed(session: Session, pieces: Iterable[str]) -> np.ndarray:
    """All PCM of a session that gets these pieces, and no more."""
    for piece in pieces:
        session.feed(piece)
    session.finish()
    return session.read()


def chunks_of(job: Utterance) -> list[Chunk]:
    """The chunks that are ready; raises what ended the stream."""
    chunks = []
    while not job._chunks.empty() and (chunk := job.take()) is not None:
        chunks.append(chunk)
    return chunks


def alone(
    texts: Sequence[str], seed: int, eos_after: int | None, prefix: str = "", frames: int | None = None
) -> list[list[int]]:
    """The codes of a stream that is made by itself, frame by frame, without lanes."""
    single = fake_single(FakeBackend(eos_after=eos_after), prefix=prefix)
    job = unread(single, *texts, seed=seed, frames=frames)
    while not job.over:
        single.turn(0.0)
    return frames_of(job)


def unread(
    runner: Runner, *texts: str, seed: int = 5, options: StreamOptions = OFF, started_s: float = 0.0, **plan: Any
) -> Utterance:
    """A stream of these segments, that the runner has; it is made to its end, whoever reads it."""
    endless = plan_of(seed, options=replace(options, buffer_frames=10**9), paced=False, **plan)
    job = Utterance(endless, SimpleQueue(), Notifier())
    job.begin(Script([Request(text) for text in texts or ("Hello.",)], runner, started_s), "single")
    runner.update(job)
    return job


def frames_of(job: Utterance) -> list[list[int]]:
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
