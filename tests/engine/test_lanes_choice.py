"""Which engine serves a stream, what each then does beside the other, and how many each carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import OFF, ONE, FakeBackend, fake_synthesizer, settle, speak
from served import until

from mktts.engine.executor import TICK_BOUNDS_S, TickTimes, Wishes
from mktts.engine.job import Job
from mktts.engine.loading import OPEN_SINGLY, SINGLE_STREAMS, Loading, Models
from mktts.engine.one_by_one import MAX_FRAMES_AHEAD, OneByOne
from mktts.errors import BackendUnavailable, BusyError, CheckpointError, OptionsError, SamplingError
from mktts.model.sampling import Sampling
from mktts.synthesizer import BatchSettings, Synthesizer, one_by_one

SINGLE, BATCH = SimpleNamespace(), SimpleNamespace(lanes=SimpleNamespace(slots=7))
TOGETHER = SimpleNamespace(model=BATCH)
TORCH = Sampling(rng="torch")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
DTYPE = r"dtype must be one of torch.bfloat16, torch.float32"


@pytest.mark.parametrize(
    ("models", "due", "singly", "sampling", "picked"),
    [
        (Models(SINGLE, TOGETHER), 0, 0, Sampling(), (SINGLE, "single")),
        (Models(SINGLE, TOGETHER), 1, 1, Sampling(), (SINGLE, "single")),
        (Models(SINGLE, TOGETHER), 2, 2, Sampling(), (BATCH, "batch")),
        (Models(SINGLE, TOGETHER), 1_000, 2, Sampling(), (BATCH, "batch")),
        (Models(SINGLE, TOGETHER), 1, 7, Sampling(), (SINGLE, "single")),  # six of those rest
        (Models(SINGLE, TOGETHER), 0, 8, Sampling(), (BATCH, "batch")),  # all of them may go on at once
        (Models(SINGLE, TOGETHER), 1_000, 9, TORCH, (SINGLE, "single")),
        (Models(SINGLE, None), 1_000, 1_000, Sampling(), (SINGLE, "single")),
        (Models(None, TOGETHER), 0, 0, Sampling(), (BATCH, "batch")),
    ],
)
def test_who_serves_a_stream(models, due, singly, sampling, picked):
    assert models.pick(due, singly, sampling) == picked


def test_draws_by_torch_need_the_single_engine_and_are_refused_at_the_call():
    with fake_synthesizer(engine="batch") as synth:
        for use in (synth.stream, lambda text, **settings: synth.open(**settings), synth.say):
            with pytest.raises(SamplingError, match="take backend='torch', engine='single'"):
                use("Hello.", sampling=TORCH)


def test_two_streams_are_made_singly_the_third_together_and_all_are_as_alone():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend, engine="auto") as synth:
        streams = [speak(synth, seed) for seed in range(4)]
        assert [stream.engine for stream in streams] == ["single", "single", "batch", "batch"]
        session = synth.open(options=ONE, seed=8, max_frames=3)
        assert session.engine is None
        drawn_by_torch = synth.stream("Hello.", seed=9, max_frames=2, options=ONE, sampling=TORCH)
        session.feed("abc")
        assert (session.engine, drawn_by_torch.engine) == ("batch", "single")
        backend.release()
        codes = [stream.read() is not None and stream.codes for stream in streams]
        assert len(session.read()) and len(drawn_by_torch.read())
        settle(synth)
        alone = speak(synth, 3)
        assert alone.engine == "single" and alone.read() is not None and torch.equal(alone.codes, codes[3])


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"engine": "many"}, OptionsError, "engine must be one of auto, single, batch, got 'many'"),
        ({"engine": "single", "deterministic": True}, OptionsError, "leave engine='single' out"),
        ({"engine": "batch", "backend": "megakernel"}, BackendUnavailable, "does not run on backend 'megakernel'"),
        ({"engine": "batch", "backend": "upstream"}, BackendUnavailable, "does not run on backend 'upstream'"),
        ({"deterministic": True, "backend": "megakernel"}, BackendUnavailable, "deterministic=True"),
        ({"deterministic": True, "backend": "upstream"}, BackendUnavailable, "deterministic=True"),
        ({"batch": {"max_streams": 3}}, OptionsError, "must be BatchSettings or None, got dict"),
        ({"backend": "megakernel"}, BackendUnavailable, "needs a CUDA device"),
        ({"backend": "banana"}, BackendUnavailable, "banana"),
        ({"device": "tpu"}, BackendUnavailable, "tpu"),
        ({"device": "meta"}, BackendUnavailable, "meta"),
        pytest.param({"device": "cuda"}, BackendUnavailable, "no CUDA device", marks=NO_CUDA),
        ({"dtype": "bfloat16"}, BackendUnavailable, DTYPE),
        ({"dtype": torch.float16}, BackendUnavailable, DTYPE),
        ({"checkpoint": "no/such/folder"}, CheckpointError, "no/such/folder"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_refused_by_name(tiny, settings, error, said):
    with pytest.raises(error, match=said):
        Synthesizer.load(**{"checkpoint": tiny, "device": "cpu", **settings})


@pytest.mark.parametrize(
    ("settings", "single", "together"),
    [
        ({}, True, True),
        ({"backend": "torch"}, True, False),
        ({"backend": "megakernel"}, True, False),
        ({"engine": "single"}, True, False),
        ({"engine": "batch"}, False, True),
        ({"deterministic": True}, False, True),
        ({"deterministic": True, "backend": "torch"}, False, True),
        ({"deterministic": False}, True, True),
    ],
    ids=str,
)
def test_what_is_loaded_for_what_is_asked(settings, single, together):
    asked = {"backend": "auto", "engine": "auto", "deterministic": None, **settings}
    wanted = Loading.checked(device="cpu", dtype=None, cpu_threads=None, batch=None, **asked)
    assert (wanted.single, wanted.together) == (single, together)


def test_the_batch_may_be_limited(tiny):
    limits = BatchSettings(max_streams=2, positions=256)
    with Synthesizer.load(tiny, device="cpu", engine="batch", batch=limits) as synth:
        assert synth._models.room == 2
        assert len(list(synth.say_many(["One.", "Two.", "Three."], max_frames=2, seed=1))) == 3


SLOW = replace(ONE, buffer_frames=2)


@pytest.fixture
def synth() -> Iterator[Synthesizer]:
    with fake_synthesizer(engine="auto") as made:
        yield made


def test_resting_streams_pile_up_on_the_single_engine_only_so_far(synth):
    streams = []
    for seed in range(OPEN_SINGLY + 3):
        streams.append(speak(synth, seed, frames=None, options=SLOW))
        while synth._engine.due_streams:
            pass  # until its buffer is full
    assert [stream.engine for stream in streams] == ["single"] * OPEN_SINGLY + ["batch"] * 3


def test_a_stream_that_goes_on_counts_again_and_stays_where_it_began():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend, engine="auto") as synth:
        sessions = [synth.open(seed=seed, options=ONE) for seed in range(4)]
        for session in sessions:
            session.feed("abcdef")
        wanted = ["single"] * SINGLE_STREAMS + ["batch"] * 2
        assert [session.engine for session in sessions] == wanted
        backend.release()
        for session in sessions:
            assert [next(session).frames for _ in range(6)] == [1] * 6
        settle(synth)
        assert synth._engine.due_streams == 0
        backend.hold()
        begun = backend.entered
        for session in sessions:
            session.feed("ghi")
        backend.wait_entered(begun + 1)
        backend.let(1)  # the worker may have gone on before it heard of all four
        backend.wait_entered(begun + 2)
        assert synth._engine.due_streams == 4 and speak(synth, seed=9).engine == "batch"
        assert [session.engine for session in sessions] == wanted
        backend.release()
        for session in sessions:
            assert [next(session).frames for _ in range(3)] == [1] * 3
            session.cancel()


@pytest.mark.parametrize("beside", [False, True])
def test_while_a_batched_stream_is_open_though_it_rests_a_launch_of_the_megakernel_makes_one_frame(synth, beside):
    single, batch = synth._models.each()
    resting = synth._stream("Hello.", {"seed": 2, "options": SLOW}, True, batch) if beside else None
    settle(synth)
    launched, frames = [1], single[0].backend.frames
    single[0].backend.frames = lambda state, rows: launched.append(len(rows)) or frames(state, rows)
    stream = synth._stream("Hello.", {"seed": 3, "max_frames": 40, "options": OFF}, True, single)
    assert sum(chunk.frames for chunk in stream) == 40
    assert max(launched) == (1 if beside else MAX_FRAMES_AHEAD)
    assert resting is None or resting.idle


# ---- admission to the single engine, on a clock of the test


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(one_by_one, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def opened(executor: OneByOne, clock: Any, frame_s: float) -> Job:
    """A stream whose frames take a time that is known."""
    work = SimpleNamespace(codes=[], finish_reason=None, cancelled=False, pending_frames=0)

    def step() -> None:
        clock.now_s += frame_s
        work.codes.append(0)

    work.ready, work.step, work.close = lambda: True, step, lambda: None
    job = Job(10_000, SimpleQueue())
    job.begin(work, "single")
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
