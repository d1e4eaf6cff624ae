"""Which engine serves a stream, what each then does beside the other, and how many each carries; then an engine in a
process of its own, against one in this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import OFF, ONE, FakeBackend, fake_synthesizer, settle, speak
from served import WAIT_S, until

from mktts.audio import to_pcm16
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import python_path
from mktts.engine import capacity
from mktts.engine.admission import AdmissionLimits
from mktts.engine.engine import SINGLE_STREAMS
from mktts.engine.lanes import MAX_FRAMES_AHEAD
from mktts.engine.options import Guard, StreamOptions
from mktts.engine.remote import Wire, sendable
from mktts.errors import BackendUnavailable, BusyError, CheckpointError, EngineError, OptionsError, SamplingError
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.synth.synthesizer import BatchSettings, Synthesizer

TORCH = Sampling(rng="torch")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
DTYPE = r"dtype must be one of torch.bfloat16, torch.float32"


@pytest.mark.parametrize(
    ("engine", "active", "singly", "sampling", "chosen"),
    [
        ("auto", 1, 1, Sampling(), "single"),
        ("auto", 2, 2, Sampling(), "batch"),
        ("auto", 1, 7, Sampling(), "single"),  # six of those are idle
        ("auto", 0, 8, Sampling(), "batch"),  # all of them may go on at once
        ("auto", 9, 9, TORCH, "single"),
        ("single", 1_000, 1_000, Sampling(), "single"),
        ("batch", 0, 0, Sampling(), "batch"),
    ],
)
def test_which_lanes_make_a_stream(monkeypatch, engine, active, singly, sampling, chosen):
    with fake_synthesizer(engine=engine) as synth:
        streams = [SimpleNamespace(open=True, idle=i >= active, engine="single") for i in range(singly)]
        with monkeypatch.context() as patch:
            patch.setattr(synth.engine, "_utterances", streams)
            assert synth.engine._choose(sampling).name == chosen


def test_draws_by_torch_need_the_single_engine_and_are_refused_at_the_call():
    with fake_synthesizer(engine="batch") as synth:
        for use in (synth.stream, lambda text, **settings: synth.open(**settings), synth.say):
            with pytest.raises(SamplingError, match="take backend='torch', engine='single'"):
                use("Hello.", sampling=TORCH)


def test_a_capacity_is_that_of_the_lanes_of_many_also_where_they_are_still_to_come(monkeypatch, tmp_path):
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path))
    with fake_synthesizer(engine="auto") as synth:
        engine = synth.engine
        batch = engine.runners.pop("batch")
        engine._later = lambda: batch
        assert synth.measure_capacity(only_kept=True).basis == "not measured" and engine._later
        assert synth.measure_capacity().basis == "of a test" and set(engine.runners) == {"single", "batch"}


TICK = '"tick_model_s": [1, 1, 1, 1], "basis": ""'
DAMAGED = [
    "3",
    '{"streams": 3}',
    f'{{"streams": NaN, {TICK}}}',
    f'{{"streams": "a", {TICK}}}',
    '{"streams": 3, "tick_model_s": [1, 1], "basis": ""}',
]


@pytest.mark.parametrize("kept", ["{", "[" * 10_000, *(f'{{"k": {found}}}' for found in DAMAGED)], ids=range(7))
def test_a_damaged_record_of_the_capacity_is_none(monkeypatch, tmp_path, kept):
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path))
    (tmp_path / "capacity.json").write_text(kept)
    assert capacity.kept("k", SimpleNamespace(name="batch")) is None


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"engine": "many"}, OptionsError, "engine must be one of auto, single, batch, got 'many'"),
        ({"engine": "single", "deterministic": True}, OptionsError, "leave engine='single' out"),
        ({"engine": "batch", "backend": "megakernel"}, BackendUnavailable, "does not run on backend 'megakernel'"),
        ({"deterministic": True, "backend": "upstream"}, BackendUnavailable, "deterministic=True"),
        ({"batch": {"max_streams": 3}}, OptionsError, "must be BatchSettings or None, got dict"),
        ({"backend": "megakernel"}, BackendUnavailable, "needs a CUDA device"),
        ({"backend": "banana"}, BackendUnavailable, "banana"),
        ({"backend": "megakernel", "lexicon": "absent.tsv"}, OptionsError, "found no file"),  # before a model is loaded
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


def test_what_is_loaded_for_what_is_asked_and_the_batch_may_be_limited(tiny):
    for settings in ({}, {"backend": "torch"}, {"deterministic": False}):
        with Synthesizer.load(tiny, device="cpu", **settings) as synth:
            assert list(synth.stats) == ["single"] + ["batch"] * ("backend" not in settings), settings
    limits = BatchSettings(max_streams=2, positions=256)
    with Synthesizer.load(tiny, device="cpu", deterministic=True, batch=limits) as synth:
        assert list(synth.stats) == ["batch"] and synth.lanes.slots == 2 and synth.lanes.deterministic
        assert len(list(synth.say_many(["One.", "Two.", "Three."], max_frames=2, seed=1))) == 3


def active(synth: Synthesizer) -> int:
    """Open streams that wait neither for text nor for their readers."""
    return sum(job.open and not job.idle for job in list(synth.engine._utterances))


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
        assert active(synth) == 0
        backend.hold()
        begun = backend.entered
        for session in sessions:
            session.feed("ghi")
        backend.wait_entered(begun + 1)
        backend.let(1)  # the worker may have gone on before it heard of all four
        backend.wait_entered(begun + 2)
        assert active(synth) == 4 and speak(synth, seed=9).engine == "batch"
        assert [session.engine for session in sessions] == wanted
        backend.release()
        for session in sessions:
            assert [next(session).frames for _ in range(3)] == [1] * 3
            session.cancel()


@pytest.mark.parametrize("beside", [False, True])
def test_while_a_batched_stream_is_open_though_it_rests_a_launch_of_the_megakernel_makes_one_frame(beside):
    with fake_synthesizer(engine="auto") as synth:
        choose, chosen = synth.engine._choose, iter(["batch", "single", "single"] if beside else ["single"] * 2)
        synth.engine._choose = lambda sampling, engine=None: choose(sampling, next(chosen))
        resting = speak(synth, 2, frames=None, options=replace(ONE, buffer_frames=2)) if beside else None
        settle(synth)
        backend = synth.engine.runners["single"].lanes.backend
        launched, frames = [1], backend.frames
        backend.frames = lambda state, rows: launched.append(len(rows)) or frames(state, rows)
        assert sum(chunk.frames for chunk in speak(synth, 3, frames=40, options=OFF)) == 40
        assert max(launched) == (1 if beside else MAX_FRAMES_AHEAD)
        assert resting is None or resting.idle


@pytest.mark.parametrize("engine", ["single", "batch"])
def test_a_synthesizer_refuses_by_name_what_a_server_may_not_have(engine):
    with fake_synthesizer(engine=engine) as synthesizer:
        synthesizer.set_limits(AdmissionLimits(max_streams=1, max_waiting=0))
        assert synthesizer.capacity == (1, "max_streams") and set(synthesizer.stats) == {engine}
        with synthesizer.stream("One two three.", max_frames=100_000) as first:
            next(first)
            with pytest.raises(BusyError) as refused:
                synthesizer.stream("Four.", max_frames=2).read()
            assert refused.value.capacity == 1
            assert len(synthesizer.say("Five.", max_frames=2))  # nobody listens to it
        until(lambda: not synthesizer.stats[engine].listeners, "the first to have left")
        assert len(synthesizer.stream("Six.", max_frames=2).read())


BATCH = {"device": "cpu", "engine": "batch"}
LONG = {"max_frames": 2_000, "options": StreamOptions(guard=Guard.off(), buffer_frames=32)}


def apart(name: str, **settings: object) -> Synthesizer:
    return Synthesizer.load_apart(open_checkpoint(name), name, None, {**BATCH, **settings})


@pytest.fixture(scope="module")
def far() -> Iterator[Synthesizer]:
    """Streams wait for admission, however small the capacity is at the moment."""
    with apart("random:tiny") as synthesizer:
        synthesizer.set_limits(AdmissionLimits(max_wait_s=WAIT_S, max_waiting=64))
        yield synthesizer


@pytest.fixture(scope="module")
def near(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, **BATCH) as synthesizer:
        yield synthesizer


def test_it_says_in_16_bits_what_one_in_this_process_says(far, near):
    settings = {"seed": 3, "max_frames": 30}
    theirs = near.stream("Good morning, everybody.", **settings)
    chunks = list(far.stream("Good kit, everybody.", pronunciations={"kit": "morning"}, **settings))
    pcm = np.concatenate([chunk.pcm for chunk in chunks])
    assert b"".join(chunk.pcm16 for chunk in chunks) == to_pcm16(theirs.read()) == to_pcm16(pcm)
    assert sum(chunk.frames for chunk in chunks) == 30
    assert [chunk.start_s for chunk in chunks] == sorted(chunk.start_s for chunk in chunks)
    assert (far.backend_name, far.device, far.dtype) == (near.backend_name, near.device, near.dtype)
    assert far.sampling == near.sampling


async def test_many_streams_in_an_event_loop_each_get_their_own(far, near):
    asked = [{"text": "One of many.", "seed": seed, "max_frames": 12} for seed in range(6)]
    said = await asyncio.gather(*(far.stream(**one).aread() for one in asked))
    assert [to_pcm16(pcm) for pcm in said] == [to_pcm16(near.say(**one)) for one in asked]


def test_a_session_that_another_thread_cancels_while_it_begins_is_cancelled_there_too(far, monkeypatch):
    send, session = far.engine._send, far.open(**LONG)

    def told() -> bool:
        return session._utterance.number not in far.engine._utterances

    def cancels_first(method, *arguments, **more):
        if method == "begin":
            session.cancel()
            until(told, "the cancel is told")
        send(method, *arguments, **more)

    monkeypatch.setattr(far.engine, "_send", cancels_first)
    session.feed("Good morning, everybody. ")
    until(told, "it is told again")
    until(lambda: far.engine.stats["batch"].lanes_used == 0, "its lane is free")


def test_nothing_is_made_for_a_reader_who_takes_nothing_and_a_cancelled_stream_ends(far):
    stream = far.stream("A long story.", **LONG)
    next(stream)
    until(lambda: stream.idle, "its buffer to be full")
    assert far.stats["batch"].lanes_used == 1
    before = stream._utterance.made_frames
    time.sleep(0.3)
    assert stream._utterance.made_frames == before <= 40
    next(stream), next(stream), next(stream), next(stream)
    until(lambda: stream._utterance.made_frames > before, "more, as it was read from")
    stream.cancel()
    assert list(stream) == [] and stream.finish_reason == "cancelled"
    for _ in range(3):
        next(far.stream("Nobody reads on.", **LONG))
    until(lambda: not far.engine._utterances, "the cancelled and the dropped ones to be gone")
    until(lambda: not far.stats["batch"].lanes_used, "their lanes to be free")


def test_a_voice_goes_over_and_all_streams_end_where_the_process_is_killed(tiny_base):
    torch.manual_seed(1)
    one, other = (Voice(torch.randn(64), None, None, tiny_base.config.model_size) for _ in range(2))
    settings = {"seed": 2, "max_frames": 8}
    with Synthesizer.load(tiny_base, **BATCH) as near, apart("random:tiny:base") as far:
        expected = to_pcm16(near.say("In her voice.", voice=one, **settings))
        for _ in range(2):
            assert to_pcm16(far.stream("In her voice.", voice=one, **settings).read()) == expected
        far.stream("And hers.", voice=other, **settings).read()
        far.forget(other)
        assert to_pcm16(far.stream("In her voice.", voice=one, **settings).read()) == expected
        gone = threading.Event()
        far.engine.on_gone = gone.set
        stream = far.stream("Until somebody pulls the plug.", voice=one, **LONG)
        next(stream)
        os.kill(far.engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the engine's process"):
            stream.read()
        assert gone.wait(WAIT_S) and far.engine.gone
        for use in (lambda: far.stream("Hello?", voice=one), far.warm_up):
            with pytest.raises(EngineError):
                use()


def test_it_ends_with_the_process_that_it_speaks_for():
    program = (
        "import os, time\n"
        "from mktts.checkpoint import open_checkpoint\n"
        "from mktts import Synthesizer\n"
        "far = Synthesizer.load_apart(open_checkpoint('random:tiny'), 'random:tiny', None, {'device': 'cpu'})\n"
        "print(far.engine._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words, environment = [sys.executable, "-c", program], {**os.environ, **python_path()}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = Path(f"/proc/{int(parent.stdout.readline())}/cmdline")
        parent.kill()
    until(lambda: not child.exists() or not child.read_bytes(), "the child to go")  # empty: it waits to be reaped


def test_what_loading_raises_is_raised_here():
    checkpoint = open_checkpoint("random:tiny")
    with pytest.raises(BackendUnavailable):
        Synthesizer.load_apart(checkpoint, "random:tiny", None, {"device": "cuda:77"})
    with pytest.raises(OptionsError, match="lexicon"):
        Synthesizer.load_apart(checkpoint, "random:tiny", None, {"device": "cpu", "lexicon": "absent.tsv"})


def test_an_error_that_cannot_be_pickled_is_told_in_words():
    error = ValueError("beyond words")
    error.cause = threading.Lock()
    here, there = (Wire(end) for end in socket.socketpair())
    here.send(("over", (sendable(error),), None), ("over", (sendable(None),), None))
    (told,), (other,) = (arguments for _, arguments, _ in there.recv())
    assert type(told) is EngineError and "ValueError: beyond words" in str(told) and other is None


# The last one of this file: afterwards the process of `far` is gone.
def test_admission_speaks_through_it_and_closing_ends_streams_and_the_process(far):
    far.set_limits(AdmissionLimits(max_streams=1, max_waiting=0, max_wait_s=0.0))
    first = far.stream("The only place.", **LONG)
    next(first)
    with pytest.raises(BusyError) as refused:
        far.stream("One too many.", **LONG).read()
    assert refused.value.capacity == 1
    until(lambda: far.capacity.streams == 1, "the capacity")
    far.close()
    assert far.engine._process.returncode == 0 and not far.engine.gone
    assert list(first) == [] and first.finish_reason == "cancelled"
    far.close()
    with pytest.raises(EngineError, match="closed"):
        far.stream("Too late.")
