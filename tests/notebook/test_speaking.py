"""Notebook parameters as arguments of an utterance, lists of texts, turns and loads."""

from __future__ import annotations

import pytest

from mktts.checkpoint import DEFAULT_CHECKPOINT, open_checkpoint
from mktts.errors import MkttsError, OptionsError
from mktts.notebook import speaking


@pytest.fixture(scope="module")
def small():
    return open_checkpoint(DEFAULT_CHECKPOINT)


def test_parameters_become_arguments_and_unknown_ones_are_refused(tiny):
    values = {"TEXT": "Hi", "LANGUAGE": "auto", "SPEAKER": "", "INSTRUCT": "", "VOICE": "", "SEED": 1, "MAX_FRAMES": 9}
    arguments = speaking.stream_arguments(tiny, **values, SCHEDULE="1,2")
    assert arguments.pop("options").schedule == (1, 2)
    assert arguments == {
        "text": "Hi",
        "language": "auto",
        "speaker": next(iter(tiny.config.speakers)),
        "instruct": None,
        "voice": None,
        "seed": 1,
        "max_frames": 9,
    }
    with pytest.raises(MkttsError, match="SPEED"):
        speaking.stream_arguments(tiny, SPEED=2)


def test_sampling_is_the_checkpoints_where_the_parameters_leave_it_so(small):
    own = small.sampling()
    for blank in ({"TEMPERATURE": 0.0, "TOP_K": -1, "GREEDY": False}, {"TEMPERATURE": own.talker.temperature}):
        assert speaking.stream_arguments(small, **blank)["sampling"] == own
    assert "sampling" not in speaking.stream_arguments(small, TEXT="Hi")


def test_sampling_parameters_hold_for_all_codes_of_a_frame(small):
    changed = speaking.stream_arguments(small, TEMPERATURE=1.25, TOP_K=0)["sampling"]
    for choice in (changed.talker, changed.predictor):
        assert (choice.temperature, choice.top_k, choice.do_sample) == (1.25, 0, True)
    greedy = speaking.stream_arguments(small, TEMPERATURE=0.0, GREEDY=True)["sampling"]
    assert greedy == small.sampling().greedy()
    with pytest.raises(MkttsError, match="temperature.*-1"):
        speaking.stream_arguments(small, TEMPERATURE=-1.0)


def test_a_panel_shows_the_checkpoints_own_values_by_name_and_number(small):
    shown = speaking.filled_in(small, SPEAKER="", TEMPERATURE=0.0, TOP_K=-1, SEED=3)
    own = small.sampling().talker
    expected = {"SPEAKER": next(iter(small.config.speakers)), "TEMPERATURE": own.temperature, "TOP_K": own.top_k}
    assert shown == {**expected, "SEED": 3}
    offered = speaking.choices(small)
    assert shown["SPEAKER"] in offered["SPEAKER"] and "auto" in offered["LANGUAGE"]
    assert not any("dialect" in language for language in offered["LANGUAGE"])
    chosen = {"SPEAKER": "awb", "TEMPERATURE": 0.7, "TOP_K": 5}
    assert speaking.filled_in(small, **chosen) == chosen
    assert speaking.stream_arguments(small, **shown)["sampling"] == small.sampling()


@pytest.mark.parametrize("text", ["a", "", "1,,2", "1,0", "-1", "1.5"])
def test_a_schedule_that_is_none_is_named(tiny, text):
    with pytest.raises(OptionsError, match="SCHEDULE must be frames per chunk"):
        speaking.stream_arguments(tiny, SCHEDULE=text)


def test_numbers_and_texts_that_are_none_are_named_by_their_parameter():
    speaking.at_least(1, REPEATS=1, FRAMES=3)
    with pytest.raises(OptionsError, match="REPEATS must be a whole number of at least 1, got 0"):
        speaking.at_least(1, FRAMES=3, REPEATS=0)
    assert speaking.texts("Yes. | No, thank you.") == ["Yes.", "No, thank you."]
    with pytest.raises(OptionsError, match="TEXTS"):
        speaking.texts("Yes. |")


def test_numbers_of_listeners_are_read_and_refused_by_name():
    assert speaking.loads("LISTENERS", "1, 4,16") == (1, 4, 16) and speaking.loads("LISTENERS", "") == ()
    for wrong in ("4,", "0", "-1,2", "a", "1.5"):
        with pytest.raises(OptionsError, match="LISTENERS must be numbers of listeners"):
            speaking.loads("LISTENERS", wrong)


def test_turns_are_words_with_an_optional_moment():
    script = "hello; what time is it;2.5: stop please; 0: thank you"
    expected = [("hello", None), ("what time is it", None), ("stop please", 2.5), ("thank you", 0.0)]
    assert speaking.turns(script) == expected


@pytest.mark.parametrize("script", ["", "hello;", "soon: stop", "-1: stop", "nan: stop", "inf: stop", "2:"])
def test_a_turn_that_is_none_is_named(script):
    with pytest.raises(OptionsError, match="SCRIPT must be turns"):
        speaking.turns(script)


@pytest.mark.parametrize("text", ["Hi.", "x", "A longer text than the others, by far."])
def test_a_longer_text_outlasts_what_is_asked(text):
    long = speaking.longer(text, 120)
    assert long.startswith(text) and len(long) >= 120 * speaking.CHARS_PER_FRAME
    assert len(long) < 120 * speaking.CHARS_PER_FRAME * 2.1 + 2 * len(text)
