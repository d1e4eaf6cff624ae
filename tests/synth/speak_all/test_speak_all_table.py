"""Tables of sentences: what is read, what is a bad line, what is refused as a whole."""

from __future__ import annotations

import json

import pytest

from mktts.errors import SentencesError
from mktts.synth.speak_all.sentences import COLUMNS, BadLine, Sentence, Table


def table(tmp_path, name: str, content: str | bytes) -> Table:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Table(path)


def lines(*objects: object) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in objects)


def test_the_three_kinds_say_the_same(tmp_path):
    wanted = [Sentence(2, "a", "Hello.", seed=7), Sentence(4, "b", "Good day.", language="english")]
    tsv = "seed\tid\ttext\tlanguage\n7\ta\tHello.\t\n\n\tb\tGood day.\tenglish\n"
    jsonl = "\n" + lines({"id": "a", "text": "Hello.", "seed": 7, "voice": None})
    jsonl += "  \n" + lines({"id": "b", "text": "Good day.", "language": "english"})
    for name, content in (("t.tsv", tsv), ("t.jsonl", jsonl)):
        for variant in (content, "\ufeff" + content, content.replace("\n", "\r\n"), content[:-1]):
            assert list(table(tmp_path, name, variant)) == wanted
    plain = table(tmp_path, "t.TXT", "Hello.\n\nGood\tday.\n")
    assert list(plain) == [Sentence(1, "000001", "Hello."), Sentence(3, "000003", "Good\tday.")]
    assert list(plain) == list(plain)


def test_quotation_marks_and_backslashes_are_text(tmp_path):
    (sentence,) = table(tmp_path, "t.tsv", 'id\ttext\n1\t"Go\\n," she said.\n')
    assert sentence.text == '"Go\\n," she said.'


def test_a_number_may_be_an_id(tmp_path):
    assert [one.id for one in table(tmp_path, "t.jsonl", lines({"id": 12, "text": "x"}))] == ["12"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "could not read it"),
        ("[" * 100_000, "could not read it"),
        ("[1]", "expected a JSON object, found list"),
        ('{"id": "x"}', "text is missing"),
        ('{"text": "x"}', "id is missing"),
        ('{"id": "x", "text": 5}', "text must be a string, found int"),
        ('{"id": true, "text": "x"}', "id must be a string, found bool"),
        ('{"id": "x", "text": "x", "seed": -1}', "seed must be a whole number"),
        ('{"id": "x", "text": "x", "seed": 1.5}', "seed must be a whole number"),
        ('{"id": "x", "text": "x", "seed": "one"}', "seed must be a whole number, found 'one'"),
        ('{"id": "x", "text": "x", "max_frames": 0}', "max_frames must be a whole number"),
        ('{"id": "first", "text": "x"}', "'first' stands in line 1 already"),
        ('{"id": "FIRST", "text": "x"}', "'FIRST' stands in line 1 already"),
        (b"\xff\xfe", "expected UTF-8"),
        (b"x" * (3 << 20), "expected at most 1048576 bytes"),
    ],
)
def test_a_bad_line_is_one_line_and_the_others_go_on(tmp_path, line, message):
    first, last = (lines({"id": name, "text": "x"}).encode() for name in ("first", "last"))
    line = line if isinstance(line, bytes) else line.encode()
    one, bad, other = table(tmp_path, "t.jsonl", first + line + b"\n" + last)
    assert (one.id, other.id, other.line) == ("first", "last", 3)
    assert isinstance(bad, BadLine) and bad.line == 2 and message in bad.error and "\n" not in bad.error


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", ".hidden", "../up", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "-rf", " a", "a ", "x" * 201]
    + ["\ud800", "a\u2028b", "é" * 101, "\x7f"],
)
def test_an_id_that_is_no_name_of_a_file_is_a_bad_line(tmp_path, name):
    (bad,) = table(tmp_path, "t.jsonl", lines({"id": name, "text": "x"}))
    assert isinstance(bad, BadLine) and bad.error.startswith("id ") and len(bad.error) < 250


@pytest.mark.parametrize("name", ["a", "a.b", "Größe 3", "你好", "x" * 200, "con%2F", "manifest", "a:b"])
def test_what_is_a_name_is_an_id(tmp_path, name):
    (sentence,) = table(tmp_path, "t.jsonl", lines({"id": name, "text": "x"}))
    assert sentence.id == name


def test_rows_of_another_length_are_bad_lines(tmp_path):
    found = list(table(tmp_path, "t.tsv", "id\ttext\na\nb\tx\ty\nc\tgood\n"))
    assert [getattr(one, "error", "") for one in found] == [
        "expected 2 columns, found 1", "expected 2 columns, found 3", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.tsv", "id\tsentence\nx\ty\n", "text is missing"),
        ("t.tsv", "name\ttext\nx\ty\n", "id is missing"),
        ("t.tsv", "id\ttext\ttext\n", "column 'text' stands twice"),
        ("t.jsonl", '{"sentence": "x"}\n{"id": "a", "text": "b"}\n', "id and text is missing"),
        ("t.jsonl", "", "found an empty file"),
        ("t.tsv", "\n\n", "found an empty file"),
        ("t.tsv", b"\xff\xfei\0d\0", "line 1: expected UTF-8"),
        ("t.csv", "id,text\n", "expected a name that ends in .jsonl, .tsv, .txt"),
    ],
)
def test_a_table_without_its_columns_is_one_line_of_error(tmp_path, name, content, message):
    with pytest.raises(SentencesError, match=message) as error:
        table(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_can_be_read_once_only_is_refused(tmp_path):
    with pytest.raises(SentencesError, match="found nothing"):
        Table(tmp_path / "no.txt")
    with pytest.raises(SentencesError, match="found something else"):
        Table(tmp_path.rename(tmp_path.with_name("folder.txt")))


def test_columns_that_nothing_uses_are_named(tmp_path):
    assert list(table(tmp_path, "t.tsv", "id\ttext\tmood\nx\ty\tz\n").unused) == ["mood"]
    found = table(tmp_path, "t.jsonl", lines(dict.fromkeys(COLUMNS), {"id": "x", "text": "y", "mood": 1, "pace": 2}))
    assert [type(one) for one in found] == [BadLine, Sentence] and set(found.unused) == {"mood", "pace"}
