"""Many texts at once: what `say` gives for each, in order; progress, errors and leaving, on every engine."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
from fakes import FAKE_ENGINES, ONE, FakeBackend, fake_synthesizer, settle

from mktts.errors import EngineError, OptionsError, TextError
from mktts.synth.many import Asked

TEXTS = [f"Text number {number}." for number in range(12)]


@pytest.fixture(params=[*FAKE_ENGINES, "auto"])
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


def open_now(synth) -> int:
    gc.collect()
    settle(synth)
    return synth._engine.open_streams


@pytest.mark.parametrize("at_once", [None, 1, 5])
def test_each_text_sounds_as_if_it_were_said_alone_and_in_its_turn(make, at_once):
    with make(FakeBackend(eos_after=7)) as synth:
        alone = [synth.say(text, seed=4) for text in TEXTS]
        done = []
        many = synth.say_many(iter(TEXTS), seed=4, at_once=at_once, on_done=done.append)
        got = [(pcm, list(done)) for pcm in many]
        for number, ((pcm, progress), wanted) in enumerate(zip(got, alone, strict=True), 1):
            assert np.array_equal(pcm, wanted) and progress == list(range(1, number + 1))
        assert open_now(synth) == 0


def test_every_text_draws_a_seed_of_its_own_where_none_is_given(make):
    with make(FakeBackend(eos_after=3)) as synth:
        list(synth.say_many(["Same."] * 5))
        seeds = {seed for seed in synth_backend(synth).order if seed != 999}
        assert len(seeds) == 5


def synth_backend(synth) -> FakeBackend:
    model = synth._models.any()
    return model.lanes.backend if hasattr(model, "lanes") else model.backend


@pytest.mark.parametrize("at_once", [1, 3])
def test_no_more_streams_are_open_than_asked_for(make, at_once):
    open_streams = []
    with make(FakeBackend(eos_after=3)) as synth:

        def texts():
            for text in TEXTS:
                open_streams.append(sum(not job.over for job in list(synth._engine._jobs)))
                yield text

        assert len(list(synth.say_many(texts(), at_once=at_once))) == len(TEXTS)
    assert max(open_streams) <= at_once - 1  # one more is opened then


def test_as_many_as_the_engine_has_room_for_where_nothing_is_asked_for():
    for engine, room in (("single", 1), ("batch", 3), ("auto", 3)):
        with fake_synthesizer(engine=engine, **({} if engine == "single" else {"slots": 3})) as synth:
            taken = []
            many = synth.say_many((taken.append(text) or text for text in TEXTS), max_frames=3)
            next(many)
            assert len(taken) == room + 1
            many.close()


def test_more_than_fit_wait_for_their_place():
    with fake_synthesizer(FakeBackend(eos_after=4), engine="batch", slots=2) as synth:
        assert len(list(synth.say_many(TEXTS, at_once=12))) == len(TEXTS)


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("fails", ["opening", "speaking"])
def test_an_error_is_raised_in_its_turn_and_the_others_are_cancelled(make, at_once, fails):
    texts = ["Good.", "Good too.", "\x00" if fails == "opening" else "Fails.", "Never said.", "Never said."]
    seeds = iter([10, 20, 70, 30, 40])
    with make(FakeBackend(eos_after=5, fail_at=3, failing_seed=70)) as synth:
        plain, got = synth._stream_unpaced, []
        synth._stream_unpaced = lambda text, settings: plain(text, {**settings, "seed": next(seeds)})
        with pytest.raises((TextError, RuntimeError, EngineError)):
            for pcm in synth.say_many(texts, at_once=at_once):
                got.append(len(pcm))
        assert len(got) == 2 and open_now(synth) == 0 and list(synth.say_many([])) == []


@pytest.mark.parametrize("leave", ["close", "dropped", "raised", "on_done"])
def test_leaving_early_ends_what_is_open(make, leave):
    with make() as synth:

        def on_done(done: int) -> None:
            if leave == "on_done":
                raise ZeroDivisionError

        many = synth.say_many(TEXTS, at_once=4, max_frames=20, options=ONE, on_done=on_done)
        if leave == "on_done":
            with pytest.raises(ZeroDivisionError):
                next(many)
        else:
            next(many)
            if leave == "close":
                many.close()
            elif leave == "raised":
                with pytest.raises(KeyError):
                    many.throw(KeyError())
            else:
                del many
        assert open_now(synth) == 0
        assert all(job.over for job in list(synth._engine._jobs))


@pytest.mark.parametrize("at_once", [0, -1, 1.5, True, "2"])
def test_how_many_at_once_is_checked_at_the_call(make, at_once):
    with make() as synth, pytest.raises(OptionsError, match="at_once must be a whole number of at least 1"):
        synth.say_many(TEXTS, at_once=at_once)


# ---- each as soon as it is over


def asks(synth, texts):
    """What gives them out one by one."""
    left = iter([Asked(text, {"seed": number}, number) for number, text in enumerate(texts)])
    return partial(next, left, None)


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_each_text_has_settings_and_errors_of_its_own(make, at_once):
    with make(FakeBackend(eos_after=5)) as synth:
        texts = ["Good.", "\x00", "Good too.", "Good as well."]
        found = {said.asked.name: said for said in synth.say_each(asks(synth, texts), at_once=at_once)}
        assert sorted(found) == [0, 1, 2, 3]
        assert isinstance(found[1].error, TextError) and found[1].stream is None
        for number in (0, 2, 3):
            said = found[number]
            assert said.error is None and said.stream.finish_reason == "eos" and said.stream.seed == number
            assert np.array_equal(said.pcm, synth.say(texts[number], seed=number))
        assert open_now(synth) == 0


def test_what_is_asked_for_because_of_the_last_one_is_made_too(make):
    with make(FakeBackend(eos_after=3)) as synth:
        left = [Asked("One.", {}, 1)]
        names = []
        for said in synth.say_each(lambda: left.pop() if left else None):
            names.append(said.asked.name)
            if len(names) < 4:
                left.append(Asked("More.", {}, said.asked.name + 1))
        assert names == [1, 2, 3, 4]


@pytest.mark.parametrize("leave", ["close", "dropped", "ask"])
def test_leaving_them_early_ends_what_is_open(make, leave):
    with make() as synth:
        asked = [Asked("Text.", {"max_frames": frames, "options": ONE}) for frames in (1, 20, 20, 20)]

        def ask():
            if not asked and leave == "ask":
                raise ZeroDivisionError
            return asked.pop(0) if asked else None

        said = synth.say_each(ask, at_once=3)
        if leave == "ask":
            with pytest.raises(ZeroDivisionError):
                list(said)
        else:
            next(said)
            if leave == "close":
                said.close()
            else:
                del said
        assert open_now(synth) == 0


def test_as_many_as_fit_and_a_few_more_are_open():
    with fake_synthesizer(engine="batch", slots=16) as synth:
        taken = []
        said = synth.say_each(lambda: taken.append(1) or Asked("Text.", {"max_frames": 2}))
        next(said)
        assert len(taken) == 16 + 2 + 1
        said.close()
