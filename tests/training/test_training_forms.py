"""Written forms of a text, and how they are drawn."""

from __future__ import annotations

import re

import numpy as np

from mktts.training.data.forms import FORMS, bare, continued, drawn, unmarked, without_commas


def test_every_form_by_hand():
    text = "Well, don't go to the half-open door, Anna; it's one o'clock!"
    assert continued(text) == "w" + text[1:] and continued("I am here.") == "I am here."
    assert continued("A boat.") == "a boat." and continued("B C U.") == "B C U."
    assert unmarked(text) == text[:-1] and unmarked("Is it?") == "Is it"
    assert without_commas(text) == "Well don't go to the half-open door Anna it's one o'clock!"
    assert without_commas("It costs 1,200.") == "It costs 1,200."
    assert bare(text) == "well don't go to the half-open door Anna it's one o'clock"


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
