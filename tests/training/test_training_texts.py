"""Sentences to learn from: what may be in a list, and where it comes from."""

import json
import lzma
import random
import re

from commands import run

from mktts.common import write_whole
from mktts.training.data import texts

FILES = {
    "usr/share/dict/american-english": "the\na\ncat\nsat\nhello\nyou\nare\nwe\nspoke\nof\npeace\nwhale\nran\nbig\nred",
    "usr/share/wordnet/data.noun": '00 05 n 01 cat 0 000 | a pet; "the big cat sat"; "the qqx cat"\n',
    "npm/datasets-sotu/package/data/1950_x.txt": "We spoke of peace. The red cat\nran.\n\nThe naked cat ran.",
    "npm/datasets-sotu/package/data/2001_x.txt": 'He said. "We are big." The cat ran',
    "npm/datasets-moby-dick/package/data/chapter_1.json": '{"text": "The whale ran; the whale ran big."}',
    "pip/chatterbot_corpus/data/english/x.yml": "- - Hello you\n  - 'We are you''re'\n",
    "usr/share/doc/python3.11/html/_sources/a/b.rst.txt": "Title\n=====\n\nThe cat sat.\n\n   code cat\n",
}


def test_a_list_is_in_the_front_ends_words_repeats_itself_and_holds_nothing_that_judges():
    lines, counts = texts.mixed(200, 5)
    assert texts.mixed(200, 5) == (lines, counts) and texts.mixed(50, 6)[0] != lines[:50]
    assert len(lines) == 200 == sum(counts.values()) and counts["agent"] == 4
    assert not [line for line in lines if texts.is_held_out(line) or re.search(r"\d|\{|\|", line)]
    grammars = [line for line in lines if line not in {texts.as_spoken(s) for s in texts.agent_replies()}]
    assert len(set(grammars)) == len(grammars) and max(map(len, lines)) <= texts.MAX_LETTERS
    assert sum("?" in line for line in lines) > 12


def test_what_judges_is_held_out_in_any_case_and_so_are_its_longer_parts():
    sentence = next(line for line in texts.NATURAL if len(line.split()) > 8)
    part = " ".join(sentence.split()[1:7])
    for text in (sentence, sentence.upper(), f"And {part} too", texts.HELD_OUT[3].lower()):
        assert texts.is_held_out(text), text
    assert not texts.is_held_out(" ".join(sentence.split()[1:5]) + " something else entirely")
    assert len(texts.NATURAL) == 318 and len(texts.HELD_OUT) == 640


def test_packages_give_their_sentences_and_what_is_not_fit_stays_outside(tmp_path):
    for name, text in FILES.items():
        write_whole(tmp_path / name, text.encode())
    lines, counts = texts.mixed(200, 0, tmp_path)
    expected = {
        "examples": {"The big cat sat."},
        "speeches": {"We spoke of peace.", "The red cat ran."},
        "addresses": {"We are big.", "The cat ran."},
        "whale": {"The whale ran; the whale ran big."},
        "dialogue": {"Hello you."},
        "manuals": {"The cat sat."},
    }
    for source, wanted in expected.items():
        said = {half for line in lines for half in re.split(r"(?<=[.?!]) ", line)}
        assert {texts.as_spoken(text) for text in wanted} <= said and counts[source] >= 1, source
    assert not [line for line in lines if "naked" in line or "qqx" in line]


def test_every_pattern_of_the_grammar_can_be_filled():
    rng = random.Random(0)
    assert set(texts.WEIGHTS) == set(texts.TEMPLATES)
    for kind, patterns in texts.TEMPLATES.items():
        for pattern in patterns:
            for _ in range(3):
                text = texts._filled(rng, pattern)
                assert not re.search(r"[{}|/_]|\ba [aeio]", text), (kind, text)
    forms = dict(zip(("", "s", "ed", "en", "ing"), texts.LISTS["handle"][0], strict=True))
    assert forms == {"": "find", "s": "finds", "ed": "found", "en": "found", "ing": "finding"}
    assert [texts.article(word) for word in "hour unit uncle house one-way".split()] == "an a an a a".split()


def test_the_command_leaves_out_words_that_the_teacher_lacks(tmp_path, monkeypatch, capsys):
    class Read:
        def knows(self, text):
            return not text.startswith("T")

    monkeypatch.setattr(texts, "load_phonemes", lambda folder: Read())
    run("train texts", "--count", 30, "--kokoro", tmp_path, "--out", tmp_path / "t.xz")
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = lzma.decompress((tmp_path / "t.xz").read_bytes()).decode().splitlines()
    assert 0 < len(lines) < 30 and said["sentences"] == len(lines) and sum(said["sources"].values()) == 30
    assert all(line[0] != "T" for line in lines)
    run("train texts", "--natural", "--out", tmp_path / "n.xz")
    assert len(lzma.decompress((tmp_path / "n.xz").read_bytes()).decode().splitlines()) == 318
