"""How many listeners a synthesizer says that it carries, and what becomes of one more."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import fake_synthesizer
from served import until

from mktts.batch.tick import TickModel
from mktts.errors import BusyError, OptionsError
from mktts.speech.executor import TICK_BOUNDS_S, TickTimes, Wishes
from mktts.speech.job import Job
from mktts.synth import one_by_one
from mktts.synth.one_by_one import OneByOne


class Work:
    """An utterance whose frames take a time that is known."""

    def __init__(self, clock: Any, frame_s: float) -> None:
        self.codes: list[int] = []
        self.finish_reason, self.cancelled, self.pending_frames = None, False, 0
        self._clock, self._frame_s = clock, frame_s

    def ready(self) -> bool:
        return True

    def step(self) -> None:
        self._clock.now_s += self._frame_s
        self.codes.append(0)

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(one_by_one, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def opened(executor: OneByOne, clock: Any, frame_s: float, paced: bool = True) -> Job:
    job = Job(10_000, SimpleQueue(), paced=paced)
    job.begin(Work(clock, frame_s), "single")
    executor.take(job)
    executor.turn(clock.now_s, False)
    return job


def test_one_stream_a_step_carries_as_many_as_its_frames_have_time_for(clock):
    executor = OneByOne()
    executor.admit(Wishes(max_waiting=0))
    first = opened(executor, clock, 0.01)
    for _ in range(600):
        executor.turn(clock.now_s, True)
    # By hand: 80 ms a frame of every listener, less a tenth, in frames of 10 ms and 0.3 ms between two.
    assert executor.carries == int(0.9 * 80 / 10.3) == 6
    jobs = [first, *(opened(executor, clock, 0.01) for _ in range(9))]
    assert [type(job.error) for job in jobs] == [type(None)] * 6 + [BusyError] * 4
    assert jobs[-1].error.carries == 6 and "about 6 can be carried" in str(jobs[-1].error)
    assert executor.listeners == 6 and executor.standing.lanes_used == 6


def test_nobody_is_refused_before_a_server_asks_for_it(clock):
    executor = OneByOne()
    jobs = [opened(executor, clock, 0.05) for _ in range(50)]
    assert all(job.open and job.error is None for job in jobs)


def test_who_waits_comes_in_when_somebody_leaves_and_is_refused_in_time(clock):
    executor = OneByOne()
    executor.admit(Wishes(max_listeners=1, max_waiting=2, max_wait_s=1.0))
    first, second, third = (opened(executor, clock, 0.001) for _ in range(3))
    assert executor.standing.waiting == 2 and second.open and third.open
    first.cancel()
    executor.turn(clock.now_s, False)
    executor.turn(clock.now_s, False)
    assert executor.standing.waiting == 1 and second.codes
    clock.now_s += 1.5
    executor.turn(clock.now_s, False)
    assert isinstance(third.error, BusyError) and "no place came free in time" in str(third.error)
    assert executor.open_jobs == 1


@pytest.mark.parametrize("engine", ["single", "batch"])
def test_a_synthesizer_refuses_by_name_what_a_server_may_not_have(engine):
    with fake_synthesizer(engine=engine) as synthesizer:
        synthesizer.admit(Wishes(max_listeners=1, max_waiting=0))
        until(lambda: synthesizer.carries == 1, "the engine to have heard")
        assert set(synthesizer.standing) == {engine}
        with synthesizer.stream("One two three.", max_frames=100_000) as first:
            next(first)
            with pytest.raises(BusyError) as refused:
                synthesizer.stream("Four.", max_frames=2).read()
            assert refused.value.carries == 1
            assert len(synthesizer.say("Five.", max_frames=2))  # nobody listens to it
        until(lambda: not synthesizer.standing[engine].listeners, "the first to have left")
        assert len(synthesizer.stream("Six.", max_frames=2).read())


def test_ticks_are_counted_by_how_long_they_took():
    times = TickTimes()
    for took_s in (0.0005, TICK_BOUNDS_S[0], 0.0011, 9.0):
        times.add(took_s)
    assert times.counts[:2] == [2, 1] and times.counts[-1] == 1 and sum(times.counts) == 4
    assert times.sum_s == pytest.approx(0.0026 + 9.0)


@pytest.mark.parametrize("wrong", [{"max_listeners": 0}, {"max_waiting": -1}, {"max_wait_s": -0.1}])
def test_impossible_wishes_are_refused(wrong):
    with pytest.raises(OptionsError):
        Wishes(**wrong)


def test_the_model_of_a_tick_needs_a_part():
    assert OneByOne().carries >= 1 and isinstance(OneByOne()._model, TickModel)
