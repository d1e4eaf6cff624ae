"""Many streams in slots: who comes in, who waits for what, what each is given. On fake lanes, without a clock."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from desk import Desk, alone, chunks_of, frames_of
from fakes import OFF, ONE, FakeBackend, FakeCodec

from mktts.batch.admission import HELD_S, AdmissionSettings
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import TickModel
from mktts.errors import CapacityError
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

HELD = replace(ONE, buffer_frames=2)  # a stream that waits for its reader after two frames
FULL = {"slots": 1}
SHORT = {"slots": 4, "pages": 3, "rows_per_slot": 128}  # two pages


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def desk(request, monkeypatch):
    """Makes desks whose lanes run a tick at its launch, or beside the host."""
    return partial(Desk, monkeypatch, overlaps=request.param)


# ---- who comes in


def test_a_stream_that_could_never_have_its_pages_is_refused_at_once(desk):
    at = desk(rows_per_slot=64)
    job = at.say("x" * 64)
    at.turn()
    with pytest.raises(CapacityError, match="65 positions.*one may have 64: shorten the text"):
        job.take()
    assert at.all_free()


@pytest.mark.parametrize(
    ("of_the_desk", "frames", "reason"),
    [
        (FULL, 50, "slots"),
        (SHORT, 122, "pages"),
        ({"model": TickModel(0.03, 0.02, 0.0, 0.0)}, 50, "listeners"),
    ],
    ids=["slots", "pages", "listeners"],
)
def test_who_finds_no_place_waits_in_line_and_comes_in_when_there_is_one(desk, of_the_desk, frames, reason):
    at = desk(**of_the_desk)
    first = at.say(seed=1, frames=frames, options=HELD)
    at.run(until_s=0.1)
    second = at.say(seed=2, frames=frames, options=HELD)
    at.run(until_s=0.2)
    door = at.together._door
    assert at.together._in_line == {second} and door.obstacle(door._first(paced=True), at.lanes.model) == reason
    assert len(first.codes) == 2
    first.cancel()
    at.run(until_s=0.3)
    assert at.together._in_line == set() and len(chunks_of(second)) == 2
    second.cancel()
    at.run()
    assert at.all_free()


def test_a_line_that_is_long_enough_is_closed(desk):
    at = desk(slots=1, admission=AdmissionSettings(max_line=2))
    first, *others = [at.say(seed=seed, frames=50, options=HELD) for seed in range(4)]
    at.turn()
    with pytest.raises(CapacityError, match="too many streams wait for a place"):
        others[2].take()
    assert at.together._in_line == set(others[:2])


def test_who_has_waited_too_long_is_told_without_any_news(desk):
    at = desk(slots=1, admission=AdmissionSettings(max_wait_s=0.25))
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


def test_a_stream_that_nobody_listens_to_is_patient_and_costs_no_turns(desk):
    at = desk(slots=1)
    first = at.say(frames=50, options=HELD)
    patient = [at.say(seed=seed, frames=3, paced=False) for seed in (2, 3)]
    at.run(until_s=HELD_S - 1.0)
    turns = at.turns
    at.now_s += 0.5
    assert at.turn() == pytest.approx(HELD_S, abs=0.1) and turns < 100
    first.cancel()
    at.run()
    assert [sum(chunk.frames for chunk in chunks_of(job)) for job in patient] == [3, 3]
    assert at.all_free()


def test_who_gives_up_in_line_leaves_it_and_holds_up_nobody(desk):
    at = desk(slots=4, pages=5, rows_per_slot=256)  # four pages
    small = partial(at.say, frames=58, options=HELD)  # one page
    first = small(seed=1)
    at.run(until_s=0.01)
    large = at.say(seed=2, frames=250)  # all four
    behind = small(seed=3)
    at.run(until_s=0.02)
    assert at.together._in_line == {large, behind}
    large.cancel()
    at.run()
    assert large.finish_reason == "cancelled" and len(chunks_of(behind)) == 2
    assert at.together._in_line == set()
    first.cancel(), behind.cancel()
    at.run()
    assert at.all_free()


def test_who_is_cancelled_before_its_text_came_is_forgotten(desk):
    at = desk()
    job, _ = at.listen()
    at.run()
    assert at.together.open_jobs == 1 and not at.lanes.ticks
    job.cancel()
    at.run()
    assert at.all_free() and not at.lanes.ticks


# ---- what each is given


@pytest.mark.parametrize("eos_after", [0, 1, 2, 3, 7])
def test_segments_of_many_streams_are_what_each_is_alone(desk, eos_after):
    at = desk(FakeBackend(eos_after=eos_after), slots=3)
    texts = [("One.", "Two.", "Three."), ("Four.",), ("Five.", "Six."), ("Seven.",), ("Eight.", "Nine.")]
    jobs = [at.say(*text, seed=seed, paced=False) for seed, text in enumerate(texts)]
    at.run()
    for seed, (text, job) in enumerate(zip(texts, jobs, strict=True)):
        assert frames_of(job) == alone(text, seed, eos_after)
        assert sum(chunk.frames for chunk in chunks_of(job)) == eos_after * len(text)
        assert job.finish_reason == "eos"
    assert at.all_free()
    assert (at.lanes.wasted > 0) == at.lanes.overlaps  # a lane was launched before the end was known


def test_a_stream_goes_on_over_a_join_without_a_jump(desk):
    at = desk(FakeBackend(eos_after=5))
    job = at.say("One.", "Two.", "Three.", options=ONE)
    at.run()
    pcm = np.concatenate([chunk.pcm for chunk in chunks_of(job)])
    assert len(pcm) == 15 * SAMPLES_PER_FRAME
    steps = np.abs(np.diff(pcm))
    assert steps.max() <= 1.0 / SAMPLES_PER_FRAME  # the fake codec slides from level to level


def test_a_reference_is_heard_before_the_first_frame(desk):
    codes = torch.full((3, NUM_CODEBOOKS), 5)
    at = desk(codec=FakeCodec())
    job, plain = at.say(frames=1, reference=codes), at.say(frames=1)
    at.run()
    (heard,), (not_heard,) = chunks_of(job), chunks_of(plain)
    assert len(heard.pcm) == len(not_heard.pcm) == SAMPLES_PER_FRAME
    assert heard.pcm[0] != not_heard.pcm[0] and heard.pcm[-1] == not_heard.pcm[-1]


def test_max_frames_is_never_passed_and_wastes_no_lane(desk):
    at = desk()
    jobs = [at.say(seed=seed, frames=seed) for seed in range(1, 8)]
    at.run()
    assert [len(job.codes) for job in jobs] == list(range(1, 8))
    assert {job.finish_reason for job in jobs} == {"max_frames"} and at.lanes.wasted == 0
    assert at.backend.entered == sum(range(1, 8))


# ---- who waits for what


def test_a_stream_between_two_segments_waits_for_pages_and_goes_on(desk):
    at = desk(FakeBackend(eos_after=20), **SHORT)
    long = at.say("a" * 60, "b" * 100, options=ONE, frames=40)  # two pages, then two again
    at.run(turns=60, until_s=1e-3)
    newcomer = at.say("c" * 60, seed=2, frames=4)
    at.run()
    assert long.finish_reason == "max_frames" and frames_of(long) == alone(("a" * 60, "b" * 100), 1, 20)[:40]
    assert newcomer.finish_reason == "max_frames"
    assert at.all_free()


def test_while_it_waits_for_pages_its_listener_gets_what_there_is_and_newcomers_stand_behind(desk):
    at = desk(FakeBackend(eos_after=5), slots=4, pages=5, rows_per_slot=256)  # four pages
    eight = replace(OFF, schedule=(8,), buffer_frames=8)
    other = at.say(seed=2, frames=122, options=HELD)  # two pages
    long = at.say("a" * 10, "b" * 150, frames=30, options=eight)  # one page, then three
    at.run(until_s=1.0)
    assert sum(chunk.frames for chunk in chunks_of(long)) == 5 and long.open
    assert at.together._door.reserved_pages == 3 and at.pages.free == 2
    small = at.say(seed=3, frames=20)  # one page would do
    at.turn()
    assert at.together._in_line == {small}
    other.cancel()
    at.run()
    assert len(long.codes) == 10 and long.finish_reason == "eos"
    assert small.finish_reason == "eos" and at.all_free()


def test_late_text_costs_no_lane_while_it_is_waited_for(desk):
    at = desk(FakeBackend(eos_after=20))
    job, script = at.listen(options=replace(OFF, schedule=(4,)))
    script.feed("abcdef")  # a token a character: the first is in the prompt, five frames follow
    at.run()
    assert len(job.codes) == 6 and at.backend.entered == 6
    assert [chunk.frames for chunk in chunks_of(job)] == [4, 2]  # the last one early
    assert [at.turn() for _ in range(5)] == [math.inf] * 5 and at.backend.entered == 6
    script.feed("gh")
    at.run()
    assert len(job.codes) == 8 and at.backend.entered == 8
    script.finish()
    at.run()
    assert (len(job.codes), job.finish_reason) == (20, "eos") and at.all_free()


def test_a_thousand_streams_that_wait_for_text_are_not_looked_at(desk, monkeypatch):
    """Half of them spoke what they had, the other half has no whole word yet."""
    at = desk(slots=600, pages=2_000)
    fed = [at.listen(seed=seed, options=ONE, frames=30) for seed in range(1_000)]
    for _, script in fed[:500]:
        script.feed("ab")
    at.run()
    assert [len(job.codes) for job, _ in fed] == [2] * 500 + [0] * 500
    assert (len(at.together._asleep), len(at.together._outside)) == (500, 500)
    looked: list[str] = []
    for job, _ in fed:
        for name in ("input_known", "next_segment", "ready"):
            monkeypatch.setattr(job.work, name, partial(looked.append, name))
    monkeypatch.setattr(type(fed[0][0]), "full", lambda job, pending: looked.append("full"))
    speaker = at.say(seed=7, frames=50, options=OFF)
    monkeypatch.setattr(speaker, "full", lambda pending: False, raising=False)
    at.run()
    assert len(speaker.codes) == 50 and looked == []
    monkeypatch.undo()


def test_a_stream_that_waited_is_looked_at_when_its_text_comes_and_alone(desk):
    at = desk(slots=20)
    fed = [at.listen(seed=seed, options=ONE) for seed in range(10)]
    for _, script in fed[:5]:
        script.feed("ab")
    at.run()
    for job, script in (fed[2], fed[7]):
        before = len(job.codes)
        script.feed("cd")
        at.run()
        assert len(job.codes) == before + 2
    assert [len(job.codes) for job, _ in fed] == [2, 2, 4, 2, 2, 0, 0, 2, 0, 0]
    for job, _ in fed:
        job.cancel()
    at.run()
    assert at.all_free()


def test_text_after_the_end_of_speech_is_a_new_segment(desk):
    at = desk(FakeBackend(eos_after=3))
    job, script = at.listen()
    script.feed("Hello there")
    at.run()
    assert (len(job.codes), job.finish_reason) == (3, None) and at.pages.free == len(at.pages._users) - 1
    script.feed(" you")
    script.finish()
    at.run()
    assert (len(job.codes), job.finish_reason) == (6, "eos") and at.all_free()


@pytest.mark.parametrize(("schedule", "buffer"), [((1,), 1), ((1,), 5), ((1, 1, 2, 4, 8), 8), ((3,), 7)])
def test_a_slow_reader_costs_no_lanes(desk, schedule, buffer):
    at = desk()
    slow = at.say(seed=1, options=replace(OFF, schedule=schedule, buffer_frames=buffer), frames=400)
    at.run()
    made = len(slow.codes)
    assert 0 < made <= buffer
    quick = at.say(seed=2, frames=100)
    at.run()
    assert len(quick.codes) == 100 and len(slow.codes) == made
    taken = 0
    while not slow.over:
        while not slow._chunks.empty():
            chunk = slow.take()
            taken += 0 if chunk is None else chunk.frames
            if chunk is not None and slow.open:
                assert not at.inbox.empty(), "what the reader takes must wake the worker"
        at.run()
        assert len(slow.codes) - taken <= buffer
    assert taken + sum(chunk.frames for chunk in chunks_of(slow)) == 400


def test_a_reader_that_was_slow_once_does_not_wake_the_worker_for_ever(desk):
    at = desk()
    job = at.say(frames=400, options=replace(ONE, buffer_frames=20))
    at.run()
    for _ in range(15):
        job.take()
    at.turn()  # it is full no more
    assert not job.watched


def test_streams_that_are_ahead_wait_for_their_readers_and_are_woken_by_them(desk):
    """Ticks that hold everybody back who is ahead: the worker sleeps, and what is taken wakes it."""
    settings = TickSettings(max_lanes=8, max_rows=64, min_rows=8, few_lanes=1, idle_lanes=0)
    at = desk(settings=settings)
    jobs = [at.say(seed=seed, frames=60, options=ONE) for seed in (1, 2)]
    taken = [0, 0]
    for _ in range(1_000):
        at.run()
        for i, job in enumerate(jobs):
            if job.open:
                assert not job._chunks.empty()
            taken[i] += len(chunks_of(job))
        if all(job.over for job in jobs):
            break
        assert not at.inbox.empty(), "nobody would wake the worker"
    assert taken == [60, 60]


# ---- kept prefixes


@pytest.mark.parametrize("rows", [64, 100, 128])
def test_a_prefix_is_kept_once_and_later_streams_begin_behind_it(desk, rows, monkeypatch):
    prefix = "p" * rows
    at = desk(FakeBackend(eos_after=4), prefix=prefix)
    kept = []
    keep = at.pages.keep
    monkeypatch.setattr(at.pages, "keep", lambda *what: kept.append(what) or keep(*what))
    texts = ["One.", "Two two.", "Three."]
    for seed, text in enumerate(texts):
        job = at.say(text, seed=seed)
        before = len(at.lanes.ticks)
        at.run()
        assert frames_of(job) == alone([text], seed, 4, prefix=prefix)
        entered = sum(tick.rows for tick in at.lanes.ticks[before:])
        assert entered == len(text) + (rows if seed == 0 else 0)
    assert [key for _, key, _ in kept] == [prefix]
    assert at.pages.find(prefix) == rows and at.all_free()


def test_streams_that_share_a_prefix_speak_side_by_side(desk):
    prefix = "q" * 90
    at = desk(FakeBackend(eos_after=6), prefix=prefix)
    first = at.say("First.", seed=9)
    at.run()
    texts = [("A.", "And B."), ("C, I think.",), ("D.",)]
    jobs = [at.say(*text, seed=seed) for seed, text in enumerate(texts)]
    at.run()
    for seed, (text, job) in enumerate(zip(texts, jobs, strict=True)):
        assert frames_of(job) == alone(text, seed, 6, prefix=prefix)
    assert frames_of(first) == alone(["First."], 9, 6, prefix=prefix)


def test_a_short_prefix_is_not_kept(desk):
    at = desk(FakeBackend(eos_after=2), prefix="p" * 63)
    at.say(), at.run()
    assert at.pages.kept == 0
