"""Listeners against the real table, admission and scheduler on simulated time: no underrun below the capacity.
Ticks are not run: each takes what a tick model says. Listeners play their chunks in real time from the first on;
utterances last 2 to 12 s. Then the runner too, by a host whose work takes time: how long many at once wait."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from desk import Desk, chunks_of
from fakes import OFF, FakeBackend, FakeCodec, FakeLanes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mktts.engine import admission, runner
from mktts.engine.admission import Admission, AdmissionLimits, AdmissionQueue, Arrival, Capacity, measured_streams
from mktts.engine.lanes import Made
from mktts.engine.metrics import Player
from mktts.engine.scheduler import FRAME_S, StreamTable, Tick, TickModel, TickSettings, next_tick
from mktts.engine.stream import Utterance
from mktts.errors import BusyError

H200, TICKS = TickModel.h200(), TickSettings.h200()
CORES = TickModel(constant_s=13e-3, lane_s=2e-3, row_s=85e-6, attention_s=55e-6)
FRAMES = (25, 150)
HOST_S = 0.3e-3  # between two ticks
FRAME_READ_S = 25e-6  # of the host, for a lane's frame
WARM_S = 2.0
WAITING = AdmissionLimits(max_waiting=256, max_wait_s=0.25)


def capacity_of(model: TickModel) -> float:
    """Listeners, as `mktts.engine.capacity.measure` finds them where ticks take what the model says."""
    times_s = {count: model.predict(count, 0, 50 * count) for count in TICKS.sizes}
    frame_s = min((tick_s + HOST_S) / count for count, tick_s in times_s.items() if tick_s <= 0.9 * FRAME_S)
    return measured_streams(frame_s, model.row_s, 0.9)


def arrivals(
    listeners: int, warm_s: float, seconds: float, burst: int = 0, bursts: int = 5, seed: int = 0
) -> list[tuple[float, int]]:
    """(arrival in s, frames), ascending. Over the first half of the warm-up come `listeners` streams that are under way
    already. bursts times `burst` streams of 50 frames come at once, evenly over the run, which begins at `warm_s`."""
    rng, low, high = np.random.default_rng(seed), FRAMES[0], FRAMES[1] + 1
    early_s = rng.uniform(0.0, warm_s / 2, listeners)
    found = [(at, max(2, int(rng.uniform(0.15, 1.0) * rng.integers(low, high)))) for at in early_s]
    at, mean_s = warm_s / 4, FRAME_S * sum(FRAMES) / 2
    while listeners and (at := at + rng.exponential(mean_s / listeners)) < warm_s + seconds:
        found.append((at, int(rng.integers(low, high))))
    for index in range(bursts):
        found += [(warm_s + (index + 0.5) * seconds / bursts, 50)] * burst
    return sorted(found)


@dataclass
class Run:
    """`play` runs it. listeners: the offered load, arrivals a second times the mean seconds of an utterance.
    cancelled: the part of the listeners that leaves after a random frame. model: what the scheduler believes, and what
    the capacity was measured with. truth: what ticks really take, as `model` where None; the scheduler never learns it.
    Afterwards, of what came behind the warm-up: ttfc_s, from arrival to the first PCM of each stream, waits for
    admission included; late_at_s, when chunks came late; reasons, of arrivals, "" of those admitted; frames."""

    listeners: int
    model: TickModel = H200
    seconds: float = 4.0
    warm_s: float = 6.0
    truth: TickModel | None = None
    slots: int = 2_200
    prompt_rows: int = 32
    burst: int = 0
    cancelled: float = 0.0
    seed: int = 0

    def play(self) -> Run:
        self.ttfc_s, self.late_at_s, self.reasons = [], [], Counter()
        self.frames = 0
        self._rng = np.random.default_rng(self.seed + 1)
        self.table = StreamTable(self.slots)
        self.admission = Admission(WAITING)
        self.admission.measured = Capacity(capacity_of(self.model), "of a test")
        self.admission.listeners.append(self.table.listening)
        self._queue = AdmissionQueue(self.admission, self.table, None, TICKS)
        self._goal, self._last = np.zeros((2, self.slots), np.int64)  # frames that were asked for, and that are made
        self._chunk = np.zeros(self.slots, np.int64)  # number of the one that is being made
        self._players = [Player() for _ in range(self.slots)]
        self.free = list(range(self.slots))
        coming = deque(arrivals(self.listeners, self.warm_s, self.seconds, self.burst, seed=self.seed))
        end_s, now_s = self.warm_s + self.seconds, 0.0
        while now_s < end_s:
            self._live = now_s >= self.warm_s
            while left := self._queue.pop(now_s, self.model):
                self._enter(*left, now_s)
            while coming and coming[0][0] <= now_s:
                at_s, frames = coming.popleft()
                one = Arrival(at_s, self.prompt_rows, self.prompt_rows + frames, name=frames)
                reason = self._queue.submit(one, self.model, now_s)
                if reason is not None:
                    self._enter(one, reason, now_s)
            tick = next_tick(self.table, now_s, self.model, TICKS)
            if len(tick.lanes) or tick.pieces:
                now_s = self._tick(tick, now_s)
            elif self._queue._paced:
                now_s += 1e-3
            else:
                now_s = max(min(tick.wake_s, coming[0][0] if coming else end_s), now_s + 1e-4)
        return self

    def _enter(self, one: Arrival, reason: str, now_s: float) -> None:
        self.reasons[reason] += self._live
        if reason:
            return
        slot = self.free.pop()
        self.table.enter(slot, one.arrived_s)
        self.table.prompt_rows[slot] = one.prompt_rows
        self._goal[slot] = self._last[slot] = one.name
        self._chunk[slot], self._players[slot] = 0, Player()
        self.table.chunk_end[slot] = min(TICKS.chunks[0], one.name)
        if self._rng.random() < self.cancelled:
            self._last[slot] = self._rng.integers(1, one.name + 1)

    def _tick(self, tick: Tick, now_s: float) -> float:
        """Runs one tick; returns when its PCM is on the host."""
        table = self.table
        expected_s = self.model.predict(*tick.bucket, tick.context_rows)
        took_s = (self.truth or self.model).predict(*tick.bucket, tick.context_rows)
        ended_s = now_s + HOST_S + took_s
        table.begin(tick)
        late = int((table.finish(tick, ended_s) > 0).sum())
        self.admission.tick(ended_s, took_s, expected_s, late, len(tick.lanes))
        if self._live:
            self.ttfc_s += (ended_s - table.arrived_s[tick.lanes[tick.frames == 0]]).tolist()
            self.frames += len(tick.lanes)
        for slot in tick.lanes[table.frames_made[tick.lanes] >= table.chunk_end[tick.lanes]].tolist():
            made = int(table.frames_made[slot])  # the listener takes a whole chunk
            late_s = self._players[slot].play(ended_s, FRAME_S * (made - table.chunk_start[slot]))[1]
            self.late_at_s += [ended_s] if late_s > 0 and self._live else []
            self._chunk[slot] += 1
            frames = TICKS.chunks[min(int(self._chunk[slot]), len(TICKS.chunks) - 1)]
            table.frames_taken[slot] = made
            table.chunk_start[slot], table.chunk_end[slot] = made, made + min(frames, int(self._goal[slot]) - made)
        for slot in tick.lanes[table.frames_made[tick.lanes] >= self._last[tick.lanes]].tolist():
            table.open[slot] = False
            self.free.append(slot)
        return ended_s


def test_what_is_measured_becomes_streams_by_hand():
    # A frame in 2.5 ms is 32 listeners; a prompt of 32 rows of 0.1 ms every 7 s takes 0.46 ms a second of each.
    assert measured_streams(2.5e-3, 0.0, 0.9) == pytest.approx(0.9 * 32)
    assert measured_streams(2.5e-3, 1e-4, 0.9) == pytest.approx(0.9 / (1 / 32 + 32 * 1e-4 / 7))


# By hand. 32-row prompts: 512 lanes, with 256 rows, in 19.4 ms. 332-row ones: three a tick, as 267 lanes a tick need.
@pytest.mark.parametrize(("prompt_rows", "frames_hz"), [(32, 26_400), (332, 15_000)])
def test_at_twice_the_capacity_those_who_are_admitted_hear_no_gap(prompt_rows, frames_hz):
    listeners = int(2 * frames_hz / 12.5)
    run = Run(listeners, prompt_rows=prompt_rows, slots=4_000).play()
    assert run.late_at_s == [] and run.reasons[""] > 500
    assert run.reasons["waited"] + run.reasons["queue"] > 500
    assert run.reasons.keys() <= {"", "waited", "queue"}
    assert max(run.ttfc_s) < WAITING.max_wait_s + 0.2
    assert run.frames / run.seconds > 0.8 * frames_hz


@settings(max_examples=8, deadline=None)
@example(0.98, 32, 0, 0.0, (2e-3, 39.3e-6, 4.9e-6, 2.4e-6), 0)  # late by leads alone, without what a chunk needs
@example(0.887, 8, 200, 0.0, (5.708e-3, 55.68e-6, 5.18e-6, 4.978e-6), 174)  # and without what the next one will
@given(
    load=st.floats(0.05, 1.3),
    prompt_rows=st.sampled_from([8, 32, 200, 700]),
    burst=st.sampled_from([0, 0, 40, 200]),
    cancelled=st.sampled_from([0.0, 0.2]),
    parts=st.tuples(st.floats(2e-3, 8e-3), st.floats(1e-5, 6e-5), st.floats(1e-6, 6e-6), st.floats(5e-7, 6e-6)),
    seed=st.integers(0, 10_000),
)
def test_no_underrun_whatever_the_machine_and_the_load(load, prompt_rows, burst, cancelled, parts, seed):
    model = TickModel(*parts)
    listeners = int(load * 512 / model.predict(512, 256, 512 * 107) / 12.5)
    more = {"prompt_rows": prompt_rows, "burst": burst, "cancelled": cancelled, "seed": seed}
    run = Run(listeners, model, seconds=2, warm_s=2, **more).play()
    assert run.late_at_s == [] and max(run.ttfc_s, default=0.0) < 1.0


def test_a_machine_slower_than_measured_lowers_the_capacity_and_listeners_are_in_time_again():
    """The scheduler never learns it: consumers that share the host, pauses that no tick is blamed for."""
    slow = replace(H200, constant_s=1.5 * H200.constant_s, lane_s=1.5 * H200.lane_s, row_s=1.5 * H200.row_s)
    run = Run(4_000, truth=slow, slots=4_000, warm_s=2.0, seconds=28.0).play()
    assert "lowered: ticks take 1." in run.admission.capacity.basis
    assert run.reasons["waited"] + run.reasons["queue"] > 500
    assert max(run.late_at_s, default=0.0) < 20.0 and run.frames / run.seconds > 15_000


class TimedLanes(FakeLanes):
    """Every tick takes what the model of an H200 says, on a device that works beside the host. The host takes
    `arrival_s` for an arrival (prompt, slot, pages) and `launch_s` for a launch."""

    def __init__(self, arrival_s: float, launch_s: float) -> None:
        sizes = {"slots": 1_000, "pages": 5_000, "rows_per_slot": 2_048}
        super().__init__(FakeBackend(), FakeCodec(), overlaps=True, settings=TICKS, model=H200, **sizes)
        self.free_s = 0.0  # when the device has nothing to do any more
        self.launched: list[SimpleNamespace] = []
        self._arrival_s, self._launch_s = arrival_s, launch_s

    def begin(self, slot, segment, anew=True):
        self.clock.now_s += self._arrival_s

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


@dataclass
class Listener:
    """Takes every chunk as it comes, and plays in real time. first_s, refused_s: when; late_s: with nothing to play."""

    job: Utterance
    came_s: float
    first_s: float | None = None
    refused_s: float | None = None
    heard: int = 0
    late_s: float = 0.0
    player: Player = field(default_factory=Player)

    def take(self, now_s: float) -> None:
        try:
            chunks = chunks_of(self.job)
        except BusyError:
            chunks, self.refused_s = [], now_s
        for chunk in chunks:
            self.first_s = self.first_s or now_s
            self.late_s += self.player.play(now_s, FRAME_S * chunk.frames)[1]
            self.heard += chunk.frames


def listened(desk: Desk, coming: list[tuple[float, int]], end_s: float) -> list[Listener]:
    """Plays streams, (arrival in s, frames) ascending, on the clock of the desk, until then or until all are over."""
    desk.lanes.clock = desk
    options, left, everybody, here = replace(OFF, schedule=None, buffer_frames=500), deque(coming), [], []
    with torch.inference_mode():
        while desk.now_s < end_s and (left or here):
            while left and left[0][0] <= desk.now_s:
                at_s, frames = left.popleft()
                here.append(Listener(desk.say("x" * 32, frames=frames, options=options), at_s))
                everybody.append(here[-1])
            before_s = desk.now_s
            wake_s = desk.batch.turn(desk.now_s)
            for one in here:
                one.take(desk.now_s)
            here = [one for one in here if one.job.open]
            if wake_s > desk.now_s:
                desk.now_s = min(wake_s, left[0][0] if left else end_s)
            elif desk.now_s == before_s:
                desk.now_s += 5e-6  # an idle turn takes something too
    return everybody


def burst_of(monkeypatch, listeners=64, burst=128, arrival_s=0.2e-3, launch_s=0.6e-3, seconds=1.0):
    """One burst beside so many listeners, in the middle of `seconds` behind the warm-up. Returns waits in s of the
    burst's streams from arrival to the first PCM; seconds for which listeners had nothing to play; and the lanes."""
    limits = AdmissionLimits(max_waiting=1_000, max_wait_s=60.0)
    desk = Desk(monkeypatch, lanes=TimedLanes(arrival_s, launch_s), limits=limits)
    coming = arrivals(listeners, WARM_S, seconds, burst=burst, bursts=1)
    everybody = listened(desk, coming, WARM_S + seconds)
    waits_s = [one.first_s - one.came_s for one in everybody if one.came_s == WARM_S + seconds / 2]
    assert len(waits_s) == burst
    return waits_s, sum(one.late_s for one in everybody), desk.lanes


