"""Who is admitted, waits or is refused, and by which name; then one tick: what it may hold, who comes first, who costs
nothing, and what it takes."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mktts.engine.admission import Admission, AdmissionLimits, AdmissionQueue, Arrival, Capacity, refusal
from mktts.engine.pages import Pages
from mktts.engine.scheduler import FRAME_S, StreamTable, TickFit, TickModel, TickSettings, next_tick
from mktts.errors import CapacityError, OptionsError

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


def busy_ticks(admission: Admission, from_s: float, to_s: float, slower: float, late: int) -> None:
    """Ticks of 50 ms and 10 frames, of which so many were late, that took so many times what was measured."""
    for number in range(round((to_s - from_s) / 0.05)):
        admission.tick(from_s + 0.05 * number, 0.04 * slower, 0.04, late, 10)


def test_late_frames_in_slow_ticks_lower_the_capacity_and_only_quicker_ticks_raise_it_again():
    admission = Admission(AdmissionLimits(min_streams=2))
    admission.measured = Capacity(20, "measured by hand")
    busy_ticks(admission, 0, 30, 1.6, late=0)
    assert admission.capacity == (20, "measured by hand")  # slow, and nobody noticed
    busy_ticks(admission, 30, 36, 1.6, late=1)
    assert admission.capacity.streams == 12
    assert admission.capacity.basis == "lowered: ticks take 1.6 times what was measured; measured by hand"
    busy_ticks(admission, 36, 80, 1.6, late=0)
    assert admission.capacity.streams == 12  # in time, because it is lowered
    busy_ticks(admission, 80, 100, 40.0, late=9)
    assert admission.capacity == (2, "min_streams; measured by hand")
    busy_ticks(admission, 100, 110, 1.2, late=0)
    assert admission.capacity.streams == 16
    busy_ticks(admission, 110, 120, 0.5, late=0)
    assert admission.capacity == (20, "measured by hand")  # no more than was measured


NOW_S = 100.0
SMALL = TickSettings(
    buckets=tuple((lanes, rows) for lanes in (2, 4, 8) for rows in (0, 16, 64)),
    max_lanes=8, max_rows=64, min_rows=16, few_lanes=2,
)  # fmt: skip
MODELS = {"h200": MODEL, "cpu": TickModel.cpu()}
ANY_SIZE = TickSettings(max_lanes=8, max_rows=64, min_rows=16, few_lanes=2)

STATES = st.sampled_from(["new", "middle of prompt", "speaking", "next segment"])
COUNTS = {"rows": st.integers(1, 150), "made": st.integers(1, 60), "taken": st.integers(0, 60)}
FLAGS = {"paced": st.booleans(), "known": st.booleans(), "full": st.sampled_from([False, False, False, True])}
STREAM = st.fixed_dictionaries({"state": STATES, "lead_s": st.floats(-0.5, 2.0), **COUNTS, **FLAGS})


def table_of(streams: list[dict], slots: int = 40) -> StreamTable:
    """A table in the middle of its work; stream i has slot i."""
    table = StreamTable(slots)
    for slot, stream in enumerate(streams):
        table.enter(slot, NOW_S - 0.001 * slot, stream["paced"])
        if stream["state"] == "speaking":
            table.context_rows[slot] = 32 + stream["made"]
        else:
            table.prompt_rows[slot] = stream["rows"]
            table.context_rows[slot] = 7 if stream["state"] == "middle of prompt" else 0
        if stream["state"] in ("speaking", "next segment"):
            table.frames_made[slot] = stream["made"]
            table.frames_taken[slot] = min(stream["taken"], stream["made"])
            table.playing_since_s[slot] = NOW_S + stream["lead_s"] - FRAME_S * stream["made"]
            table.newest_s[slot] = NOW_S - 0.1
        table.text_known[slot], table.full[slot] = stream["known"], stream["full"]
    return table


def speaking(count: int, lead_s: float = 0.1, **changes) -> list[dict]:
    usual = {"state": "speaking", "lead_s": lead_s, "rows": 1, "made": 9, "taken": 9}
    return [usual | {"paced": True, "known": True, "full": False} | changes for _ in range(count)]


def new(count: int, rows: int = 32, **changes) -> list[dict]:
    return speaking(count, **({"state": "new", "rows": rows} | changes))


def rows_of(tick) -> int:
    return sum(piece.rows for piece in tick.pieces)


def predicted_s(tick, model: TickModel) -> float:
    return model.predict(*tick.bucket, tick.context_rows)


def content(tick) -> tuple:
    return tick.bucket, tick.lanes.tolist(), tick.new_lanes, tick.frames.tolist(), tick.pieces, tick.context_rows


@settings(max_examples=80, deadline=None)
@given(st.lists(STREAM, max_size=30), st.sampled_from([SMALL, ANY_SIZE]), st.sampled_from(sorted(MODELS)))
def test_a_tick_holds_what_may_be_in_it_and_fits_its_bucket(streams, limits, name):
    table, without = table_of(streams), table_of(streams)
    before = copy.deepcopy(vars(table))
    tick = next_tick(table, NOW_S, MODELS[name], limits)
    assert all(np.array_equal(before[name], array) for name, array in vars(table).items()), "planning changes nothing"
    lanes = tick.lanes.tolist()
    able = {i for i, stream in enumerate(streams) if stream["known"] and not stream["full"]}
    assert len(set(lanes)) == len(lanes) and set(lanes) <= able
    assert [piece.slot for piece in tick.pieces if piece.last] == lanes[: tick.new_lanes]
    assert {piece.slot for piece in tick.pieces} <= able and rows_of(tick) <= tick.bucket[1]
    for piece in tick.pieces:
        left = int(table.prompt_rows[piece.slot])
        assert 1 <= piece.rows <= left and piece.last == (piece.rows == left)
        assert piece.start == table.context_rows[piece.slot]
    assert all(streams[slot]["state"] == "speaking" for slot in lanes[tick.new_lanes :])
    assert len(lanes) <= tick.bucket[0] <= limits.max_lanes and tick.bucket[1] <= limits.max_rows
    assert not (lanes or tick.pieces) or not limits.buckets or tick.bucket in limits.buckets
    # Of those that speak, nobody is left out who has less lead than one who is in.
    talking = np.array([i for i in able if streams[i]["state"] == "speaking"], int)
    lead_s = dict(zip(talking.tolist(), table.lead_s(talking, NOW_S, limits.lead_s).tolist(), strict=True))
    inside = [lead_s[slot] for slot in lanes[tick.new_lanes :]]
    assert max(inside, default=-9.0) <= min((lead_s[slot] for slot in lead_s if slot not in lanes), default=99.0)
    # Arrivals go on in every tick.
    if any(streams[i]["state"] in ("new", "middle of prompt") for i in able):
        assert tick.pieces
    # Streams that wait for text or for their reader cost nothing.
    for slot in set(range(len(streams))) - able:
        without.open[slot] = False
    other = next_tick(without, NOW_S, MODELS[name], limits)
    assert content(tick) == content(other) and tick.wake_s == other.wake_s


def test_with_listeners_pressed_for_time_arrivals_take_few_rows():
    for lead_s, rows in ((0.012, 16), (0.312, 64)):
        table = table_of(speaking(5, lead_s=lead_s) + new(6, rows=64))
        assert rows_of(next_tick(table, NOW_S, TickModel(10e-3, 1e-4, 1e-4, 0.0), SMALL)) == rows


def test_prompts_enter_together_beside_listeners_whose_chunks_small_ticks_complete_in_time():
    """As on an H100, where a tick of a thousand lanes takes 60 ms, and one of those who are pressed 16."""
    table = table_of(speaking(100, lead_s=0.2) + speaking(900, lead_s=0.8) + new(20), slots=1_100)
    table.chunk_start[:100], table.chunk_end[:100] = 8, 12  # two frames behind the next one complete it
    model = TickModel(constant_s=4.4e-3, lane_s=47e-6, row_s=5.4e-6, attention_s=2.7e-6)
    tick = next_tick(table, NOW_S, model, TickSettings.h200())
    assert tick.new_lanes == 20 and set(range(100)) <= set(tick.lanes.tolist()) and 3 * predicted_s(tick, model) < 0.12


def test_ticks_keep_to_their_longest_time_while_nobody_would_be_late_for_that():
    limits = TickSettings(max_lanes=24, max_rows=64, max_tick_s=0.05, few_lanes=2, chunks=(1,))
    model = TickModel(constant_s=13e-3, lane_s=3.1e-3, row_s=85e-6, attention_s=55e-6)
    tick = next_tick(table_of(speaking(18, lead_s=0.3)), NOW_S, model, limits)
    assert 8 <= len(tick.lanes) <= 12 and predicted_s(tick, model) <= 0.05
    tick = next_tick(table_of(speaking(18, lead_s=0.1)), NOW_S, model, limits)
    assert len(tick.lanes) == 18 and predicted_s(tick, model) < FRAME_S
    slow = TickModel(constant_s=45e-3, lane_s=10e-3, row_s=85e-6, attention_s=55e-6)
    tick = next_tick(table_of(speaking(1, lead_s=0.0) + new(3)), NOW_S, slow, limits)
    assert 0 in tick.lanes and tick.new_lanes == 1  # an arrival takes nobody's lane


def test_a_pause_of_the_text_is_not_an_underrun():
    table = table_of(speaking(1, lead_s=0.2))
    table.text(0, known=False, now_s=NOW_S)
    assert not len(next_tick(table, NOW_S + 3, TickModel.h200(), SMALL).lanes)
    table.text(0, known=True, now_s=NOW_S + 3)
    tick = next_tick(table, NOW_S + 3, TickModel.h200(), SMALL)
    table.begin(tick)
    assert table.finish(tick, NOW_S + 3.01).tolist() == [0.0]


def test_a_slot_that_changed_hands_under_a_running_tick_keeps_the_new_streams_clock():
    table = table_of(new(1))
    tick = next_tick(table, NOW_S, TickModel.h200(), SMALL)
    table.begin(tick)
    table.open[0] = False
    table.enter(0, NOW_S + 0.001)
    assert table.finish(tick, NOW_S + 5).tolist() == [0.0]
    assert table.playing_since_s[0] == -np.inf and table.frames_made[0] == 0


@pytest.mark.parametrize("paced", [True, False])
def test_nobody_starves_even_beyond_the_capacity(paced):
    """100 streams where 8 fit a tick, and arrivals that never end: everybody's frames and prompts go on."""
    rng, model = np.random.default_rng(0), TickModel(10e-3, 1e-3, 1e-4, 1e-5)
    table = table_of(speaking(100, paced=paced) + new(50, paced=paced), slots=400)
    newest = dict.fromkeys(range(150), 0)
    now_s, longest = NOW_S, 0
    for number in range(400):
        if rng.random() < 0.05:
            slot = 150 + sum(slot >= 150 for slot in newest)
            table.enter(slot, now_s)
            table.prompt_rows[slot] = rng.integers(1, 200)
            newest[slot] = number
        tick = next_tick(table, now_s, model, SMALL)
        now_s += predicted_s(tick, model)
        table.begin(tick)
        table.finish(tick, now_s)
        table.frames_taken[:] = table.frames_made
        for slot in tick.lanes.tolist():
            longest = max(longest, number - newest[slot])
            newest[slot] = number
    assert min(newest.values()) > 400 - 150 and longest < 150
    assert len(newest) > 160


