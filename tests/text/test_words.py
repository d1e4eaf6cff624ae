"""Words of a text, and the kinds of sounds that their letters stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mktts.text.words import PAUSED, is_wide, sounds, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello there.", ["Hello", "there."]),
        ("Well — yes, 5 % more !", ["Well —", "yes,", "5 %", "more !"]),
        ("She said: “Go!”", ["She", "said:", "“Go!”"]),
        ("( maybe )", ["( maybe )"]),
        ("你好，世界。", ["你", "好，", "世", "界。"]),
        ("我用 Python 写“代码”", ["我", "用", "Python", "写", "“代", "码”"]),
        ("안녕하세요 여러분", ["안녕하세요", "여러분"]),
        ("\U0001f44d", ["\U0001f44d"]),
        ("Great \U0001f44d", ["Great \U0001f44d"]),
        (" \n", []),
    ],
)
def test_words_of_a_text(text, words):
    assert split_words(text) == words


@given(st.text(alphabet="ab. ,—“”(你。\n7", max_size=40))
def test_no_visible_character_is_lost_or_said_twice(text):
    assert "".join("".join(split_words(text)).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("stopped", "sibilant stop vowel stop voiced"),
        ("make yes", "nasal vowel stop liquid vowel sibilant"),
        ("six", "sibilant vowel stop sibilant"),
        ("the Çay", "fricative vowel stop vowel"),
        ("где", "voiced vowel"),
        ("世", "any vowel"),
        ("7", "any vowel any"),
        ("...", ""),
    ],
)
def test_letters_stand_for_kinds_of_sounds(said, kinds):
    assert sounds(said) == kinds.split()


def test_marks_make_a_pause_likely_and_no_space_stands_between_ideographs():
    assert all(map(PAUSED.search, ("there.", "there,”", "界。", "well —")))
    assert not any(map(PAUSED.search, ("there", "“there", "3.5m")))
    assert [is_wide(word) for word in split_words("我用 Python。")] == [True, True, True]
    assert [is_wide(word) for word in split_words("Hello, world")] == [False, False]
