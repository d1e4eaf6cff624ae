"""Text that comes while it is spoken, step by step, without threads; and the options of a stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import OFF, FakeBackend, fake_model
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.errors import OptionsError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.speech.guard import Guard
from mktts.speech.options import Chunk, Plan, StreamOptions
from mktts.speech.text import SEGMENT_CHARS
from mktts.synth.one_by_one import Generation, StepModel


def run(utterance: Generation, steps: int = 10_000) -> list[Chunk]:
    """Steps until the end, or until it waits."""
    chunks = []
    while utterance.finish_reason is None and steps and utterance.ready():
        chunk = utterance.step()
        chunks += [chunk] if chunk is not None else []
        steps -= 1
    return chunks


def fed(model: StepModel, options: StreamOptions = OFF, max_frames: int | None = None):
    max_chars = options.max_chars_per_segment or SEGMENT_CHARS
    return model.listen(Request(""), max_chars, Plan(Sampling(), 5, max_frames, options))


def test_without_text_nothing_is_made():
    backend = FakeBackend()
    utterance, _ = fed(fake_model(backend))
    assert not utterance.ready()
    assert backend.entered == 0 and backend.states == []


def test_the_model_steps_as_far_as_the_text_goes_and_hands_out_what_it_has():
    backend = FakeBackend(eos_after=12)
    utterance, script = fed(fake_model(backend))
    script.feed("abcdef")  # a token a character: the first is in the prompt, five more frames follow
    chunks = run(utterance)
    assert not utterance.ready() and utterance.finish_reason is None
    assert len(utterance.codes) == 6 == backend.entered
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 2]  # the last one early: the listener need not wait
    script.feed("gh")
    chunks += run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (8, None)
    script.finish()
    chunks += run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (12, "eos")
    assert sum(chunk.frames for chunk in chunks) == 12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet="abc. ", min_size=1, max_size=9), min_size=1, max_size=6))
def test_however_text_is_fed_the_codes_are_those_of_the_text_at_once(pieces):
    text = "".join(pieces).strip()
    if not text:
        return

    def codes(parts: list[str], eager: bool) -> list[list[int]]:
        utterance, script = fed(fake_model(FakeBackend(eos_after=len(text) + 5)))
        for part in parts:
            script.feed(part)
            if eager:
                run(utterance)
        script.finish()
        run(utterance)
        assert utterance.finish_reason == "eos"
        return [frame.tolist() for frame in utterance.codes]

    assert codes(pieces, eager=True) == codes([text], eager=False) == codes(pieces, eager=False)


def test_long_fed_text_becomes_segments_at_sentence_ends():
    model = fake_model(FakeBackend(eos_after=60))
    utterance, script = fed(model, replace(OFF, max_chars_per_segment=20))
    for word in "This is the first sentence. And the second one is here. Last.".split(" "):
        script.feed(word + " ")
        run(utterance)
    script.finish()
    run(utterance)
    assert [prompt.text for prompt in model.prompts.opened] == [
        "This is the first sentence.",
        "And the second one is here.",
        "Last.",
    ]
    assert all(prompt.text_ended for prompt in model.prompts.opened)
    assert (utterance.finish_reason, model.codec.starts) == ("eos", 1)


def test_text_that_comes_after_end_of_speech_is_spoken_too():
    model = fake_model(FakeBackend(eos_after=3))
    utterance, script = fed(model)
    script.feed("Hello there")
    run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (3, None)
    script.feed(" you")
    script.finish()
    run(utterance)
    assert [prompt.text for prompt in model.prompts.opened] == ["Hello there", "you"]
    assert (len(utterance.codes), utterance.finish_reason) == (6, "eos")


def test_the_end_of_the_text_after_the_last_frame_ends_the_utterance():
    utterance, script = fed(fake_model(FakeBackend(eos_after=2)))
    script.feed("abc")
    run(utterance)
    assert not utterance.ready()
    script.finish()
    assert run(utterance) == [] and utterance.finish_reason == "eos"


# ---- options


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamOptions(schedule=()),
        lambda: StreamOptions(schedule=(1, 0)),
        lambda: StreamOptions(schedule=(1.5,)),
        lambda: StreamOptions(schedule=(1, 9), buffer_frames=8),
        lambda: StreamOptions(max_chars_per_segment=0),
        lambda: Guard(repeat_frames=1),
        lambda: Guard(frames_per_text_token=0),
        lambda: Guard(slack_frames=0),
        lambda: Plan(Sampling(), -1, None, OFF),
        lambda: Plan(Sampling(), 2**63, None, OFF),
        lambda: Plan(Sampling(), 0, 0, OFF),
        lambda: Plan(Sampling(), "7", None, OFF),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(OptionsError, match="must"):
        make()


def test_options_take_lists_and_numpy_integers():
    assert StreamOptions(schedule=[1, np.int64(2)]).schedule == (1, 2)
