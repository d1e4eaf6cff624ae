"""No stream waits for ever, and each gives what it gives alone: random streams, texts, readers and failures."""

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from desk import Desk, alone, fails_at, frames_of
from fakes import OFF, PATIENT, SETTINGS, FakeBackend, fake_single
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mktts.engine.admission import AdmissionLimits, Capacity
from mktts.engine.scheduler import TickModel, TickSettings
from mktts.engine.stream import Utterance
from mktts.errors import CapacityError, EngineError

# With a slot free: a reader who took nothing for 2 s is no listener any more. Without: until the stream is refused.
# The last tick has begun up to 1.5 s before.
LONGEST_IDLE_S, LONGEST_HELD_S = 2.0 + 1.5, 10.0 + 1.5
NEVER = math.inf
CHUNKS = ((1, 1, 2, 4, 8), 8), ((1,), 1), ((1,), 5), ((3,), 7)


@dataclass(frozen=True)
class Visit:
    """One stream. texts: its segments, where pieces is (). pieces: what is fed, and how long after the piece before.
    ends: whether the last piece ends the text. reads: chunks that its reader takes, at `reads_hz`. chunks: their
    schedule, and how many frames may be made ahead of the reader."""

    at_s: float = 0.0
    engine: str = "batch"
    paced: bool = True
    frames: int = 6
    texts: tuple[str, ...] = ("Hello.",)
    pieces: tuple[tuple[float, str], ...] = ()
    ends: bool = True
    cancel_s: float = NEVER
    reads: float = NEVER
    reads_hz: float = NEVER
    chunks: tuple[tuple[int, ...], int] = CHUNKS[0]


@dataclass
class Seen:
    visit: Visit
    job: Utterance
    taken: int = 0
    next_read_s: float = 0.0
    read_out: bool = False


