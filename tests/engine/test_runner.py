"""Streams on both kinds of lanes: who comes in, who waits for what, what each is given, and what fails alone."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from desk import Desk, alone, chunks_of, fails_at, frames_of
from fakes import OFF, ONE, SETTINGS, FakeBackend, FakeCodec

from mktts.engine.admission import AdmissionLimits
from mktts.engine.lanes import SingleLanes
from mktts.engine.runner import TICK_BOUNDS_S
from mktts.engine.scheduler import FRAME_S
from mktts.engine.stream import Utterance
from mktts.errors import CapacityError, EngineError, PromptError

HELD = replace(ONE, buffer_frames=2)  # a stream that waits for its reader after two frames


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def together(request, monkeypatch):
    """Makes desks with lanes for many streams a tick, which they run at its launch, or beside the host."""
    return partial(Desk, monkeypatch, overlaps=request.param)


@pytest.fixture(params=["in turn", "ahead", "singly"])
def desk(request, monkeypatch):
    """Makes desks with lanes of both kinds."""

    def singly(backend=None, slots=32, rows_per_slot=10_000, **of_the_desk) -> Desk:
        lanes = SingleLanes(backend or FakeBackend(), FakeCodec(), rows_per_slot)
        lanes.slots = slots
        return Desk(monkeypatch, lanes.backend, lanes=lanes, **of_the_desk)

    return singly if request.param == "singly" else partial(Desk, monkeypatch, overlaps=request.param == "ahead")


def test_a_stream_that_could_never_have_its_pages_is_refused_at_once(desk):
    at = desk(rows_per_slot=64)
    job = at.say("x" * 64)
    at.turn()
    with pytest.raises(CapacityError, match="65 positions.*one may have 64: shorten the text"):
        job.take()
    assert at.all_free()


def test_who_has_waited_too_long_is_told_without_any_news(desk):
    at = desk(slots=1, limits=AdmissionLimits(max_wait_s=0.25))
    at.say(frames=50, options=HELD)
    at.run(until_s=1.0)
    late = at.say(seed=2)
    before = at.turns
    at.run()  # time alone goes on
    assert at.turns <= before + 4
    with pytest.raises(CapacityError, match="no place came free in time"):
        late.take()
    assert 1.25 <= at.now_s < 1.3  # woken for this, and not before
    assert at.turn() == math.inf


def test_while_it_waits_for_pages_its_listener_gets_what_there_is_and_newcomers_stand_behind(together):
    at = together(FakeBackend(eos_after=5), slots=4, pages=5, rows_per_slot=256)  # four pages
    eight = replace(OFF, schedule=(8,), buffer_frames=8)
    other = at.say(seed=2, frames=122, options=HELD)  # two pages
    long = at.say("a" * 10, "b" * 150, frames=30, options=eight)  # one page, then three
    at.run(until_s=1.0)
    assert sum(chunk.frames for chunk in chunks_of(long)) == 5 and long.open
    assert at.batch._queue.reserved_pages == 3 and at.pages.free == 2
    small = at.say(seed=3, frames=20)  # one page would do
    at.turn()
    assert [arrival.name for arrival in at.batch._queue._paced] == [small]
    other.cancel()
    at.run()
    assert len(long.codes) == 10 and long.finish_reason == "eos"
    assert small.finish_reason == "eos" and at.all_free()


def test_late_text_costs_no_lane_while_it_is_waited_for_and_is_a_new_segment_after_the_end_of_speech(desk):
    at = desk(FakeBackend(eos_after=20))
    job = at.listen(options=replace(OFF, schedule=(4,)))
    at.feed(job, "abcdef")  # a token a character: the first is in the prompt, five frames follow
    at.run()
    assert len(job.codes) == 6 and at.backend.entered == 6
    assert [chunk.frames for chunk in chunks_of(job)] == [4, 2]  # the last one early
    (slot,) = at.batch._streams
    assert (at.table.chunk_start[slot], at.table.chunk_end[slot]) == (6, 10)
    assert [at.turn() for _ in range(5)] == [math.inf] * 5 and at.backend.entered == 6
    at.feed(job, "gh")
    at.run()
    assert len(job.codes) == 8 and at.backend.entered == 8
    at.feed(job, "i" * 20)
    at.run()
    assert (len(job.codes), job.finish_reason) == (20, None) and job.segment is None
    at.feed(job, " And after the end of speech a new segment.", None)
    at.run()
    assert (len(job.codes), job.finish_reason) == (40, "eos") and at.all_free()


@pytest.mark.parametrize("rows", [63, 64, 100, 128])
def test_a_prefix_of_a_page_is_kept_once_and_later_streams_begin_behind_it(together, rows, monkeypatch):
    prefix = "p" * rows
    at = together(FakeBackend(eos_after=4), prefix=prefix)
    kept, keep = [], at.pages.keep
    monkeypatch.setattr(at.pages, "keep", lambda *what: kept.append(what) or keep(*what))
    for seed, text in enumerate(["One.", "Two two.", "Three."]):
        job = at.say(text, seed=seed)
        before = len(at.lanes.ticks)
        at.run()
        assert frames_of(job) == alone([text], seed, 4, prefix=prefix)
        entered = sum(piece.rows for tick in at.lanes.ticks[before:] for piece in tick.pieces)
        assert entered == len(text) + (rows if seed == 0 or rows < 64 else 0)
    assert [key for _, key, _ in kept] == ([prefix] if rows >= 64 else [])
    assert at.pages.find(prefix) == (rows if kept else 0) and at.all_free()


def served(at: Desk) -> None:
    """The next stream is served, and everything is free after it."""
    job = at.say("Next.", seed=77, frames=4)
    at.run()
    assert frames_of(job) == alone(["Next."], 77, at.backend.eos_after, frames=4)
    assert at.all_free()


@pytest.mark.parametrize(("name", "call", "made"), [("begin", 1, 6), ("_arrival", 1, 6), ("begin", 2, 9)])
def test_a_stream_whose_segment_the_lanes_refuse_or_cannot_be_measured_ends_alone(desk, monkeypatch, name, call, made):
    at = desk(FakeBackend(eos_after=3))
    jobs = [at.say("One.", "Two.", seed=1), at.say("Three.", "Four.", seed=20)]
    fails_at(monkeypatch, at.batch if name == "_arrival" else at.lanes, name, {call}, PromptError("a damaged voice"))
    at.run()
    (ended,) = (job for job in jobs if job.error is not None)
    assert sum(len(job.codes) for job in jobs) == made  # the first of its two segments was there already, or was not
    with pytest.raises(PromptError, match="damaged"):
        chunks_of(ended)
    served(at)


def test_a_text_that_raises_ends_its_stream_alone(desk):
    at = desk()
    good = at.say(seed=1, frames=30)
    waiting = at.listen(seed=2)
    at.turn()
    for job in (waiting, at.listen(seed=3)):
        job.script.update = lambda: 1 / 0
        at.feed(job, "a")
        at.run()
        with pytest.raises(ZeroDivisionError):
            job.take()
    assert len(good.codes) == 30
    served(at)


@pytest.mark.parametrize("name", ["launch", "collect"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_failed_tick_ends_its_streams_alone_and_the_next_are_served(desk, monkeypatch, name, call):
    at = desk()
    waiting = at.listen(seed=5)
    at.feed(waiting, "abc")
    at.run()
    assert len(waiting.codes) == 3
    jobs = [at.say(seed=seed, frames=9) for seed in range(3)]
    fails_at(monkeypatch, at.lanes, name, {call}, RuntimeError("an illegal address"))
    at.run()
    ended = [job for job in jobs if job.error is not None]
    assert len(ended) == min(3, at.lanes.settings.max_lanes)
    for job in ended:
        with pytest.raises((EngineError, RuntimeError), match="an illegal address"):  # of many streams, and of one
            chunks_of(job)
    for seed, job in enumerate(jobs):
        assert job in ended or frames_of(job) == alone(["Hello."], seed, None, frames=9)
    at.feed(waiting, "de")
    at.run()
    assert len(waiting.codes) == 5 and waiting.error is None
    waiting.cancel()
    at.run()
    served(at)


def test_a_stream_that_had_ended_keeps_its_end_when_its_wasted_lane_fails(monkeypatch):
    at = Desk(monkeypatch, FakeBackend(eos_after=3), overlaps=True)
    job = at.say()
    fails_at(monkeypatch, at.lanes, "collect", {4}, RuntimeError("an illegal address"))  # one behind the end
    at.run()
    assert sum(chunk.frames for chunk in chunks_of(job)) == 3
    assert (job.error, job.finish_reason) == (None, "eos")


@pytest.mark.parametrize("where", ["_update_readers", "_give", "_take_arrivals", "_launch", "_read"])
def test_after_a_turn_that_raised_everything_is_free_and_the_next_stream_is_served(desk, monkeypatch, where):
    at = desk()
    jobs = [at.say(seed=seed, frames=20) for seed in range(4)]
    waiting = at.listen()
    at.turn()
    fails_at(monkeypatch, at.batch, where, {1}, KeyError("a wrong book"))
    jobs += [at.say(seed=seed, frames=20) for seed in (8, 9)]
    with pytest.raises(KeyError):
        at.run()
    at.table.open[:] = False  # whatever the books say then
    at.batch.fail_all(KeyError("a wrong book"))
    for job in (*jobs, waiting):
        assert not job.open
        with pytest.raises((EngineError, KeyError), match="a wrong book"):
            chunks_of(job)
    served(at)


def test_ticks_are_counted_by_how_long_they_took(desk, monkeypatch):
    at, took_s = desk(), iter((0.0005, TICK_BOUNDS_S[0], 0.0011, 9.0))
    collect = at.lanes.collect
    monkeypatch.setattr(at.lanes, "collect", lambda launched: collect(launched)._replace(took_s=next(took_s)))
    at.say(frames=4)
    at.run()
    times = at.batch.stats.ticks
    assert times.counts[:2] == [2, 1] and times.counts[-1] == 1 and sum(times.counts) == 4
    assert times.sum_s == pytest.approx(0.0026 + 9.0)


def test_close_ends_every_stream_though_the_device_is_gone(desk, monkeypatch):
    at = desk(slots=2)
    jobs = [at.say(seed=seed, options=replace(ONE, buffer_frames=3)) for seed in range(3)]
    jobs.append(at.listen())
    at.turn()
    for name in ("collect", "leave"):
        fails_at(monkeypatch, at.lanes, name, set(range(100)), RuntimeError("the device is gone"))
    at.batch.close()
    assert [job.finish_reason for job in jobs] == ["cancelled"] * 4 and not any(job.open for job in jobs)
    assert [chunks_of(job) for job in jobs] == [[]] * 4


@pytest.mark.parametrize("overlaps", [False, True])
def test_frames_that_the_host_takes_long_to_hand_over_are_with_their_listeners_in_time(monkeypatch, overlaps):
    """Ticks take no time, frames are given for 40 ms behind each, and begin to be made 20 ms before they are wanted."""
    ticks = replace(SETTINGS, few_lanes=0, idle_lanes=0, lead_s=0.02, fill_lead_s=0.02, chunks=(1,))
    at = Desk(monkeypatch, overlaps=overlaps, settings=ticks)
    handed_s, add_frame = {}, Utterance.add_frame

    def slowly(stream, *frame):
        at.now_s += 5e-3
        handed_s.setdefault(stream, []).append(at.now_s)
        add_frame(stream, *frame)
        chunks_of(stream)

    monkeypatch.setattr(Utterance, "add_frame", slowly)
    for seed in range(8):
        at.say(frames=40, options=replace(ONE, buffer_frames=100), seed=seed)
    at.run()
    for times_s in handed_s.values():
        assert len(times_s) == 40 and max(np.subtract(times_s, FRAME_S * np.arange(40))[2:]) < 0  # the first ended at 0
