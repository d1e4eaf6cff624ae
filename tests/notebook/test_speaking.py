"""Notebook parameters as arguments of an utterance, as a panel, and lists of texts."""

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


SETTINGS = {"INSTRUCT": "", "VOICE": "", "MAX_FRAMES": 80, "GREEDY": False, "SCHEDULE": "1,2", "LANGUAGE": "auto"}


def test_a_panel_shows_the_checkpoints_own_values(small):
    open_, own = {"SPEAKER": "", "TEMPERATURE": 0.0, "TOP_K": -1}, small.sampling().talker
    shown = speaking.panel(small, **SETTINGS, **open_).values
    expected = {"SPEAKER": next(iter(small.config.speakers)), "TEMPERATURE": own.temperature, "TOP_K": own.top_k}
    assert shown == {**SETTINGS, **expected}
    chosen = {**SETTINGS, "SPEAKER": "michael", "TEMPERATURE": 0.7, "TOP_K": 5}
    assert speaking.panel(small, **chosen).values == chosen
    for same in (shown, {"TEMPERATURE": 0.0, "TOP_K": -1, "GREEDY": False}):
        assert speaking.stream_arguments(small, **same)["sampling"] == small.sampling()
    assert "sampling" not in speaking.stream_arguments(small, TEXT="Hi")


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (DEFAULT_CHECKPOINT, ["Text", "Speaker", "Temperature"]),
        ("random:tiny:base", ["Text", "Language", "Saved voice's file", "Temperature"]),
    ],
)
def test_a_panel_folds_away_what_the_checkpoint_does_not_take(source, seen):
    checkpoint = open_checkpoint(source)
    panel = speaking.panel(checkpoint, TEXT="Hi", SPEAKER="", **SETTINGS, TEMPERATURE=0.7, TOP_K=-1)
    *lines, folded, _ = panel.panel.children
    assert sorted(line.description for line in lines) == sorted(seen) and folded.titles == ("more",)


def test_texts_are_read_and_what_is_none_is_named_by_its_parameter():
    assert speaking.texts("Yes. | No, thank you.") == ["Yes.", "No, thank you."]
    with pytest.raises(OptionsError, match="TEXTS"):
        speaking.texts("Yes. |")
    with pytest.raises(OptionsError, match="REPEATS must be a whole number .* at least 1, got 0"):
        speaking.at_least(1, FRAMES=3, REPEATS=0)
