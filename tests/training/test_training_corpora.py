"""Sentences from packages, with small packages made here: what is taken, what is refused, and how it is mixed."""

from __future__ import annotations

import lzma
from collections import Counter

import pytest
from commands import run

from mktts.errors import CheckpointError
from mktts.training.data import books, held_out, texts
from mktts.training.data.corpora import Corpora

WORDS = """a able an and animal barks big bread buy car carrying child's Dublin dog everybody for food garden good he
his in into is it king light like long loud make makes meat not of old one out over paper person pouch put sell
sharp shop she sings small song sound spread stay stone that the them things those through to two walk walked was we
went were wet with yesterday zzz brr sneer zoom
""".split()
EXAMPLES = (
    "we were able to walk",
    "the dog walked (slowly) into the garden",  # brackets
    "the dog barks vehemently",  # a word that the list has not
    "He sings! in the U.S. garden",  # a full stop inside
    "is it a dog?",
    "a sneer sneer",  # rude
    " ".join(["the dog and"] * 9),  # too long
    "naked stone",
)
VERSES = """Gen1:1 And the king went into the garden; and he walked in it; and the dog walked with the king yesterday.
Gen1:2 Thou wilt walk, dog of the king, to the garden.
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    words, net, program = (tmp_path / p for p in ("usr/share/dict", "usr/share/wordnet", "usr/bin"))
    for path in (words, net, program):
        path.mkdir(parents=True)
    (words / "american-english").write_text("\n".join(WORDS))
    quoted = "; ".join(f'"{text}"' for text in EXAMPLES)
    (net / "data.adj").write_text(
        f'  1 the licence, with "the dog barks"\n00001740 00 a 02 able 0 fit(p) 0 001 = 0 n 0000 | good; {quoted}  \n'
    )
    (net / "data.noun").write_text(
        "00000001 06 n 01 pouch 0 000 | a small (soft) paper for carrying things  \n"
        "00000002 05 n 01 dog 0 000 | an animal that barks  \n"  # animals are left out
        "00000003 18 n 01 sneer 0 000 | (ethnic slur) a person  \n"
    )
    (net / "data.verb").write_text(
        "00000004 40 v 01 sell 0 000 01 + 02 00 | put out for bread  \n"
        "00000005 40 v 01 stay 0 000 01 + 02 00 | put out for  \n"  # of what, it does not say
    )
    (net / "data.adv").write_text("")
    (program / "bible").write_text(f"#!/bin/sh\ncat <<'END'\n{VERSES}END\n")
    (program / "bible").chmod(0o755)
    book = ['He said, "The dog barks." Then 2 dogs came.', "Thou shalt walk in the light."]
    monkeypatch.setattr(books, "SOURCES", {source: lambda _: iter(book) for source in books.SOURCES})
    return tmp_path


def test_examples_are_cleaned_and_what_cannot_be_is_left(folder):
    assert list(Corpora(folder).examples()) == ["We were able to walk.", "Is it a dog?"]


def test_glosses_become_sentences(folder):
    assert list(Corpora(folder).glosses()) == [
        "A pouch is a small paper for carrying things.",
        "To sell is to put out for bread.",
    ]


def test_prose_comes_in_clauses_and_without_old_words(folder):
    assert list(Corpora(folder).prose()) == [
        "And the king went into the garden.",
        "And the dog walked with the king yesterday.",
    ]


def test_books_come_in_sentences_that_the_word_list_has_without_figures_and_old_words(folder):
    assert list(Corpora(folder).book("novels")) == ["The dog barks."]


def test_words_are_pronounceable(folder):
    words = Corpora(folder).words()
    assert {"Dublin", "zoom", "garden"} <= set(words)
    assert not {"zzz", "brr", "child's", "sneer"} & set(words)


def test_a_package_that_is_absent_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="wamerican"):
        Corpora(tmp_path)


def test_the_mixture_is_full_shuffled_by_seed_and_without_repeats(folder, tmp_path, monkeypatch):
    lines, counts = texts.mixed(Corpora(folder), 400, 1)
    again, _ = texts.mixed(Corpora(folder), 400, 1)
    other, _ = texts.mixed(Corpora(folder), 400, 2)
    assert lines == again and Counter(lines) != Counter(other)
    assert len(lines) == sum(counts.values()) == 400
    assert counts[texts.QUOTED] == counts[texts.GLOSSES] == counts[texts.PROSE] == 2  # all that there are
    for source in (texts.SHORT, texts.SALAD, texts.PAIRS, texts.REPLIES):
        assert counts[source] == round(400 * texts.SHARES[source])
    assert sum(texts.SHARES.values()) == pytest.approx(1)
    replies = set(texts.agent_replies())
    assert Counter(held_out.normal(line) for line in lines if line not in replies).most_common(1)[0][1] == 1
    monkeypatch.setattr(held_out, "_sentences", lambda: frozenset(["we were able to walk"]))
    assert "We were able to walk." in lines and "We were able to walk." not in texts.mixed(Corpora(folder), 400, 1)[0]


def test_the_command_takes_the_folder(folder, tmp_path):
    run("train texts", "--corpora", folder, "--count", 100, "--out", tmp_path / "l.xz")
    assert len(lzma.open(tmp_path / "l.xz", "rt").read().splitlines()) == 100
