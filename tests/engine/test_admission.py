"""Which streams are admitted, which wait and which are refused, and by which name."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.engine.admission import (
    Admission,
    AdmissionLimits,
    AdmissionQueue,
    Arrival,
    Capacity,
    measured_streams,
    refusal,
)
from mktts.engine.pages import Pages
from mktts.engine.scheduler import StreamTable, TickModel, TickSettings

MODEL, ARRIVAL = TickModel.h200(), Arrival(0.0, prompt_rows=32, max_rows=182)


class Place:
    """A queue, and streams that were admitted from it."""

    def __init__(self, capacity: float | None = None, slots: int = 3_000, pages: int = 9_000, **limits) -> None:
        self.table, self.pages = StreamTable(slots), Pages(pages, slots, 2_048)
        self.admission = Admission(AdmissionLimits(**limits))
        self.admission.measured = None if capacity is None else Capacity(capacity, "measured by hand")
        self.admission.listeners.append(self.table.listening)
        self.queue = AdmissionQueue(self.admission, self.table, self.pages, TickSettings.h200())
        self.inside = 0

    def submit(self, **changes) -> str:
        arrival = ARRIVAL._replace(**changes)
        reason = self.queue.submit(arrival, MODEL, arrival.arrived_s)
        if reason == "":
            self.enter(arrival)
        return "waits" if reason is None else reason

    def enter(self, arrival: Arrival) -> None:
        self.pages.open(self.inside, arrival.max_rows)
        self.table.enter(self.inside, arrival.arrived_s, arrival.paced)
        self.table.context_rows[self.inside] = 107
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self.table.open[self.inside] = False
        self.pages.close(self.inside)

    def fill(self, most: int = 5_000, **arrival) -> str:
        return next((reason for _ in range(most) if (reason := self.submit(**arrival))), "")

    def obstacle(self, **changes) -> str:
        return self.queue.obstacle(ARRIVAL._replace(**changes), MODEL, 0.0)


@pytest.mark.parametrize(
    ("place", "arrival", "inside", "obstacle"),
    [
        ({"capacity": 21.9}, {}, 21, "capacity"),
        ({"capacity": 21.9, "max_streams": 3}, {}, 3, "max_streams"),
        ({"capacity": 1.2, "min_streams": 4}, {}, 4, "capacity"),
        ({"capacity": None, "slots": 5}, {}, 5, "slots"),
        ({"capacity": 21.9, "pages": 20}, {}, 6, "memory"),
        ({"capacity": None}, {"max_rows": 2_049}, 0, "memory"),
    ],
)
def test_listeners_come_in_up_to_the_smallest_bound_and_each_has_its_name(place, arrival, inside, obstacle):
    place = Place(**place)
    assert place.fill(most=100, **arrival) == "waits"
    assert place.inside == inside and place.obstacle(**arrival) == obstacle


def test_streams_without_a_listener_take_no_capacity_and_a_machine_slower_than_real_time_refuses_nobody_for_that():
    place = Place(2)
    assert place.fill(most=50, paced=False) == "" and place.inside == 50
    assert place.fill() == "waits" and place.inside == 52
    place = Place(0.4, slots=9)
    assert place.fill() == "waits" and place.inside == 9 and place.obstacle() == "slots"
    assert place.admission.capacity == (math.inf, "slower than real time: 0.4 streams; measured by hand")


def test_prompts_enter_as_fast_as_the_first_pcm_stays_within_its_bound():
    place = Place(2_000)
    place.fill(most=100)
    place.table.prompt_rows[:100] = 332
    assert place.obstacle() == "first_pcm"
    assert Place(2_000).submit(prompt_rows=2_000, max_rows=2_048) == ""  # alone, a long prompt may take its time


def test_a_reader_who_is_gone_and_one_who_waits_for_text_hold_no_capacity_and_one_who_plays_does():
    place = Place(2, max_wait_s=0.5)
    place.fill()
    place.table.frames_taken[:2], place.table.full[:2] = 5, True
    place.table.read(np.array([0, 1]), np.array([6, 5]), now_s=1.5)
    assert place.queue.wake_s(0.2) == 0.5  # of the one that waits
    assert [place.table.listening(now_s) for now_s in (1.9, 2.0, 3.4, 3.5)] == [2, 1, 1, 0]
    assert place.queue.pop(0.2, MODEL) is None
    place.queue.cancel({None})
    place.table.read(np.array([0, 1]), np.array([7, 7]), now_s=4.0)
    assert place.submit(arrived_s=4.1) == "waits"
    place.table.text(0, False, 4.2)
    assert place.queue.pop(4.3, MODEL)[1] == ""


def test_the_queue_has_an_end_in_length_and_in_time_and_the_refusal_says_why():
    place = Place(1, max_waiting=2)
    assert [place.submit() for _ in range(4)] == ["", "waits", "waits", "queue"]
    assert place.queue.pop(0.04, MODEL) is None and place.queue.wake_s(0.04) == 0.05
    reason = place.queue.pop(0.05, MODEL)[1]
    error = refusal(reason, 1, place.admission.most)
    assert reason == "waited" and error.capacity == 1
    assert str(error).startswith("refused with 1 stream open, where 1 can be served at once: no place came free in")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_listeners_come_before_others_and_of_each_kind_the_first_comes_first(data):
    """Arrivals, departures, cancels and time, in any order; none is lost, and none leaves the queue twice."""
    place, names = Place(3, slots=4, pages=24, max_wait_s=1.0, max_waiting=64), iter(range(1_000))
    now_s, waiting = 0.0, []
    for _ in range(data.draw(st.integers(1, 40))):
        deed = data.draw(st.sampled_from(["listener", "listener", "file", "leaves", "cancels", "waits"]))
        if deed in ("listener", "file"):
            paced, rows = deed == "listener", data.draw(st.sampled_from([100, 300, 1_400]))
            arrival = Arrival(now_s, 32, rows, paced, name=next(names))
            before = [one for one in waiting if one.paced or not paced]
            clear = not before and not place.queue.obstacle(arrival, MODEL, now_s)
            reason = place.queue.submit(arrival, MODEL, now_s)
            assert (reason == "") == clear
            place.enter(arrival) if clear else waiting.append(arrival)
        elif deed == "leaves" and place.inside:
            place.leave()
        elif deed == "cancels" and waiting:
            place.queue.cancel({waiting.pop(data.draw(st.integers(0, len(waiting) - 1))).name})
        elif deed == "waits":
            now_s += data.draw(st.floats(0.0, 0.9))
        while left := place.queue.pop(now_s, MODEL):
            arrival, reason = left
            kind = [one for one in waiting if one.paced == arrival.paced]
            assert arrival is kind[0]
            if reason:
                assert reason == "waited" and arrival.paced and now_s >= arrival.arrived_s + 1.0
            else:
                assert arrival.paced or not any(one.paced for one in waiting)
                place.enter(arrival)
            waiting.remove(arrival)
        first = next((one for one in waiting if one.paced), waiting[0] if waiting else None)
        assert first is None or place.queue.obstacle(first, MODEL, now_s)
        assert all(now_s < one.arrived_s + 1.0 for one in waiting if one.paced)
        assert len(place.queue._paced) + len(place.queue._unpaced) == len(waiting)


def ticks(admission: Admission, from_s: float, to_s: float, slower: float, late: int) -> None:
    """Ticks of 50 ms and 10 frames, of which so many were late, that took so many times what was measured."""
    for number in range(round((to_s - from_s) / 0.05)):
        admission.tick(from_s + 0.05 * number, 0.04 * slower, 0.04, late, 10)


def test_late_frames_in_slow_ticks_lower_the_capacity_and_only_quicker_ticks_raise_it_again():
    admission = Admission(AdmissionLimits(min_streams=2))
    admission.measured = Capacity(20, "measured by hand")
    ticks(admission, 0, 30, 1.6, late=0)
    assert admission.capacity == (20, "measured by hand")  # slow, and nobody noticed
    ticks(admission, 30, 36, 1.6, late=1)
    assert admission.capacity.streams == 12
    assert admission.capacity.basis == "lowered: ticks take 1.6 times what was measured; measured by hand"
    ticks(admission, 36, 80, 1.6, late=0)
    assert admission.capacity.streams == 12  # in time, because it is lowered
    ticks(admission, 80, 100, 40.0, late=9)
    assert admission.capacity == (2, "min_streams; measured by hand")
    ticks(admission, 100, 110, 1.2, late=0)
    assert admission.capacity.streams == 16
    ticks(admission, 110, 120, 0.5, late=0)
    assert admission.capacity == (20, "measured by hand")  # no more than was measured


def test_what_is_measured_becomes_streams_by_hand():
    # A frame in 2.5 ms is 32 listeners; a prompt of 32 rows of 0.1 ms every 7 s takes 0.46 ms a second of each.
    assert measured_streams(2.5e-3, 0.0, 0.9) == pytest.approx(0.9 * 32)
    assert measured_streams(2.5e-3, 1e-4, 0.9) == pytest.approx(0.9 / (1 / 32 + 32 * 1e-4 / 7))