@pytest.mark.parametrize("overlaps", [False, True])
def test_of_forty_that_arrive_at_once_those_admitted_hear_no_gap_and_others_are_refused_in_time(monkeypatch, overlaps):
    """Two cores, whose capacity is 21, with the voice in the box."""
    model, rng, limits = replace(CORES, lane_s=1.7e-3), np.random.default_rng(1), AdmissionLimits()
    lanes = FakeLanes(FakeBackend(), FakeCodec(), overlaps=overlaps, settings=TickSettings.cpu(), model=model)
    desk = Desk(monkeypatch, lanes=lanes, limits=limits)
    desk.admission.measured, desk.batch.reference_model = Capacity(21, "of a test"), model
    lanes.model = SimpleNamespace(predict=lambda *size: model.predict(*size) * rng.normal(1.0, 0.05))
    everybody = listened(desk, [(at_s, 60) for at_s in np.linspace(0.0, 0.01, 40)], 60.0)
    admitted = [one for one in everybody if one.first_s is not None]
    refused_s = [one.refused_s - one.came_s for one in everybody if one.refused_s is not None]
    assert len(admitted) + len(refused_s) == 40 and 14 <= len(admitted) <= 21
    assert {(one.heard, one.late_s, one.job.late_s) for one in admitted} == {(60, 0.0, 0.0)}
    assert max(refused_s) < admission.PROMPT_WAIT_S + 0.2


