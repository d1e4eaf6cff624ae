"""Which engine serves a stream, and what may be asked of `Synthesizer.load` about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import ONE, FakeBackend, fake_synthesizer, settle, speak

from mktts.errors import BackendUnavailable, EngineError, OptionsError, SamplingError
from mktts.model.sampling import Sampling
from mktts.synth import Synthesizer
from mktts.synth.loading import Loading, Models
from mktts.synth.synthesizer import BatchSettings

SINGLE, BATCH = SimpleNamespace(), SimpleNamespace(lanes=SimpleNamespace(slots=7))
TOGETHER = SimpleNamespace(model=BATCH)
TORCH = Sampling(rng="torch")


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


def test_every_engine_is_warmed_up():
    with fake_synthesizer(engine="auto") as synth:
        opened = []
        plain = synth._engine.open
        synth._engine.open = lambda work, frames, on, *more: opened.append(on) or plain(work, frames, on, *more)
        synth.warm_up()
        assert opened == ["single", "batch"]
    with pytest.raises(EngineError, match="closed"):
        synth.warm_up()


def test_room_and_letting_go():
    models = Models(SINGLE, TOGETHER)
    assert (models.room, Models(SINGLE, None).room, models.any()) == (7, 1, SINGLE)
    models.let_go()
    for use in (models.any, lambda: models.pick(0, 0, Sampling()), lambda: models.check(Sampling())):
        with pytest.raises(EngineError, match="closed"):
            use()


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
        ({"engine": "many"}, OptionsError, "engine must be one of .*'auto', 'single', 'batch'.*got 'many'"),
        ({"engine": "single", "deterministic": True}, OptionsError, "leave engine='single' out"),
        ({"engine": "batch", "backend": "megakernel"}, BackendUnavailable, "does not run on backend 'megakernel'"),
        ({"engine": "batch", "backend": "upstream"}, BackendUnavailable, "does not run on backend 'upstream'"),
        ({"deterministic": True, "backend": "megakernel"}, BackendUnavailable, "deterministic=True"),
        ({"deterministic": True, "backend": "upstream"}, BackendUnavailable, "deterministic=True"),
        ({"batch": {"max_streams": 3}}, OptionsError, "must be BatchSettings or None, got dict"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_contradicts_itself_is_refused_by_name(tiny, settings, error, said):
    with pytest.raises(error, match=said):
        Synthesizer.load(tiny, device="cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "single", "together"),
    [
        ({}, True, True),
        ({"backend": "torch"}, True, False),
        ({"backend": "megakernel"}, True, False),
        ({"engine": "single"}, True, False),
        ({"engine": "batch"}, False, True),
        ({"engine": "batch", "backend": "torch"}, False, True),
        ({"deterministic": True}, False, True),
        ({"deterministic": True, "backend": "torch"}, False, True),
        ({"deterministic": False}, True, True),
        ({"deterministic": True, "engine": "batch"}, False, True),
    ],
    ids=str,
)
def test_what_is_loaded_for_what_is_asked(settings, single, together):
    asked = {"backend": "auto", "engine": "auto", "deterministic": None, **settings}
    wanted = Loading.checked(device="cpu", dtype=None, cpu_threads=None, batch=None, **asked)
    assert (wanted.single, wanted.together) == (single, together)


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({}, ["single", "single", "batch"]),
        ({"backend": "torch"}, ["single"] * 3),
        ({"engine": "single"}, ["single"] * 3),
        ({"engine": "batch"}, ["batch"] * 3),
        ({"deterministic": True}, ["batch"] * 3),
    ],
    ids=str,
)
def test_streams_say_what_makes_them(tiny, settings, engines):
    with Synthesizer.load(tiny, device="cpu", **settings) as synth:
        streams = [synth.stream("Hello there.", seed=seed, max_frames=200) for seed in range(3)]
        assert [stream.engine for stream in streams] == engines
        for stream in streams:
            next(stream)
            stream.cancel()


def test_the_batch_may_be_limited(tiny):
    limits = BatchSettings(max_streams=2, positions=256)
    with Synthesizer.load(tiny, device="cpu", engine="batch", batch=limits) as synth:
        assert synth._models.room == 2
        assert len(list(synth.say_many(["One.", "Two.", "Three."], max_frames=2, seed=1))) == 3
