"""What fails in one stream, in one tick, or in the executor itself: who ends, who goes on, what is given back."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from desk import Desk, alone, chunks_of, frames_of
from fakes import OFF, ONE, FakeBackend, FakeCodec

from mktts.batch.admission import AdmissionSettings
from mktts.batch.scheduler import TickSettings
from mktts.errors import EngineError, PromptError

PIECES = TickSettings(max_lanes=8, max_rows=16, min_rows=16, few_lanes=8, idle_lanes=8)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def desk(request, monkeypatch):
    """Makes desks whose lanes run a tick at its launch, or beside the host."""
    return partial(Desk, monkeypatch, overlaps=request.param)


def fails_at(monkeypatch, of: object, name: str, calls: set[int], error: Exception) -> None:
    """The calls of those numbers raise instead."""
    original, count = getattr(of, name), iter(range(10**9))

    def call(*args, **kwargs):
        if next(count) in calls:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(of, name, call)


def served(at: Desk, seed: int = 77) -> None:
    """The next stream is served, and everything is free after it."""
    job = at.say("Next.", seed=seed, frames=4)
    at.run()
    assert frames_of(job) == alone(["Next."], seed, None if at.backend.eos_after is None else at.backend.eos_after)[:4]
    assert at.all_free()


# ---- one stream


@pytest.mark.parametrize("name", ["enter", "begin"])
def test_a_stream_that_the_lanes_refuse_ends_alone(desk, monkeypatch, name):
    at = desk()
    good = at.say(seed=1, frames=9)
    at.turn()
    fails_at(monkeypatch, at.lanes, name, {0}, PromptError("the voice is damaged"))
    bad = at.say(seed=2, frames=9)
    at.run()
    with pytest.raises(PromptError, match="damaged"):
        bad.take()
    assert len(good.codes) == 9 and good.error is None
    served(at)


def test_a_second_segment_that_the_lanes_refuse_ends_its_stream_alone(desk, monkeypatch):
    at = desk(FakeBackend(eos_after=3))
    bad, good = at.say("One.", "Two.", seed=1), at.say("Three.", "Four.", seed=20)
    fails_at(monkeypatch, at.lanes, "begin", {2}, PromptError("the voice is damaged"))
    at.run()
    ended = [job for job in (bad, good) if job.error is not None]
    assert len(ended) == 1 and len(bad.codes) + len(good.codes) == 9
    with pytest.raises(PromptError):
        chunks_of(ended[0])
    served(at)


def test_a_lane_that_gave_no_number_ends_its_stream_alone(desk):
    at = desk()
    good, bad = at.say(seed=1, frames=12), at.say(seed=2, frames=12)
    for _ in range(6):
        at.now_s = max(at.now_s, at.turn())
    slot = next(slot for slot, job in at.together._jobs.items() if job is bad)
    at.lanes.spoil = lambda lane: lane == slot and bad.open
    at.run()
    assert 0 < len(bad.codes) < 12 and len(good.codes) == 12
    with pytest.raises(EngineError, match="gave no number"):
        chunks_of(bad)
    assert frames_of(good) == alone(["Hello."], 1, None)[:12] and good.error is None
    served(at)


def test_codes_of_an_ended_lane_mean_nothing(desk, monkeypatch):
    at = desk(FakeBackend(eos_after=3))
    collect = at.lanes.collect

    def spoilt(launched):
        made = collect(launched)
        made.codes[made.ended] = -1
        return made

    monkeypatch.setattr(at.lanes, "collect", spoilt)
    job = at.say("One.", "Two.")
    at.run()
    assert (len(job.codes), job.finish_reason) == (6, "eos")


def test_a_text_that_raises_ends_its_stream_alone(desk):
    at = desk()
    good = at.say(seed=1, frames=30)
    waiting, script = at.listen(seed=2)
    at.turn()
    for job, its_script in ((waiting, script), at.listen(seed=3)):
        its_script.script.update = lambda: 1 / 0
        its_script.feed("a")
        at.run()
        with pytest.raises(ZeroDivisionError):
            job.take()
    assert len(good.codes) == 30
    served(at)


def test_a_prompt_that_cannot_be_measured_ends_its_stream_alone(desk, monkeypatch):
    at = desk()
    good, bad = at.say(seed=1, frames=5), at.say(seed=2, frames=5)
    fails_at(monkeypatch, at.together, "_request", {1}, ValueError("no rows"))
    at.run()
    with pytest.raises(ValueError, match="no rows"):
        bad.take()
    assert len(good.codes) == 5
    served(at)


def test_an_event_loop_that_raises_when_it_is_woken_harms_nobody(desk):
    class Broken:
        def call_soon_threadsafe(self, *_):
            raise OSError("no descriptor")

    at = desk()
    job = at.say(frames=5, options=ONE)
    job._waiter = (Broken(), None)
    at.run()
    assert len(job.codes) == 5 and at.all_free()


# ---- one tick


@pytest.mark.parametrize("name", ["launch", "collect"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_failed_tick_ends_its_streams_and_the_next_are_served(desk, monkeypatch, name, call):
    at = desk()
    jobs = [at.say(seed=seed, frames=9) for seed in range(3)]
    fails_at(monkeypatch, at.lanes, name, {call}, RuntimeError("an illegal address"))
    forget_launched(at, monkeypatch) if name == "collect" else None
    at.run()
    for job in jobs:
        with pytest.raises(EngineError, match="the tick that made this stream failed: RuntimeError: an illegal"):
            chunks_of(job)
    served(at)


def forget_launched(at: Desk, monkeypatch) -> None:
    """A tick that could not be collected is collected all the same, as far as the fake lanes are concerned."""
    collect = at.lanes.collect

    def call(launched):
        try:
            return collect(launched)
        except RuntimeError:
            if launched in at.lanes._launched:
                at.lanes._launched.remove(launched)
                at.lanes._work_off(launched)
            raise

    monkeypatch.setattr(at.lanes, "collect", call)


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_failed_tick_of_prompt_rows_alone_ends_their_stream(desk, monkeypatch, name):
    """Else the rows would be taken for entered, or be tried for ever."""
    at = desk(settings=PIECES)
    job = at.say("x" * 40, frames=5)  # three pieces
    fails_at(monkeypatch, at.lanes, name, {1}, RuntimeError("an illegal address"))
    forget_launched(at, monkeypatch) if name == "collect" else None
    at.run(turns=1_000)
    with pytest.raises(EngineError, match="illegal address"):
        job.take()
    served(at)


def test_streams_that_are_not_in_the_failed_tick_go_on(desk, monkeypatch):
    at = desk()
    waiting, script = at.listen(seed=5)
    script.feed("abc")
    at.run()
    assert len(waiting.codes) == 3
    fails_at(monkeypatch, at.lanes, "launch", {0}, RuntimeError("an illegal address"))
    job = at.say(seed=6, frames=5)
    at.run()
    with pytest.raises(EngineError):
        job.take()
    script.feed("de")
    at.run()
    assert len(waiting.codes) == 5 and waiting.error is None
    waiting.cancel()
    at.run()
    served(at)


def test_a_stream_that_had_ended_keeps_its_end_when_its_wasted_lane_fails(monkeypatch):
    at = Desk(monkeypatch, FakeBackend(eos_after=3), overlaps=True)
    job = at.say()
    fails_at(monkeypatch, at.lanes, "collect", {4}, RuntimeError("an illegal address"))  # one behind the end
    forget_launched(at, monkeypatch)
    at.run()
    assert sum(chunk.frames for chunk in chunks_of(job)) == 3
    assert (job.error, job.finish_reason) == (None, "eos")


def test_a_prefix_that_a_failed_tick_should_have_filled_is_not_kept(desk, monkeypatch):
    at = desk(prefix="p" * 100)
    fails_at(monkeypatch, at.lanes, "collect", {0}, RuntimeError("an illegal address"))
    forget_launched(at, monkeypatch)
    job = at.say()
    at.run()
    with pytest.raises(EngineError):
        job.take()
    assert at.pages.kept == 0 and at.all_free()
    good = at.say("Next.", seed=3, frames=4)
    at.run()
    assert frames_of(good) == alone(["Next."], 3, None, prefix="p" * 100)[:4]


# ---- the executor itself


@pytest.mark.parametrize("where", ["_look_round", "_give", "_admit", "_launch", "_read"])
def test_after_a_turn_that_raised_everything_is_free_and_the_next_stream_is_served(desk, monkeypatch, where):
    at = desk()
    jobs = [at.say(seed=seed, frames=20) for seed in range(4)]
    waiting, script = at.listen()
    at.turn()
    fails_at(monkeypatch, at.together, where, {1}, KeyError("a wrong book"))
    jobs.append(at.say(seed=8, frames=20))
    jobs.append(at.say(seed=9, frames=20))
    with pytest.raises(KeyError):
        at.run()
    at.together.abandon(KeyError("a wrong book"))
    for job in (*jobs, waiting):
        assert not job.open
        with pytest.raises((EngineError, KeyError), match="a wrong book"):
            chunks_of(job)
    served(at)


def test_slots_pages_and_codec_states_come_back_even_where_the_books_are_wrong(desk):
    at = desk()
    jobs = [at.say(seed=seed, frames=20) for seed in range(3)]
    at.turn()
    at.board.open[:] = False
    at.together.abandon(KeyError("a wrong book"))
    assert not any(job.open for job in jobs)
    served(at)


def test_close_ends_every_stream_though_the_device_is_gone(desk, monkeypatch):
    at = desk(slots=2)
    jobs = [at.say(seed=seed, options=replace(ONE, buffer_frames=3)) for seed in range(3)]
    jobs.append(at.listen()[0])
    at.turn()
    for name in ("collect", "leave"):
        fails_at(monkeypatch, at.lanes, name, set(range(100)), RuntimeError("the device is gone"))
    at.together.close()
    assert [job.finish_reason for job in jobs] == ["cancelled"] * 4 and not any(job.open for job in jobs)
    assert [chunks_of(job) for job in jobs] == [[]] * 4


# ---- all of it


@pytest.mark.parametrize("seed", range(4))
def test_everything_is_free_after_many_streams_that_end_in_every_way(desk, monkeypatch, seed):
    rng = random.Random(seed)
    prefix = "v" * rng.choice([0, 64, 90])
    at = desk(
        FakeBackend(eos_after=5),
        FakeCodec(),
        slots=6,
        pages=18,
        rows_per_slot=400,
        prefix=prefix,
        max_kept=4,
        admission=AdmissionSettings(max_wait_s=1e9),
        settings=rng.choice([PIECES, TickSettings.cpu(), TickSettings(few_lanes=2, max_lanes=4)]),
    )
    launch = at.lanes.launch
    failures = 0

    def sometimes(*what):
        nonlocal failures
        if rng.random() < 0.002:
            failures += 1
            raise RuntimeError("an illegal address")
        return launch(*what)

    monkeypatch.setattr(at.lanes, "launch", sometimes)
    at.lanes.spoil = lambda slot: rng.random() < 0.002
    texts = ["Hi.", "Where are you going?", "No.", "Over the hills, and far away."]
    options = [OFF, ONE, replace(ONE, buffer_frames=2), replace(OFF, schedule=(3,), buffer_frames=4)]
    streams: list[dict] = []
    open_now: list[dict] = []
    for number in range(300):
        style = {"options": rng.choice(options), "seed": number}
        if rng.random() < 0.3:
            job, script = at.listen(max_chars=25, **style)
            stream = {"job": job, "script": script, "left": list(rng.choice(texts)), **style}
        else:
            text = [rng.choice(texts) for _ in range(rng.randint(1, 3))]
            stream = {"job": at.say(*text, paced=rng.random() < 0.7, **style), "text": text, **style}
        streams.append(stream)
        open_now.append(stream)
        for _ in range(rng.randint(0, 12)):
            step(at, rng, open_now)
    while open_now:
        step(at, rng, open_now)
    at.run()
    assert at.all_free() and at.together._door.line == 0
    for stream in streams:
        job = stream["job"]
        if job.error is None and not job.cancelled:
            assert job.finish_reason == "eos"
            if "text" in stream:  # what fed text becomes after an end of speech depends on when it comes
                assert frames_of(job) == alone(stream["text"], stream["seed"], 5, prefix=prefix)
    good = sum(stream["job"].finish_reason == "eos" for stream in streams)
    assert good > 150 and sum(stream["job"].error is not None for stream in streams) >= failures > 0


def step(at: Desk, rng: random.Random, open_now: list[dict]) -> None:
    """One turn, and what readers and writers do meanwhile."""
    wake_s = at.turn()
    at.now_s = max(at.now_s, min(wake_s, at.now_s + 0.01)) + 1e-6
    for stream in open_now[:]:
        job = stream["job"]
        if stream.get("left") and rng.random() < 0.5:
            count = rng.randint(1, 6)
            piece = "".join(stream["left"][:count])
            del stream["left"][:count]
            stream["script"].feed(piece)
            if not stream["left"]:
                stream["script"].finish()
        if rng.random() < 0.005:
            job.cancel()
        try:
            if rng.random() < 0.5:
                chunks_of(job)
        except EngineError:
            assert not job.open
        if not job.open and (job.cancelled or job._chunks.qsize() <= 1):
            open_now.remove(stream)