@pytest.mark.parametrize("name", ["max_streams", "min_streams", "max_waiting", "max_wait_s"])
def test_settings_that_contradict_each_other_are_refused(name):
    with pytest.raises(OptionsError):
        AdmissionLimits(**{name: 0 if name.endswith("streams") else -1})
    for wrong in ((1, 2, 64), (4, 0, 64), (4, 2, 0)):
        with pytest.raises(CapacityError):
            Pages(*wrong)


@settings(deadline=None)
@given(STREAM)
def test_a_stream_that_is_alone_runs_as_it_would_by_what_is_done_for_many(stream):
    table = table_of([stream] + new(1))
    table.open[1] = False
    assume(len(table.able()))
    model, one = TickModel(1.0, 0.0, 0.0, 0.0), TickSettings.one()
    expected = next_tick(table, NOW_S, model, replace(one, max_lanes=2))
    found = next_tick(table, NOW_S, model, one)
    assert content(found) == content(expected) and found.serials == expected.serials
    assert (found.lanes.dtype, found.wake_s) == (expected.lanes.dtype, expected.wake_s)


def ticks(seed: int, count: int):
    """Sizes such as a run makes: lanes, prompt rows, rows attended to."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lanes = int(rng.choice([8, 32, 64, 128, 256, 512]))
        yield lanes, int(rng.choice([0, 0, 64, 256, 1024])), int(lanes * rng.uniform(50, 500))


@settings(max_examples=25, deadline=None)
@given(factors=st.lists(st.floats(0.3, 6.0), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_the_fit_learns_a_machine_with_other_parts(factors, seed):
    prior = TickModel.h200()
    truth = TickModel(*np.multiply((prior.constant_s, prior.lane_s, prior.row_s, prior.attention_s), factors).tolist())
    fit, rng = TickFit(prior), np.random.default_rng(seed)
    for size in ticks(seed, 600):
        fit.observe(*size, truth.predict(*size) * rng.normal(1.0, 0.03))
    for size in ticks(seed + 1, 20):
        assert fit.model.predict(*size) == pytest.approx(truth.predict(*size), rel=0.1)


def test_what_the_ticks_say_nothing_about_keeps_its_value_and_one_outlier_moves_little():
    prior, size = TickModel.h200(), (8, 0, 3_000)
    fit, took_s = TickFit(prior), replace(prior, constant_s=2 * prior.constant_s).predict(*size)
    for _ in range(2_000):  # always the same size, never a prompt
        fit.observe(*size, took_s)
    before = fit.model
    fit.observe(*size, 0.0)  # a clock that stood still teaches nothing
    assert fit.model == before and before.predict(*size) == pytest.approx(took_s, rel=0.02)
    fit.observe(*size, 30.0)  # the machine slept
    assert fit.model.predict(*size) == pytest.approx(took_s, rel=0.03)
    assert fit.model.row_s == pytest.approx(prior.row_s)