@pytest.mark.parametrize(
    ("listeners", "host_ms", "most_ms"), [(64, 0.15, 58), (64, 0.35, 85), (560, 0.15, 70), (560, 0.35, 95)]
)
def test_the_last_of_128_arrivals_waits_for_their_work_and_four_ticks(monkeypatch, listeners, host_ms, most_ms):
    """Ticks wait a little for those who arrive, and no listener notices."""
    waits_s, late_s, lanes = burst_of(monkeypatch, listeners, arrival_s=host_ms / 1e3)
    assert 1e3 * max(waits_s) < most_ms and late_s == 0
    during = [one.idle_s for one in lanes.launched if 2.5 < one.began_s < 2.5 + max(waits_s)]
    assert max(during) < runner._LATE_S and len(during) >= 4


def test_a_host_that_is_always_late_lets_people_in_all_the_same(monkeypatch):
    waits_s, _, _ = burst_of(monkeypatch, 64, 40, arrival_s=2e-3, launch_s=8e-3, seconds=2.0)
    assert max(waits_s) < 1.0


def test_of_a_thousand_whose_prompts_take_the_host_a_second_those_who_would_wait_longer_are_refused(monkeypatch):
    desk = Desk(monkeypatch, lanes=TimedLanes(0.05e-3, 4e-3), limits=AdmissionLimits())
    desk.admission.measured, build = Capacity(900, "of a test"), desk.batch.build

    def takes_a_millisecond(request):
        desk.now_s += 1e-3
        return build(request)

    desk.batch.build = takes_a_millisecond
    everybody = listened(desk, [(0.0, 60)] * 1_000, 20.0)
    heard = [one for one in everybody if one.first_s is not None]
    assert 250 < len(heard) < 700 and {(one.heard, one.late_s) for one in heard} == {(60, 0.0)}
    assert max(one.first_s for one in heard) < admission.PROMPT_WAIT_S + 0.2
    assert all(one.refused_s < admission.PROMPT_WAIT_S + 0.2 for one in everybody if one.first_s is None)
