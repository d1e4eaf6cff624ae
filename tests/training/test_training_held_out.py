"""The sentences to be judged by: frozen, fit for teacher and recogniser, and apart from what is learned from."""

from __future__ import annotations

import hashlib
import re
from itertools import islice

import pytest
from absent import needs

from mktts.training.data import held_out
from mktts.training.data.texts import agent_replies, training_sentences

SHAPE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:?!'$%-]*[.?!]")


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_the_grammars_sentences_are_frozen_different_and_fit_for_a_recogniser():
    held = held_out.held_out()
    assert len({held_out.normal(text) for text in held}) == len(held) >= 640
    assert digest(held).startswith("9cee1f61915f23d2"), "what judges must never change: earlier figures would lie"
    lengths = [len(text.split()) for text in held]
    assert min(lengths) >= 2 and max(lengths) <= 25 and sum(n > 18 for n in lengths) < 0.05 * len(held)
    assert all(SHAPE.fullmatch(text) and not re.search(r"\d", text) for text in held)


def test_the_natural_sentences_are_frozen_different_and_of_many_lengths():
    natural = held_out.natural()
    assert len({held_out.normal(text) for text in natural}) == len(natural) == 318
    assert digest(natural).startswith("0a4ff07f402ddd7a"), "what judges must never change: earlier figures would lie"
    lengths = [len(text.split()) for text in natural]
    assert min(lengths) == 4 and max(lengths) == 20 and len(set(lengths)) > 12
    assert all(SHAPE.fullmatch(text) and not re.search(r"\d", text) for text in natural)
    assert not set(map(held_out.normal, natural)) & set(map(held_out.normal, held_out.held_out()))


@needs("pocketsphinx")
def test_the_recogniser_has_every_word_of_the_natural_sentences():
    from mktts.measure.recogniser import Recogniser, vocabulary_of

    recogniser = Recogniser()
    assert [word for word in vocabulary_of(held_out.natural()) if not recogniser.knows(word)] == []


LONG = "The captain knew that the ship would not reach land."
SHORT = "He missed the train."


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        LONG.upper(),
        "the captain knew that the ship would not reach land",
        "THE CAPTAIN, KNEW THAT: THE SHIP!",  # six words in a row
        "And so it was known that the ship would not reach land, they said.",
        "Yesterday he missed the train again.",  # all of a short sentence
        "I don’t believe you!",  # a curly apostrophe
        held_out.held_out()[0].lower(),
    ],
)
def test_what_is_too_near_is_refused(text):
    assert held_out.is_held_out(text) and held_out.refused([text, "Nothing like it."]) == [text]


@pytest.mark.parametrize(
    "text",
    ["The captain knew that the boat would not reach land.", "The captain knew that the.", "He missed a train.", ""],
)
def test_five_words_in_a_row_are_not_too_near(text):
    assert not held_out.is_held_out(text)


def test_a_grammar_sentence_is_refused_only_whole():
    first = held_out.held_out()[0]
    assert held_out.is_held_out(first) and not held_out.is_held_out(f"{first[:-1]} and the other wall.")


def test_nothing_that_is_learned_from_is_too_near():
    assert held_out.refused(islice(training_sentences(1), 5_000)) == [] == held_out.refused(agent_replies())
