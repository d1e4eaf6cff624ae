"""When the reader of a lone stream gets the interpreter: at its first chunk, before the worker goes on."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest

from mktts.engine import stream
from mktts.engine.options import Chunk, Guard, Plan, StreamOptions, Timings
from mktts.engine.stream import Notifier, Utterance
from mktts.model.sampling import Sampling

CHUNK = Chunk(np.zeros(1920, np.float32), 0.0, 1, Timings(1.0, 0.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("engine", "pauses"), [("single", 1), ("batch", 0)])
def test_the_worker_pauses_behind_a_lone_streams_first_chunk_and_no_other(engine, pauses, monkeypatch):
    happened = []
    notifier = Notifier()
    notifier.after = lambda: happened.append("after")
    sleep = lambda pause_s: happened.append(f"{utterance._chunks.qsize()} to be read")  # noqa: E731
    monkeypatch.setattr(stream.time, "sleep", sleep)
    plan = Plan(Sampling(), 1, None, StreamOptions(guard=Guard.off()))
    utterance = Utterance(plan, SimpleQueue(), notifier)
    utterance.begin(SimpleNamespace(), engine)
    for _ in range(3):
        utterance.advance(lambda: CHUNK)
    assert happened == ["after", "1 to be read"] * pauses and utterance.made_frames == 3
