"""When the reader of a lone stream gets the interpreter: at its first chunk, before the worker goes on."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from mktts.engine import job as jobs
from mktts.engine.job import Bell, Job
from mktts.engine.options import Chunk, Timings


class Work(SimpleNamespace):
    """Makes a chunk a step."""

    codes, finish_reason, cancelled, pending_frames = (), None, False, 0

    def step(self) -> Chunk:
        return Chunk(np.zeros(1920, np.float32), 0.0, 1, Timings(1.0, 0.0, 0.0, 0.0, 0.0))

    def close(self) -> None: ...


@pytest.mark.parametrize(("engine", "pauses"), [("single", 1), ("batch", 0)])
def test_the_worker_pauses_behind_a_lone_streams_first_chunk_and_no_other(engine, pauses, monkeypatch):
    happened = []
    bell = Bell()
    bell.after = lambda: happened.append("after")
    monkeypatch.setattr(jobs.time, "sleep", lambda pause_s: happened.append(f"{job._chunks.qsize()} to be read"))
    job = Job(8, SimpleQueue(), bell)
    job.begin(Work(), engine)
    for _ in range(3):
        job.advance(lambda work: work.step())
    assert happened == ["after", "1 to be read"] * pauses and job.made_frames == 3