class Place(Desk):
    """Both kinds of lanes, as the engine drives them.
    tick_s: of a tick and of a step. admits: with the limits of a server. capacity: as measured, with ticks of 30 ms.
    fails: which calls of the lanes. spoils: frames that have no number."""

    def __init__(
        self, patch: pytest.MonkeyPatch, tick_s: float, lane_s: float = 0.0, admits: bool = True, eos_after: int = 40,
        prefix: str = "", fails: tuple[str, set[int]] = ("launch", set()), spoils: frozenset[int] = frozenset(),
        capacity: float | None = None, **of_the_lanes: Any,
    ) -> None:  # fmt: skip
        given = {"rows_per_slot": 400, "model": TickModel(tick_s, lane_s, 0.0, 0.0), "slots": 8, **of_the_lanes}
        limits = AdmissionLimits() if admits else PATIENT
        super().__init__(patch, FakeBackend(eos_after=eos_after), limits=limits, prefix=prefix, **given)
        if capacity is not None:
            self.admission.measured = Capacity(capacity, "of this test")
            self.batch.reference_model = TickModel(0.03, 0.0, 0.0, 0.0)
        fails_at(patch, self.lanes, *fails, RuntimeError("an illegal address"))
        frames = itertools.count()
        self.lanes.spoil = lambda slot: next(frames) in spoils
        self.lanes.clock, self.eos_after, self.prefix = self, eos_after, prefix
        self.errors = (CapacityError, *([EngineError] if fails[1] or spoils else []))
        self.single_backend = FakeBackend(eos_after=eos_after, code0=partial(self._step, tick_s))
        self.runners["single"] = fake_single(self.single_backend, prefix=prefix, admission=self.admission)
        self.seen: list[Seen] = []
        self.events: list[tuple[float, Callable[[], None]]] = []
        self.idle_since_s = self.wake_s = 0.0
        self.work_done: list[int] = []
        self.line: list[tuple[bool, float]] = []  # of each executor with one: a place is free; its first arrival

    def _step(self, step_s: float, frame: int) -> int:
        """Every step of the single engine takes its time."""
        self.now_s += step_s
        return frame

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        bisect.insort(self.events, (when_s, call), key=lambda event: event[0])

    def open(self, visit: Visit) -> None:
        how = {"frames": visit.frames, "paced": visit.paced, "engine": visit.engine}
        how["options"] = replace(OFF, schedule=visit.chunks[0], buffer_frames=visit.chunks[1])
        job = self.listen(**how) if visit.pieces else self.say(*visit.texts, **how)
        self.seen.append(Seen(visit, job))
        self.wake_s = self.now_s
        self.at(visit.cancel_s, job.cancel)
        when_s = self.now_s
        for after_s, text in visit.pieces:
            when_s += after_s
            self.at(when_s, partial(self.feed, job, text))
        if visit.pieces and visit.ends:
            self.at(when_s, partial(self.feed, job, None))

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
                except self.errors:
                    chunk = None
                one.read_out = chunk is None
                one.taken += 1
                one.next_read_s = self.now_s + 1 / one.visit.reads_hz
        return next_s

    def check(self) -> None:
        super().check()
        assert all(len(seen.job.codes) - seen.job.taken_frames <= seen.visit.chunks[1] for seen in self.seen)

    def run(self, most_turns: int = 30_000) -> None:
        for _ in range(most_turns):
            while self.events and self.events[0][0] <= self.now_s:
                self.events.pop(0)[1]()
            if self.now_s >= self.wake_s or not self.inbox.empty():  # as the worker: nothing else wakes it
                self.hear()
                self.wake_s = min(runner.turn(self.now_s) for runner in self.runners.values())
                self.check()
            next_s = min(self._read(), self.events[0][0] if self.events else NEVER)
            self._check_line()
            if not self.inbox.empty():
                continue
            next_s = min(next_s, self.wake_s)
            if next_s == NEVER:
                return
            self.now_s = max(self.now_s + 1e-5, next_s)
        raise AssertionError(f"no rest after {most_turns} turns, at {self.now_s} s")

    def _check_line(self) -> None:
        """Nobody stands in line beside lanes that do nothing and a place that has been free for long."""
        free = [len(runner.free_slots) for runner in self.runners.values()]
        done = [len(self.lanes.ticks), self.single_backend.entered, *free]
        if done != self.work_done:
            self.idle_since_s, self.work_done = self.now_s, done
        for free, first_s in self.line:
            idle_s = self.now_s - max(self.idle_since_s, first_s)
            assert idle_s <= (LONGEST_IDLE_S if free else LONGEST_HELD_S), f"{idle_s} s of nothing, with a line"
        self.line = [
            (bool(runner.free_slots) and self.pages.all > 1_000, min(arrival.arrived_s for arrival in waiting))
            for runner in self.runners.values()
            if (waiting := [*runner._queue._paced, *runner._queue._unpaced])
        ]

    def check_end(self) -> None:
        """Every stream is over, or waits for its own text or its own reader; when those go, nothing is held."""
        batch, one = self.runners["batch"], self.runners["single"]
        assert not any((*of._queue._paced, *of._queue._unpaced, *of._arrived) for of in (batch, one))
        waiting = {*batch._textless, *batch._asleep, *one._asleep, *one._textless}
        for seen in self.seen:
            job, visit = seen.job, seen.visit
            if not job.open:
                assert job.error is None or isinstance(job.error, self.errors), job.error
                if job.error is None and not job.cancelled and not visit.pieces:
                    assert frames_of(job) == alone(visit.texts, 1, self.eos_after, self.prefix, visit.frames)
                continue
            unread = job.made_frames - job.taken_frames
            its_text = visit.pieces and not visit.ends and job in waiting
            its_reader = unread and seen.taken >= visit.reads
            assert its_text or its_reader, (visit, job.made_frames, job.taken_frames)
            job.cancel()
        self.run()
        assert self.all_free() and not one.open_streams
        assert not self.batch._running and (self.lanes.overlaps or not self.lanes.wasted)


def play(visits: list[Visit], **of_the_place: Any) -> Place:
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        place = Place(patch, **of_the_place)
        for visit in visits:
            place.at(visit.at_s, partial(place.open, visit))
        place.run()
        ended_s = place.now_s
        place.check_end()
        place.now_s = ended_s
    return place


