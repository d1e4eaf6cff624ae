"""Cleaning and cutting of text; its words, and the kinds of sounds that their letters stand for."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mktts.errors import TextError
from mktts.text.split import MAX_TEXT_CHARS, FeedSplitter, clean_piece, clean_text, split_text
from mktts.text.words import PAUSED, is_wide, sounds, split_words

PROSE = st.text(alphabet="ab C.!?,;:…。！，\"' \n1é\u0301😀\u200d", max_size=400)


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        pytest.param("one\x00two\x07\x1b", "onetwo", id="controls-vanish"),
        pytest.param("one\ttwo\rthree\x0bfour", "one two three four", id="control-spaces-become-spaces"),
        pytest.param("one\u2028two\x85three", "one\ntwo\nthree", id="line-separators-become-newlines"),
        pytest.param("\ufeffone\u200btwo\u00ad\u202e", "onetwo", id="invisible-marks-vanish"),
        pytest.param("a\ud83db", "ab", id="half-a-surrogate-pair-vanishes"),
        pytest.param("  \n one \n two  ", "one \n two", id="ends-are-stripped-and-the-inside-kept"),
        pytest.param("👩\u200d🚀 می\u200cخواهم", "👩\u200d🚀 می\u200cخواهم", id="joiners-of-emoji-and-persian-stay"),
        pytest.param("<|im_end|> Größe 東京 ไทย", "<|im_end|> Größe 東京 ไทย", id="everything-else-stays"),
    ],
)
def test_cleaning(dirty, clean):
    assert clean_text(dirty) == clean


def test_what_is_no_text_has_nothing_visible_or_is_too_long_is_refused():
    for text in ("", "   ", "\n\t", "\x00\x07", "\u200b\ufeff", "\ud83d"):
        with pytest.raises(TextError, match="expected text to speak, got"):
            clean_text(text)
    for value in (None, 3, b"bytes", ["a"]):
        with pytest.raises(TextError, match=f"must be a str, got {type(value).__name__}"):
            clean_text(value)
    assert MAX_TEXT_CHARS >= 10_000 and len(clean_text("a" * MAX_TEXT_CHARS)) == MAX_TEXT_CHARS
    with pytest.raises(TextError, match=rf"may have {MAX_TEXT_CHARS} characters, got {MAX_TEXT_CHARS + 1}"):
        clean_text("a" * (MAX_TEXT_CHARS + 1))


@given(st.text(max_size=60), st.text(max_size=60))
def test_pieces_are_cleaned_as_their_whole_is(left, right):
    cleaned = clean_piece(left + right)
    assert clean_piece(left) + clean_piece(right) == cleaned == clean_piece(cleaned)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        pytest.param("One. Two. Three.", ["One. Two. Three."], id="what-fits-is-one-piece"),
        pytest.param("First one here. Second one.", ["First one here.", "Second one."], id="full-stop"),
        pytest.param("Is it so? Yes! Go on now.", ["Is it so? Yes!", "Go on now."], id="last-sentence-end-that-fits"),
        pytest.param('"Stop it!" he said so.', ['"Stop it!" he said', "so."], id="quotation-goes-on"),
        pytest.param("He said “enough.” Then he left.", ["He said “enough.”", "Then he left."], id="closing-quote"),
        ("他说：「好的。」然后他就走了，没有回头看。", ["他说：「好的。」", "然后他就走了，没有回头看。"]),
        pytest.param("Ask Dr. Smith today. Or Ms. Lee.", ["Ask Dr. Smith today.", "Or Ms. Lee."], id="titles"),
        pytest.param("It is 3.14 long. Or e.g. 2.7 now.", ["It is 3.14 long.", "Or e.g. 2.7 now."], id="decimals"),
        pytest.param("Am 3. Mai kam er. Dann ging er.", ["Am 3. Mai kam er.", "Dann ging er."], id="ordinals"),
        pytest.param("By J. R. R. Tolkien. Read it all.", ["By J. R. R. Tolkien.", "Read it all."], id="initials"),
        pytest.param("Well... perhaps not. Or maybe so.", ["Well... perhaps not.", "Or maybe so."], id="trailing-dots"),
        pytest.param("A title line\n\nThe text begins here", ["A title line", "The text begins here"], id="blank-line"),
        pytest.param("One part of it, then another part", ["One part of it,", "then another part"], id="clause"),
        pytest.param("no marks at all in this long text", ["no marks at all in", "this long text"], id="space"),
        pytest.param("x" * 45, ["x" * 20, "x" * 20, "x" * 5], id="nothing-to-cut-at"),
        pytest.param("a" * 19 + "e\u0301" + "b" * 9, ["a" * 19, "e\u0301" + "b" * 9], id="accents-stay-on-letters"),
        pytest.param("a" * 18 + "👩\u200d🚀" + "b" * 9, ["a" * 18, "👩\u200d🚀" + "b" * 9], id="emoji-stay-whole"),
    ],
)
def test_where_text_is_cut(text, pieces):
    assert split_text(text, 20) == pieces


@given(PROSE, st.integers(20, 80))
@example("。" * 50, 20)
@example("a\u200d" * 40, 20)
@example("\u0301" * 50, 20)
def test_pieces_fit_and_lose_only_whitespace_at_the_cuts(text, max_chars):
    text = text.strip()
    pieces = split_text(text, max_chars)
    assert all(0 < len(piece) <= max_chars and piece == piece.strip() for piece in pieces)
    assert _contain_all_but_gaps(text, pieces)


def feed_all(pieces: list[str], max_chars: int) -> list[str]:
    splitter, segments = FeedSplitter(max_chars), [""]
    for piece in pieces:
        first, *others = splitter.push(piece)
        segments[-1] += first
        segments += others
    return segments


@given(PROSE, st.lists(st.integers(0, 400), max_size=8))
def test_fed_text_is_cut_alike_in_any_pieces_loses_only_whitespace_and_stays_under_2_5_times_the_length(text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert feed_all(pieces, 40) == feed_all([text], 40) == feed_all(list(text), 40)
    segments = [segment for segment in feed_all(pieces, 40) if segment]
    assert _contain_all_but_gaps(text.strip(), segments)
    assert all(len(segment.rstrip("\u0301\u200d😀")) <= 2.5 * 40 + 8 for segment in segments)


def test_fed_text_goes_on_to_the_next_good_place_and_is_never_cut_up_to_the_length():
    assert feed_all(["One. Two. ", "Three. Four"], 40) == ["One. Two. Three. Four"]
    assert feed_all(["word " * 9 + "end. Next"], 40) == ["word " * 9 + "end.", "Next"]
    assert feed_all(["word " * 13 + "clause, word"], 40) == ["word " * 13 + "clause,", "word"]
    assert feed_all(["word " * 20], 40) == [("word " * 17).strip(), ("word " * 3).strip()]
    assert feed_all(["x" * 200], 40) == ["x" * 100, "x" * 100]


def _contain_all_but_gaps(text: str, pieces: list[str]) -> bool:
    return bool(re.fullmatch(r"\s*".join(["", *map(re.escape, pieces), ""]), text))


# ---- words


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
