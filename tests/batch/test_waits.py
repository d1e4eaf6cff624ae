"""No stream waits for ever: both executors on a clock of the test's own, with random streams, texts and readers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_lanes import SETTINGS, FakeLanes
from fakes import OFF, FakeBackend, FakeCodec, fake_model, fake_together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mktts.batch import executor as batch_executor
from mktts.batch.lanes import Made
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import TickModel
from mktts.errors import CapacityError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.speech.executor import Wishes
from mktts.speech.job import Job, News
from mktts.speech.options import Plan
from mktts.synth import one_by_one
from mktts.synth.one_by_one import OneByOne

BUFFER_FRAMES = 8
# With a place free: until an engine that does nothing lets the next one in. Without: until that one is refused.
# The last tick has begun up to 1.5 s before.
LONGEST_IDLE_S, LONGEST_HELD_S = 2.0 + 1.5, 10.0 + 1.5
NEVER = math.inf


@dataclass(frozen=True)
class Visit:
    """One stream. pieces: what is fed, and how long after the piece before; () for a text that is known at once.
    ends: whether the last piece ends the text. reads: chunks that its reader takes, at `reads_hz`."""

    at_s: float = 0.0
    engine: str = "batch"
    paced: bool = True
    frames: int = 6
    pieces: tuple[tuple[float, str], ...] = ()
    ends: bool = True
    cancel_s: float = NEVER
    reads: float = NEVER
    reads_hz: float = NEVER


@dataclass
class Seen:
    visit: Visit
    job: Job
    taken: int = 0
    next_read_s: float = 0.0
    read_out: bool = False


class ClockBackend(FakeBackend):
    """Every step of the single engine takes its time."""

    clock: Any = None
    step_s = 0.0

    def step(self, state: Any, row: Any) -> Any:
        self.clock.now_s += self.step_s
        return super().step(state, row)


class ClockLanes(FakeLanes):
    """Every tick takes its time, on a device beside the host or not."""

    clock: Any = None

    def launch(self, tick: Any, rows: Any) -> Any:
        self.launched_s.append(self.clock.now_s)
        launched = super().launch(tick, rows)
        launched.ends_s = self.clock.now_s + launched.made.took_s
        return launched

    def collect(self, launched: Any) -> Made:
        self.clock.now_s = max(self.clock.now_s, launched.ends_s)
        return super().collect(launched)


@dataclass
class Place:
    """Both executors, as the engine drives them. tick_s: of a tick and of a step. admits: as a server asks for it."""

    tick_s: float
    lane_s: float = 0.0
    slots: int = 8
    pages: int = 2_000
    overlaps: bool = False
    ticks: TickSettings = SETTINGS
    admits: bool = True
    now_s: float = 0.0
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = TickModel(self.tick_s, self.lane_s, 0.0, 0.0)
        backend = FakeBackend(eos_after=40)
        self.lanes = ClockLanes(
            backend, FakeCodec(), overlaps=self.overlaps, slots=self.slots, pages=self.pages, rows_per_slot=400,
            settings=self.ticks, model=model,
        )  # fmt: skip
        self.lanes.clock, self.lanes.launched_s = self, []
        self.single_backend = ClockBackend(eos_after=40)
        self.single_backend.clock, self.single_backend.step_s = self, self.tick_s
        self.models = {"single": fake_model(self.single_backend), "batch": None}
        together, one = fake_together(self.lanes), OneByOne()
        self.models["batch"] = together.model
        self.executors = {"batch": together, "single": one}
        for executor, other in ((together, one), (one, together)):
            executor.beside(lambda other=other: other.listeners)
            if self.admits:
                executor.admit(Wishes())
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.idle_since_s = 0.0
        self.work_done = 0
        self.line: list[tuple[bool, float]] = []  # of each executor with one: a place is free; its first arrival

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        if when_s < NEVER:
            heapq.heappush(self.events, (when_s, next(self.numbers), call))

    def comes(self, visit: Visit) -> None:
        self.at(visit.at_s, lambda: self._open(visit))

    def _open(self, visit: Visit) -> None:
        model = self.models[visit.engine]
        plan = Plan(Sampling(), 1, visit.frames, replace(OFF, buffer_frames=BUFFER_FRAMES))
        script = None
        if visit.pieces:
            work, script = model.listen(Request(""), 100, plan)
        else:
            work = model.speak([Request("Hello.")], plan, self.now_s)
        job = Job(BUFFER_FRAMES, self.inbox, paced=visit.paced)
        job.begin(work, visit.engine)
        self.executors[visit.engine].take(job)
        self.seen.append(Seen(visit, job))
        self.at(visit.cancel_s, job.cancel)
        when_s = self.now_s
        for number, (after_s, text) in enumerate(visit.pieces, 1):
            when_s += after_s
            last = visit.ends and number == len(visit.pieces)
            self.at(when_s, lambda text=text, last=last: self._feed(script, job, text, last))

    def _feed(self, script: Any, job: Job, text: str, last: bool) -> None:
        script.feed(text)
        if last:
            script.finish()
        job.tell()

    def _read(self) -> float:
        """What readers take now; when the next of them takes something."""
        next_s = NEVER
        for one in self.seen:
            while not one.read_out and one.taken < one.visit.reads and not one.job._chunks.empty():
                if one.next_read_s > self.now_s:
                    next_s = min(next_s, one.next_read_s)
                    break
                try:
                    chunk = one.job.take()
                except CapacityError:
                    chunk = None
                one.read_out = chunk is None
                one.taken += 1
                one.next_read_s = self.now_s + 1 / one.visit.reads_hz
        return next_s

    def run(self, most_turns: int = 30_000) -> None:
        for _ in range(most_turns):
            while self.events and self.events[0][0] <= self.now_s:
                heapq.heappop(self.events)[2]()
            while not self.inbox.empty():
                news = self.inbox.get()
                assert isinstance(news, News)
                self.executors[news.job.engine].hear(news.job)
            wake_s = min(executor.turn(self.now_s, False) for executor in self.executors.values())
            next_s = min(self._read(), self.events[0][0] if self.events else NEVER)
            self._check_line()
            if not self.inbox.empty():
                continue
            if min(wake_s, next_s) == NEVER:
                return
            self.now_s = max(self.now_s + 1e-5, min(wake_s, next_s))
        raise AssertionError(f"no rest after {most_turns} turns, at {self.now_s} s")

    def _check_line(self) -> None:
        """Nobody stands in line beside lanes that do nothing."""
        done = len(self.lanes.ticks) + self.single_backend.entered
        if done != self.work_done:
            self.idle_since_s, self.work_done = self.now_s, done
        for free, first_s in self.line:
            idle_s = self.now_s - max(self.idle_since_s, first_s)
            assert idle_s <= (LONGEST_IDLE_S if free else LONGEST_HELD_S), f"{idle_s} s of nothing, with a line"
        self.line = [
            (bool(executor._free) and self.pages > 1_000, min(request.arrived_s for request in in_line))
            for executor in self.executors.values()
            if (in_line := [*executor._door._listening, *executor._door._unheard])
        ]

    def check_end(self) -> None:
        """Every stream is over, or waits for its own text or its own reader."""
        batch, one = self.executors["batch"], self.executors["single"]
        assert not batch._in_line and not one._in_line and not batch._arrived
        waiting = {*batch._outside, *batch._asleep, *one._asleep, *one._outside}
        for seen in self.seen:
            job, visit = seen.job, seen.visit
            if not job.open:
                assert job.error is None or isinstance(job.error, CapacityError), job.error
                continue
            unread = job.made_frames - job.taken_frames
            its_text = visit.pieces and not visit.ends and job in waiting
            its_reader = unread and seen.taken >= visit.reads
            assert its_text or its_reader, (visit, job.made_frames, job.taken_frames)


def play(place: Place, visits: list[Visit]) -> Place:
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        clock = SimpleNamespace(perf_counter=lambda: place.now_s)
        patch.setattr(batch_executor, "time", clock)
        patch.setattr(one_by_one, "time", clock)
        for visit in visits:
            place.comes(visit)
        place.run()
    place.check_end()
    return place


PIECES = st.tuples(
    st.sampled_from((0.0, 0.01, 0.3, 1.0, 5.0, 30.0)), st.sampled_from(("a", "abc", "A text. ", "x" * 20))
)
VISITS = st.builds(
    Visit,
    at_s=st.floats(0, 6),
    paced=st.booleans(),
    frames=st.integers(1, 30),
    pieces=st.one_of(st.just(()), st.lists(PIECES, min_size=1, max_size=4).map(tuple)),
    ends=st.booleans(),
    cancel_s=st.one_of(st.just(NEVER), st.floats(0, 20)),
    reads=st.one_of(st.just(NEVER), st.integers(0, 4)),
    reads_hz=st.sampled_from((NEVER, 12.5, 3.0)),
)
PLACES = st.builds(
    Place,
    tick_s=st.sampled_from((0.0008, 0.03, 0.07, 0.1, 0.3, 0.8)),
    lane_s=st.sampled_from((0.0, 0.01, 0.05)),
    slots=st.sampled_from((2, 8)),
    pages=st.sampled_from((30, 2_000)),
    overlaps=st.booleans(),
    ticks=st.sampled_from((SETTINGS, replace(SETTINGS, idle_lanes=0, few_lanes=1), TickSettings.cpu())),
    admits=st.booleans(),
)
WRITER = Visit(frames=10, pieces=((0.0, "A first"),), ends=False)


@pytest.mark.parametrize("engines", [("batch",), ("batch", "single")], ids=["batch", "auto"])
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=PLACES, visits=st.lists(VISITS, min_size=1, max_size=8), data=st.data())
def test_no_stream_waits_beside_lanes_that_do_nothing(engines, place, visits, data):
    play(place, [replace(visit, engine=data.draw(st.sampled_from(engines))) for visit in visits])


@pytest.mark.parametrize("engine", ["batch", "single"])
@pytest.mark.parametrize("paced", [True, False])
def test_a_stream_comes_in_beside_one_that_waits_for_its_text(engine, paced):
    """Ticks slower than the sound they make; the other stream's text never ends."""
    visits = [replace(WRITER, engine=engine), Visit(at_s=9.0, engine=engine, paced=paced, frames=2)]
    place = play(Place(tick_s=0.3), visits)
    assert place.seen[1].job.finish_reason == "max_frames" and place.now_s < 12


def test_places_that_are_kept_unused_end_the_wait_of_others_by_name():
    writers = [replace(WRITER, at_s=0.1 * number) for number in range(2)]
    place = play(Place(tick_s=0.01, slots=2), [*writers, Visit(at_s=3.0, paced=False)])
    error = place.seen[2].job.error
    assert isinstance(error, CapacityError) and "wait for their text or their readers" in str(error)
    assert 13 <= place.now_s < 13.1


@pytest.mark.parametrize("pieces", [((0.0, "ab"), (9.0, "cdefgh")), ((0.0, "A. "), (9.0, "Another sentence."))])
def test_who_waited_for_text_goes_first_when_it_comes(pieces):
    """The rest of a segment's text, and the next segment's; one lane a tick, four others that want it."""
    others = [Visit(at_s=4.0, paced=False, frames=30) for _ in range(4)]
    place = play(Place(tick_s=0.1, lane_s=0.1), [Visit(frames=200, pieces=pieces), *others])
    first = next(i for i, at_s in enumerate(place.lanes.launched_s) if at_s >= 9.0)
    ticks = place.lanes.ticks[first - 2 : first + 1]
    assert [0 in tick.lanes for tick in ticks] == [False, False, True], [tick.lanes for tick in ticks]
