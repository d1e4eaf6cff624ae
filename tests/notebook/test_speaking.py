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
    expected = {name.lower(): value or None for name, value in values.items()}
    assert arguments == expected | {"speaker": next(iter(tiny.config.speakers))}
    with pytest.raises(MkttsError, match="SPEED"):
        speaking.stream_arguments(tiny, SPEED=2)


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
    for blank in (shown, {"TEMPERATURE": 0.0, "TOP_K": -1, "GREEDY": False}):
        assert speaking.stream_arguments(small, **blank)["sampling"] == small.sampling()
    assert "sampling" not in speaking.stream_arguments(small, TEXT="Hi")


def test_a_panel_folds_away_what_the_checkpoint_does_not_take(small):
    assert {"INSTRUCT", "VOICE", "TOP_K"} <= set(speaking.more(small))
    assert not {"TEXT", "SPEAKER", "SEED", "TEMPERATURE"} & set(speaking.more(small))
    base = speaking.more(open_checkpoint("random:tiny:base"))
    assert "SPEAKER" in base and "VOICE" not in base


NO_SCHEDULE = ("a", "", "1,,2", "1,0", "-1", "1.5")
NO_LOADS = ("4,", "0", "-1,2", "a", "1.5")
NO_TURNS = ("", "hello;", "soon: stop", "-1: stop", "nan: stop", "inf: stop", "2:")


@pytest.mark.parametrize(
    ("read", "wrong", "named"),
    [
        (speaking.schedule, NO_SCHEDULE, "SCHEDULE must be frames per chunk"),
        (lambda text: speaking.loads("LISTENERS", text), NO_LOADS, "LISTENERS must be numbers of listeners"),
        (speaking.turns, NO_TURNS, "SCRIPT must be turns"),
        (speaking.texts, ("Yes. |",), "TEXTS"),
        (
            lambda n: speaking.at_least(1, FRAMES=3, REPEATS=n),
            (0,),
            "REPEATS must be a whole number .* at least 1, got 0",
        ),
    ],
)
def test_what_is_none_is_named_by_its_parameter(read, wrong, named):
    for text in wrong:
        with pytest.raises(OptionsError, match=named):
            read(text)


def test_texts_and_numbers_of_listeners_are_read():
    assert speaking.texts("Yes. | No, thank you.") == ["Yes.", "No, thank you."]
    assert speaking.loads("LISTENERS", "1, 4,16") == (1, 4, 16) and speaking.loads("LISTENERS", "") == ()


def test_turns_are_words_with_an_optional_moment():
    script = "hello; what time is it;2.5: stop please; 0: thank you"
    expected = [("hello", None), ("what time is it", None), ("stop please", 2.5), ("thank you", 0.0)]
    assert speaking.turns(script) == expected
