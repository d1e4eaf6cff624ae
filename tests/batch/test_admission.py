"""Who is admitted, who waits and who is refused, and by which name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.batch.pages import Pages
from mktts.engine.admission import AdmissionSettings, Arrival, Door, Verdict
from mktts.engine.board import Board
from mktts.engine.scheduler import TickSettings
from mktts.engine.tick import TickModel

MODEL = TickModel.h200()


class Place:
    """A door, and streams that have come in through it."""

    def __init__(self, slots: int = 3_000, pages: int = 9_000, model: TickModel = MODEL, **settings) -> None:
        self.board, self.pages, self.model = Board(slots), Pages(pages, slots, 2_048), model
        self.door = Door(self.board, self.pages, TickSettings.h200(), AdmissionSettings(**settings))
        self.inside = 0

    def ask(self, **request) -> Verdict:
        request = Arrival(**({"arrived_s": 0.0, "prompt_rows": 32, "max_rows": 182} | request))
        verdict = self.door.ask(request, self.model)
        if verdict.decision == "admit":
            self.enter(request)
        return verdict

    def enter(self, request: Arrival) -> None:
        self.pages.open(self.inside, request.max_rows)
        self.board.enter(self.inside, request.arrived_s, request.paced)
        self.board.context_rows[self.inside] = 107
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        self.board.leave(self.inside)
        self.pages.close(self.inside)

    def fill(self, most: int = 5_000, **request) -> Verdict:
        for _ in range(most):
            verdict = self.ask(**request)
            if verdict.decision != "admit":
                return verdict
        return verdict


def test_listeners_come_in_up_to_what_the_ticks_carry():
    place = Place()
    assert place.fill() == ("queue", "listeners")
    # By hand: 1 024 lanes a tick of 4.97 + 23.8 + 2.9 (1 024 rows) + 3.0 (107 rows) + 0.3 ms, at 12.5 Hz, less 5 %.
    assert place.inside == pytest.approx(0.95 * 1_024 / 35.0e-3 / 12.5, rel=0.01)
    slower = Place(model=replace(MODEL, lane_s=2 * MODEL.lane_s))
    slower.fill()
    assert 0.5 * place.inside < slower.inside < 0.7 * place.inside


def test_unpaced_streams_take_little_of_the_listeners_time():
    place = Place(pages=15_000, slots=5_000)
    assert place.fill(most=2_500, paced=False) == ("admit", "")
    assert place.fill() == ("queue", "listeners") and place.inside > 2_500 + 1_400


@pytest.mark.parametrize(
    ("place", "request_", "verdict"),
    [
        ({}, {"max_rows": 2_049}, ("refuse", "too_long")),
        ({"slots": 5}, {}, ("queue", "slots")),
        ({"pages": 20}, {}, ("queue", "pages")),
        ({"slots": 5, "max_line": 0}, {}, ("refuse", "line")),
    ],
)
def test_every_obstacle_has_its_name(place, request_, verdict):
    assert Place(**place).fill(most=10, **request_) == verdict


def test_a_machine_slower_than_real_time_still_serves_one_listener_or_many_that_nobody_waits_for():
    slow = TickModel(0.2, 0.1, 1e-3, 0.0)
    place = Place(model=slow)
    assert place.ask() == ("admit", "")
    assert place.ask(paced=False) == ("queue", "listeners")
    place = Place(model=slow)
    assert place.fill(most=300, paced=False, prompt_rows=400, max_rows=500) == ("admit", "")
    assert place.ask() == ("queue", "listeners")


def test_too_many_waiting_prompts_have_their_name():
    place = Place()
    place.fill(most=100)
    place.board.prompt_rows[:100] = 332
    assert place.ask() == ("queue", "first_pcm")
    empty = Place()
    assert empty.ask(prompt_rows=2_000, max_rows=2_048) == ("admit", "")  # alone, a long prompt may take its time


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_listeners_stand_before_others_and_of_each_kind_the_first_comes_first(data):
    """Arrivals, departures, cancels and time, in any order; nobody is lost, and nobody leaves the line twice."""
    place, now_s, waiting, names = Place(slots=4, pages=24, max_wait_s=1.0), 0.0, [], iter(range(1_000))
    for _ in range(data.draw(st.integers(1, 40))):
        deed = data.draw(st.sampled_from(["listener", "listener", "book", "leaves", "cancels", "waits"]))
        if deed in ("listener", "book"):
            paced, rows = deed == "listener", data.draw(st.sampled_from([100, 300, 1_400]))
            request = Arrival(now_s, 32, rows, paced, name=next(names))
            verdict = place.door.ask(request, MODEL)
            before = [one for one in waiting if one.paced or not paced]
            assert (verdict.decision == "admit") == (not before and not place.door.obstacle(request, MODEL))
            if verdict.decision == "admit":
                place.enter(request)
            else:
                assert verdict.reason != "line" or before
                waiting.append(request)
        elif deed == "leaves" and place.inside:
            place.leave()
        elif deed == "cancels" and waiting:
            place.door.give_up(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))).name)
        elif deed == "waits":
            now_s += data.draw(st.floats(0.0, 0.9))
        while left := place.door.next(now_s, MODEL):
            request, verdict = left
            kind = [one for one in waiting if one.paced == request.paced]
            if verdict.decision == "admit":
                assert request is kind[0] and (request.paced or not any(one.paced for one in waiting))
                place.enter(request)
            else:
                assert verdict == ("refuse", "waited") and request.paced and now_s >= request.arrived_s + 1.0
            waiting.remove(request)
        first = next((one for one in waiting if one.paced), waiting[0] if waiting else None)
        assert first is None or place.door.obstacle(first, MODEL)
        assert all(now_s < one.arrived_s + 1.0 for one in waiting if one.paced)
        assert place.door.line == len(waiting)


def test_what_is_carried_is_what_is_let_in():
    slower = replace(MODEL, lane_s=2 * MODEL.lane_s)
    for place in (Place(pages=25_000), Place(model=slower, pages=25_000), Place(max_listeners=12)):
        carries = place.door.carries(place.model)
        place.fill()
        assert carries == pytest.approx(place.inside, rel=0.03)  # those that came have longer contexts
    assert Place(slots=50).door.carries(MODEL) == 50
    assert Place(pages=71).door.carries(MODEL) == 10  # of 400 rows, 7 pages each, before anybody came
    assert Place(model=TickModel(0.2, 0.1, 1e-3, 0.0)).door.carries(TickModel(0.2, 0.1, 1e-3, 0.0)) == 1


def test_so_many_listeners_are_allowed_whatever_could_be_carried():
    place = Place(max_listeners=3, max_line=1)
    assert place.fill() == ("queue", "most") and place.inside == 3
    assert place.ask() == ("refuse", "line")
    assert place.ask(paced=False) == ("queue", "most")  # a listener waits before it
    other = Place(max_listeners=3)
    other.door.elsewhere = lambda: 2
    assert other.fill() == ("queue", "most") and other.inside == 1


def test_a_reader_who_is_gone_holds_nobody_up_and_one_who_plays_does():
    place = Place(max_listeners=2)
    place.fill()
    place.board.taken(0, 5, full=True)
    place.board.taken(1, 5, full=True)
    place.board.read([0, 1], [6, 5], now_s=1.5)
    assert place.door.patience_s(1.6) == pytest.approx(0.25)  # of the one in line
    assert place.door.listeners(1.9) == 2 and place.door.next(0.2, MODEL) is None
    assert place.door.listeners(2.0) == 1 and place.door.listeners(3.4) == 1 and place.door.listeners(3.5) == 0
    request, verdict = place.door.next(2.1, MODEL)
    assert verdict == ("admit", "")
    place.board.read([1], [6], now_s=3.0)
    assert place.door.listeners(3.2) == 2


def test_the_line_is_looked_at_again_when_a_reader_may_be_gone():
    place = Place(max_listeners=1, max_wait_s=60.0)
    place.ask()
    place.board.taken(0, 5, full=True)
    assert place.ask(arrived_s=1.0).decision == "queue"
    assert place.door.patience_s(1.0) == 2.0  # two seconds after it took something
    assert place.door.patience_s(2.5) == 61.0
    assert place.door.next(2.0, MODEL)[1] == ("admit", "")


def test_a_machine_slower_than_real_time_serves_a_listener_beside_one_who_is_gone():
    slow = TickModel(0.2, 0.1, 1e-3, 0.0)
    place = Place(model=slow)
    place.ask()
    place.board.taken(0, 5, full=True)
    assert place.ask(arrived_s=1.0) == ("queue", "listeners")
    assert place.door.next(2.0, slow)[1] == ("admit", "")
