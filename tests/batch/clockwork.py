"""The executor against a device whose ticks take what a tick model says, and a host whose work takes time too: all on
simulated time, which passes only where the host works or waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import OFF, fake_together
from simulate import Traffic
from torch import Tensor

from mktts.batch import executor
from mktts.batch.lanes import Made
from mktts.batch.pages import Copy, Pages
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import Tick, TickModel
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.speech.job import Job
from mktts.speech.options import Plan

_PROMPT = "x" * 32


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host: of an arrival (prompt, slot, pages), of a tick's launch, and of a lane's frame that is
    read."""

    arrival_s: float = 0.2e-3
    launch_s: float = 0.6e-3
    frame_s: float = 25e-6


@dataclass
class _Launched:
    tick: Tick
    began_s: float
    ends_s: float
    idle_s: float


class ClockLanes:
    """See `mktts.batch.lanes.Lanes`: every tick takes what `truth` says, on a device that works beside the host."""

    name, overlaps, deterministic, precision = "clockwork", True, True, "fast"

    def __init__(self, settings: TickSettings, truth: TickModel, costs: HostCosts, slots: int, pages: int) -> None:
        self.settings, self.model, self.slots = settings, TickModel.h200(), slots
        self.pages = Pages(pages, slots, 2_048)
        self.now_s = 0.0
        self.launched: list[_Launched] = []
        self._truth, self._costs = truth, costs
        self._free_s = 0.0  # when the device has nothing to do any more
        self._waiting: deque[_Launched] = deque()

    def enter(self, slot: int, reference: Tensor | None) -> None:
        pass

    def begin(self, slot: int, prompt: Tensor, sampling: Sampling, seed: int, copies: Sequence[Copy] = ()) -> None:
        self.now_s += self._costs.arrival_s

    def copy(self, copies: Sequence[Copy]) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> _Launched:
        assert len(self._waiting) < 2
        self.now_s += self._costs.launch_s
        began_s = max(self.now_s, self._free_s)
        ends_s = began_s + self._truth.predict(*tick.bucket, tick.context_rows)
        launched = _Launched(tick, began_s, ends_s, began_s - self._free_s)
        self._free_s = ends_s
        self._waiting.append(launched)
        self.launched.append(launched)
        return launched

    def collect(self, launched: _Launched) -> Made:
        assert self._waiting.popleft() is launched
        count = len(launched.tick.lanes)
        self.now_s = max(self.now_s, launched.ends_s) + count * self._costs.frame_s
        codes, pcm = np.zeros((count, 16), np.int64), np.zeros((count, 1920), np.float32)
        return Made(codes, np.zeros(count, bool), pcm, launched.ends_s - launched.began_s, launched.idle_s)


@dataclass
class Crowd:
    """Listeners who take every chunk as it comes. waits_s: from arrival to the first PCM, of the burst's streams.
    late_s: by how much a listener who plays from the first PCM on in real time had run dry, one entry each time."""

    waits_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)


@dataclass
class _Listener:
    job: Job
    planned_s: float
    burst: bool
    first_s: float | None = None
    heard: int = 0


def burst_of(
    monkeypatch: pytest.MonkeyPatch,
    listeners: int = 64,
    burst: int = 128,
    costs: HostCosts = HostCosts(),  # noqa: B008
    settings: TickSettings | None = None,
    truth: TickModel | None = None,
    seconds: float = 1.0,
    warm_s: float = 2.0,
) -> tuple[Crowd, ClockLanes]:
    """Plays one burst beside so many listeners, in the middle of `seconds` behind the warm-up."""
    lanes = ClockLanes(settings or TickSettings.h200(), truth or TickModel.h200(), costs, slots=1_000, pages=5_000)
    monkeypatch.setattr(executor, "time", SimpleNamespace(perf_counter=lambda: lanes.now_s))
    together, inbox, crowd = fake_together(lanes), SimpleQueue(), Crowd()  # type: ignore[arg-type]
    coming = deque(Traffic(listeners, burst=burst, bursts=1).arrivals(warm_s, seconds))
    burst_s = warm_s + seconds / 2
    here: list[_Listener] = []
    with torch.inference_mode():
        while lanes.now_s < warm_s + seconds:
            while coming and coming[0][0] <= lanes.now_s:
                at_s, frames = coming.popleft()
                work = together.model.speak([Request(_PROMPT)], Plan(Sampling(), 1, frames, OFF), at_s)
                job = Job(500, inbox)
                job.begin(work, "batch")
                here.append(_Listener(job, at_s, at_s == burst_s))
                together.take(job)
            before_s = lanes.now_s
            wake_s = together.turn(lanes.now_s, False)
            here = [one for one in here if _hears(one, lanes.now_s, crowd)]
            if wake_s > lanes.now_s:
                lanes.now_s = min(wake_s, coming[0][0] if coming else warm_s + seconds)
            elif lanes.now_s == before_s:
                lanes.now_s += 5e-6  # an idle turn takes something too
    assert len(crowd.waits_s) == burst
    return crowd, lanes


def _hears(one: _Listener, now_s: float, crowd: Crowd) -> bool:
    """Takes what there is; False: the stream is over."""
    chunks: Any = one.job._chunks
    while not chunks.empty():
        chunk = one.job.take()
        if chunk is None:
            return False
        if one.first_s is None:
            one.first_s = now_s
            if one.burst:
                crowd.waits_s.append(now_s - one.planned_s)
        elif (late_s := now_s - one.first_s - one.heard / 12.5) > 0:
            crowd.late_s.append(late_s)
            one.first_s += late_s
        one.heard += chunk.frames
    return True