PIECES = st.tuples(
    st.sampled_from((0.0, 0.01, 0.3, 1.0, 5.0, 30.0)), st.sampled_from(("a", "abc", "A text. ", "x" * 20))
)
VISITS = st.builds(
    Visit,
    at_s=st.floats(0, 6),
    paced=st.booleans(),
    frames=st.integers(1, 30),
    texts=st.sampled_from((("Hi.",), ("Where are you going?", "No."), ("Over the hills.", "Far away.", "Yes."))),
    pieces=st.one_of(st.just(()), st.lists(PIECES, min_size=1, max_size=4).map(tuple)),
    ends=st.booleans(),
    cancel_s=st.one_of(st.just(NEVER), st.floats(0, 20)),
    reads=st.one_of(st.just(NEVER), st.integers(0, 4)),
    reads_hz=st.sampled_from((NEVER, 12.5, 3.0)),
    chunks=st.sampled_from(CHUNKS),
)
PLACES = st.fixed_dictionaries(
    {
        "tick_s": st.sampled_from((0.0008, 0.03, 0.07, 0.1, 0.3, 0.8)),
        "lane_s": st.sampled_from((0.0, 0.01, 0.05)),
        "slots": st.sampled_from((2, 8)),
        "pages": st.sampled_from((30, 2_000)),
        "overlaps": st.booleans(),
        "settings": st.sampled_from((SETTINGS, replace(SETTINGS, idle_lanes=0, few_lanes=1), TickSettings.cpu())),
        "admits": st.booleans(),
        "capacity": st.sampled_from((None, 0.5, 1.0, 2.5, 6.0)),
        "eos_after": st.sampled_from((3, 5, 40)),
        "prefix": st.sampled_from(("", "v" * 64, "v" * 90)),
        "fails": st.tuples(st.sampled_from(("launch", "collect")), st.sets(st.integers(0, 30), max_size=1)),
        "spoils": st.frozensets(st.integers(0, 90), max_size=1),
    }
)
WRITER = Visit(frames=10, pieces=((0.0, "A first"),), ends=False)


@pytest.mark.parametrize("engines", [("batch",), ("batch", "single")], ids=["batch", "auto"])
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=PLACES, visits=st.lists(VISITS, min_size=1, max_size=8), data=st.data())
def test_no_stream_waits_beside_lanes_that_do_nothing(engines, place, visits, data):
    play([replace(visit, engine=data.draw(st.sampled_from(engines))) for visit in visits], **place)


def test_readers_of_streams_that_are_ahead_wake_the_worker():
    visits = [Visit(frames=60, reads_hz=reads_hz) for reads_hz in (3.0, 4.0)]
    play(visits, tick_s=0.001, settings=replace(SETTINGS, idle_lanes=0, few_lanes=1))  # to their ends


def test_places_that_are_kept_unused_end_the_wait_of_others_by_name():
    writers = [replace(WRITER, at_s=0.1 * number) for number in range(2)]
    place = play([*writers, Visit(at_s=3.0, paced=False), Visit(at_s=5.0)], tick_s=0.01, slots=2, admits=False)
    error = place.seen[2].job.error
    assert isinstance(error, CapacityError) and "wait for their text or their readers" in str(error)
    assert 15 <= place.now_s < 15.1


@pytest.mark.parametrize("pieces", [((0.0, "ab"), (9.0, "cdefgh")), ((0.0, "A. "), (9.0, "Another sentence."))])
def test_who_waited_for_text_goes_first_when_it_comes(pieces):
    """The rest of a segment's text, and the next segment's; two lanes a tick, four others that want them."""
    others = [Visit(at_s=4.0, frames=30, chunks=((8,), 8)) for _ in range(4)]
    visits = [Visit(frames=200, pieces=pieces, chunks=CHUNKS[1]), *others]
    place = play(visits, tick_s=0.1, lane_s=0.1, settings=replace(SETTINGS, max_lanes=2))
    first = next(i for i, at_s in enumerate(place.lanes.launched_s) if at_s >= 9.0)
    ticks = place.lanes.ticks[first - 2 : first + 1]
    assert [0 in tick.lanes for tick in ticks] == [False, False, True], [tick.lanes for tick in ticks]
