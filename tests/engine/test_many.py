"""Many texts at once: what `say` gives for each, in order; errors and leaving, on every engine."""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from desk import open_streams
from fakes import FAKE_ENGINES, ONE, WAIT_S, FakeBackend, fake_synthesizer, settle
from served import until

from mktts.engine.many import SayRequest
from mktts.errors import EngineError, OptionsError, TextError

TEXTS = [f"Text number {number}." for number in range(12)]


@pytest.fixture(params=[*FAKE_ENGINES, "auto"])
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


def open_now(synth) -> int:
    gc.collect()
    settle(synth)
    return open_streams(synth)


@pytest.mark.parametrize("at_once", [None, 1, 5])
def test_each_text_sounds_as_if_said_alone_in_its_turn_and_has_its_own_seed_where_none_is_given(make, at_once):
    backend = FakeBackend(eos_after=7)
    with make(backend, slots=2) as synth:  # more than fit wait for their place
        alone = [synth.say(text, seed=4) for text in TEXTS]
        many = synth.say_many(iter(TEXTS), seed=4, at_once=at_once)
        assert all(np.array_equal(*pair) for pair in zip(many, alone, strict=True))
        assert open_now(synth) == 0
        backend.order.clear()
        list(synth.say_many(["Same."] * 5))
        assert len(set(backend.order)) == 5


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("fails", ["opening", "speaking"])
def test_an_error_is_raised_in_its_turn_and_the_others_are_cancelled(make, at_once, fails):
    texts = ["Good.", "Good too.", "\x00" if fails == "opening" else "Fails.", "Never said.", "Never said."]
    seeds = iter([10, 20, 70, 30, 40])
    with make(FakeBackend(eos_after=5, fail_at=3, failing_seed=70)) as synth:
        plain, got = synth._stream, []
        synth._stream = lambda text, settings, **how: plain(text, {**settings, "seed": next(seeds, 0)}, **how)
        with pytest.raises((TextError, RuntimeError, EngineError)):
            for pcm in synth.say_many(texts, at_once=at_once):
                got.append(len(pcm))
        assert len(got) == 2 and open_now(synth) == 0 and list(synth.say_many([])) == []


@pytest.mark.parametrize(("engine", "room"), [("single", 1), ("batch", 16), ("auto", 16)])
@pytest.mark.parametrize("at_once", [None, 3])
def test_as_many_are_open_as_asked_for_or_fit_and_a_few_more_of_those_asked_one_by_one(engine, room, at_once):
    with fake_synthesizer(engine=engine, slots=16) as synth:
        taken = []
        texts = (taken.append(text) or text for text in itertools.repeat("Text."))
        many = synth.say_many(texts, max_frames=3, at_once=at_once)
        next(many)
        assert len(taken) == (at_once or room) + 1 and open_streams(synth) <= (at_once or room)
        many.close()
        taken.clear()
        said = synth.say_each(lambda: taken.append(1) or SayRequest("Text.", {"max_frames": 2}), at_once=at_once)
        next(said)
        assert len(taken) == (at_once or room + room // 8) + 1
        said.close()


@pytest.mark.parametrize("method", ["say_many", "say_each"])
@pytest.mark.parametrize("leave", ["close", "dropped", "a callback raised"])
def test_leaving_early_ends_what_is_open(make, method, leave):
    calls_back = leave == "a callback raised"
    settings = {"max_frames": 20, "options": ONE}
    with make() as synth:
        texts = (1 / 0 if calls_back and number > 6 else text for number, text in enumerate(TEXTS))
        if method == "say_many":
            made = synth.say_many(texts, at_once=4, **settings)
        else:
            made = synth.say_each(lambda: SayRequest(next(texts), settings), at_once=4)
        if calls_back:
            with pytest.raises(ZeroDivisionError):
                list(made)
        else:
            next(made)
        if leave == "close":
            made.close()
        del made
        assert open_now(synth) == 0
        assert all(job.over for job in list(synth.engine._utterances))


@pytest.mark.parametrize("at_once", [0, 1.5, True, "2"])
def test_how_many_at_once_is_checked_at_the_call(make, at_once):
    with make() as synth:
        for say in (synth.say_many, synth.say_each):
            with pytest.raises(OptionsError, match="at_once must be a whole number of at least 1"):
                say(TEXTS, at_once=at_once)


def test_what_is_cut_off_because_the_synthesizer_is_closed_is_an_error(make):
    synth = make(FakeBackend(eos_after=100_000))
    with ThreadPoolExecutor() as threads:
        said = threads.submit(synth.say, TEXTS[0], max_frames=100_000)
        until(lambda: open_streams(synth), "a stream is open")
        synth.close()
        with pytest.raises(EngineError, match="closed"):
            said.result(WAIT_S)
    for measure in (synth.measure_capacity, lambda: synth.engine._on_worker(int)):
        with pytest.raises(EngineError, match="closed"):
            measure()
