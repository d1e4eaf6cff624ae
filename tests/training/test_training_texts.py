"""The sentences: the same by seed, rich, in good shape, and apart from those that judge."""

from __future__ import annotations

import json
import lzma
import random
import re
import tomllib
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from commands import run

from mktts.training.data import figures, grammar, held_out, texts
from mktts.training.data.words import LISTS, TEMPLATES, Entry, article

SHAPE = re.compile(r"[A-Z0-9$][A-Za-z0-9 ,.;:?!'$%-]*[.?!]")


def test_the_same_seed_gives_the_same_sentences_and_another_seed_others():
    first, again, other = (list(islice(texts.training_sentences(seed), 50)) for seed in (3, 3, 4))
    assert first == again != other


def test_few_repeats_and_many_words():
    drawn = [held_out.normal(text) for text in islice(texts.training_sentences(0), 20_000)]
    assert len(set(drawn)) > 0.97 * len(drawn)
    assert len({word for text in drawn for word in text.split() if word.isalpha()}) > 2_500


def test_every_sentence_has_the_shape_of_one_and_no_slot_is_left():
    rng = random.Random(5)
    for template in (t for many in TEMPLATES.values() for t in many):
        text = grammar.fill(rng, template)
        assert SHAPE.fullmatch(text), text


def test_kinds_are_all_drawn_and_words_are_common_enough():
    assert set(grammar.WEIGHTS) == set(TEMPLATES)
    assert len({word for entries in LISTS.values() for entry in entries for word in entry.base.split()}) > 2_000


@pytest.mark.parametrize(
    ("entry", "form", "expected"),
    [
        (Entry("box"), "s", "boxes"),
        (Entry("city"), "s", "cities"),
        (Entry("key"), "s", "keys"),
        (Entry("mouse", ("mice",)), "s", "mice"),
        (Entry("bus stop"), "s", "bus stops"),
        (Entry("stop"), "ed", "stopped"),
        (Entry("open"), "ing", "opening"),
        (Entry("carry"), "ed", "carried"),
        (Entry("dance"), "ing", "dancing"),
        (Entry("agree"), "ing", "agreeing"),
        (Entry("watch"), "s", "watches"),
        (Entry("take", ("took", "taken")), "en", "taken"),
        (Entry("take", ("took", "taken")), "ing", "taking"),
        (Entry("find", ("found",)), "en", "found"),
        (Entry("pick up", ("picked up", "picked up", "picking up")), "s", "picks up"),
    ],
)
def test_english_bends(entry, form, expected):
    assert entry.form(form) == expected


def test_articles_follow_the_sound():
    words = "apple hour unit umbrella uninteresting university European one-way honest house usual usher".split()
    assert [article(word) for word in words] == ["an", "an", "a", "an", "an", "a", "a", "a", "an", "a", "a", "an"]


def test_numbers_in_words():
    numbers = (0, 13, 40, 42, 100, 317, 2_000, 85_012)
    assert [grammar.spoken(n) for n in numbers] == [
        "zero",
        "thirteen",
        "forty",
        "forty-two",
        "one hundred",
        "three hundred seventeen",
        "two thousand",
        "eighty-five thousand twelve",
    ]


def test_figures_in_words_are_whole_sentences_of_every_kind():
    rng = random.Random(0)
    found = [figures.sentence(rng) for _ in range(4000)]
    assert all(re.fullmatch(r"[A-Z][A-Za-z ,'-]*[.?]", text) for text in found)
    for said in ("dollars and", " A M", " oh ", "percent", "W W W dot", "point", "twenty-first", "teen hundred"):
        assert any(said in text for text in found), said
    wanted = ["first", "twelfth", "twentieth", "thirty-third", "forty-eighth", "one hundredth"]
    assert [figures.ordinal(n) for n in (1, 12, 20, 33, 48, 100)] == wanted


def test_what_judges_is_never_trained_on(monkeypatch):
    drawn = list(islice(texts.training_sentences(1), 20_000))
    assert not [text for text in drawn if held_out.is_held_out(text)]
    other = {held_out.normal(text) for text in set(drawn[:5_000]) - set(texts.agent_replies())}
    monkeypatch.setattr(held_out, "_sentences", lambda: frozenset(other))
    again = list(islice(texts.training_sentences(1), 5_000))  # the same draws, now with some of them held out
    assert not [half for text in again for half in re.split(r"(?<=[.!?]) ", text) if held_out.normal(half) in other]


def test_the_package_takes_the_text_files_along():
    data = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "*.txt" in data["package-data"]["mktts.training.data"]


def test_the_command_writes_a_list(tmp_path, capsys):
    out = tmp_path / "texts.xz"
    assert run("train texts", "--count", 300, "--seed", 2, "--out", out) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["sentences"] == 300 and last["sources"] == {"grammar": 300} and last["different_words"] > 500
    lines = lzma.open(out, "rt").read().splitlines()
    replies = set(texts.agent_replies())
    assert len(lines) == 300
    assert all(SHAPE.fullmatch(line) for line in lines)
    assert Counter(line for line in lines if line not in replies).most_common(1)[0][1] == 1
