"""Many who come at once: how long the last of them waits, by a host and a device whose work takes time. All on
simulated time, which passes only where the host works or waits."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from arrivals import arrivals
from desk import Desk, chunks_of
from fake_lanes import FakeLanes
from fakes import OFF, ROOMY

from mktts.batch import executor
from mktts.batch.lanes import Made
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import TickModel

FRAME_READ_S = 25e-6  # of the host, for a lane's frame
WARM_S = 2.0


class TimedLanes(FakeLanes):
    """Every tick takes what the model of an H200 says, on a device that works beside the host. The host takes
    `arrival_s` for an arrival (prompt, slot, pages) and `launch_s` for a launch."""

    def __init__(self, arrival_s: float, launch_s: float) -> None:
        sizes = {"slots": 1_000, "pages": 5_000, "rows_per_slot": 2_048}
        super().__init__(None, None, overlaps=True, settings=TickSettings.h200(), model=TickModel.h200(), **sizes)
        self.free_s = 0.0  # when the device has nothing to do any more
        self.launched: list[SimpleNamespace] = []
        self._arrival_s, self._launch_s = arrival_s, launch_s

    def enter(self, slot, reference):
        pass

    def begin(self, slot, prompt, sampling, seed, copies=()):
        self.clock.now_s += self._arrival_s

    def leave(self, slot):
        pass

    def launch(self, tick, rows):
        self.clock.now_s += self._launch_s
        began_s = max(self.clock.now_s, self.free_s)
        ends_s = began_s + self.model.predict(*tick.bucket, tick.context_rows)
        one = SimpleNamespace(count=len(tick.lanes), began_s=began_s, ends_s=ends_s, idle_s=began_s - self.free_s)
        self.free_s = ends_s
        self.launched.append(one)
        return one

    def collect(self, launched):
        count = launched.count
        self.clock.now_s = max(self.clock.now_s, launched.ends_s) + count * FRAME_READ_S
        codes, pcm = np.zeros((count, 16), np.int64), np.zeros((count, 1_920), np.float32)
        return Made(codes, np.zeros(count, bool), pcm, launched.ends_s - launched.began_s, launched.idle_s)


def burst_of(monkeypatch, listeners=64, burst=128, arrival_s=0.2e-3, launch_s=0.6e-3, seconds=1.0):
    """Plays one burst beside so many listeners, who take every chunk as it comes, in the middle of `seconds` behind the
    warm-up. Returns waits in s from arrival to the first PCM of the burst's streams; by how much a listener who plays
    in real time had run dry, one entry each time; and the lanes."""
    desk = Desk(monkeypatch, lanes=TimedLanes(arrival_s, launch_s), admission=ROOMY)
    desk.lanes.clock, end_s = desk, WARM_S + seconds
    options = replace(OFF, buffer_frames=500)
    coming = deque(arrivals(listeners, WARM_S, seconds, burst=burst, bursts=1))
    here, waits_s, late_s = [], [], []
    with torch.inference_mode():
        while desk.now_s < end_s:
            while coming and coming[0][0] <= desk.now_s:
                at_s, frames = coming.popleft()
                job = desk.say("x" * 32, frames=frames, options=options)
                here.append(SimpleNamespace(job=job, came_s=at_s, first_s=None, heard=0))
            before_s = desk.now_s
            wake_s = desk.together.turn(desk.now_s, False)
            for one in here:
                for chunk in chunks_of(one.job):
                    if one.first_s is None:
                        one.first_s = desk.now_s
                        waits_s += [desk.now_s - one.came_s] if one.came_s == WARM_S + seconds / 2 else []
                    elif (dry_s := desk.now_s - one.first_s - one.heard / 12.5) > 0:
                        late_s.append(dry_s)
                        one.first_s += dry_s
                    one.heard += chunk.frames
            here = [one for one in here if one.job.open]
            if wake_s > desk.now_s:
                desk.now_s = min(wake_s, coming[0][0] if coming else end_s)
            elif desk.now_s == before_s:
                desk.now_s += 5e-6  # an idle turn takes something too
    assert len(waits_s) == burst
    return waits_s, late_s, desk.lanes


@pytest.mark.parametrize(
    ("listeners", "arrival_s", "most_ms"), [(64, 0.15e-3, 58), (64, 0.35e-3, 85), (560, 0.15e-3, 66)]
)
def test_the_last_of_128_arrivals_waits_no_longer_than_their_work_and_four_ticks_take(
    monkeypatch, listeners, arrival_s, most_ms
):
    waits_s, late_s, _ = burst_of(monkeypatch, listeners, arrival_s=arrival_s)
    assert 1e3 * max(waits_s) < most_ms and late_s == []


def test_ticks_wait_a_little_for_those_who_arrive_and_no_listener_notices(monkeypatch):
    """The host takes 45 ms for them."""
    waits_s, late_s, lanes = burst_of(monkeypatch, 560, arrival_s=0.35e-3)
    during = [one.idle_s for one in lanes.launched if 2.5 < one.began_s < 2.5 + max(waits_s)]
    assert max(during) < executor._LATE_S and len(during) >= 4 and late_s == []


def test_a_host_that_is_always_late_lets_people_in_all_the_same(monkeypatch):
    waits_s, _, _ = burst_of(monkeypatch, 64, 40, arrival_s=2e-3, launch_s=8e-3, seconds=2.0)
    assert max(waits_s) < 1.0
