"""Written forms of a text, and how they are drawn."""

from __future__ import annotations

import re

import numpy as np

from mktts.training.data.forms import (
    FORMS,
    bare,
    drawn,
    lowered_unmarked,
    plain,
    spread,
    titled,
    unmarked,
    without_commas,
)


def test_every_form_by_hand():
    text = "Well, don't go to the half-open door, Anna; it's one o'clock!"
    assert titled(text) == "Well, Don't Go To The Half-Open Door, Anna; It's One O'clock!"
    assert unmarked(text) == text[:-1] and unmarked("Is it?") == "Is it"
    assert without_commas(text) == "Well don't go to the half-open door Anna it's one o'clock!"
    assert without_commas("It costs 1,200.") == "It costs 1,200."
    assert lowered_unmarked(text) == text[:-1].lower()
    assert bare(text) == "well don't go to the half-open door anna it's one o'clock"


def test_plain_is_what_a_front_end_gives():
    text = "Mister Hill went to Dublin, and I'm here. NASA said: I saw the U S A."
    assert plain(text) == "Mister hill went to dublin, and I'm here. Nasa said: I saw the U S A."


def test_no_form_loses_a_word_or_all_of_a_text():
    for text in ("Well, don't go; it's one o'clock!", "Oh!", "?!", "A", "Two words. And three more."):
        for form, _ in FORMS:
            assert re.findall(r"[\w']+", form(text).lower()) == re.findall(r"[\w']+", text.lower())
            assert form(text)


def test_forms_come_as_often_as_they_should():
    shares = np.array([share for _, share in FORMS])
    assert FORMS[0][0]("As it stands.") == "As it stands." and abs(shares.sum() - 1) < 1e-9
    found = np.bincount(drawn(20_000, np.random.default_rng(0)), minlength=len(FORMS)) / 20_000
    assert np.abs(found - shares).max() < 0.015


def test_a_tokenizer_sees_capitals_too():
    assert list(spread(["One Two"] * 3)) == ["One two", "ONE TWO", "One Two", "One Two", "One two"]
