"""Cleans and validates text before tokenization, and splits long text into segments: a complete text at the best place
that fits; an arriving text, whose beginning is already spoken, at the next good place."""

import re
import unicodedata
from enum import IntEnum

from mktts.errors import TextError
from mktts.text.readers import LISTS

SEGMENT_CHARS = 300  # default length of one generation: about 20 s of speech
MAX_TEXT_CHARS = 100_000  # about two hours of speech; guards against mistakes and is not a limit of the model

# Invisible characters the model was not trained to speak: C0/C1 controls, soft hyphen, zero-width space and direction
# marks, invisible operators, byte-order mark, interlinear marks, lone surrogates. Joiners (U+200C, U+200D) are kept,
# because Persian, Hindi and emoji need them.
_REMOVED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)
_SPACES = str.maketrans(dict.fromkeys("\t\r\x0b\x0c\x1c\x1d\x1e\x1f", " ") | dict.fromkeys("\x85\u2028\u2029", "\n"))
_SPACE = re.compile(r"\s*")

_CLOSERS = "\"'”’»›)]}」』）】》〉"
_WIDE_SENTENCE = "。！？｡．"
_SENTENCE = ".!?…"
_WIDE_CLAUSE = "，、；："
_CLAUSE = ",;:—–"
_MARKS = _CLOSERS + _WIDE_SENTENCE + _WIDE_CLAUSE + _SENTENCE + _CLAUSE
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"  # these modify the character before
_FIRST_WIDE = 0x2E80  # first code point of East Asian scripts
_LOOK_BACK_CHARS = 24  # enough for the longest abbreviation and its closers

_STOPPED = re.compile(r"(?:\w\.)*\w|\d{1,2}")  # "J" in "J. R. R. Tolkien", "U.S" in "U.S.", "10" in "10. Mai"
# Quality of a place for a cut; larger is better. INSIDE: the cut would split one visible character.
Cut = IntEnum("Cut", "INSIDE NONE SPACE CLAUSE SENTENCE", start=-1)


def is_wide(char: str) -> bool:
    """Whether a character is from an East Asian script, where no space is needed after a mark or around a word."""
    return ord(char) >= _FIRST_WIDE


def clean_piece(piece: str, what: str = "text") -> str:
    """Removes characters that cannot be spoken, one by one, so that clean(a) + clean(b) == clean(a + b). Tabs and the
    like become a space, line and paragraph separators a newline. Raises TextError if `piece` is not a str."""
    if not isinstance(piece, str):
        raise TextError(f"{what} must be a str, got {type(piece).__name__}")
    return _REMOVED.sub("", piece.translate(_SPACES))


def clean_text(text: str, what: str = "text") -> str:
    """Cleans and strips a complete text. Raises TextError if nothing is left, or if it exceeds MAX_TEXT_CHARS."""
    cleaned = clean_piece(text, what).strip()
    if not cleaned:
        found = "an empty string" if not text else f"{len(text)} characters, none of them visible: {text[:20]!r}"
        raise TextError(f"expected {what} to speak, got {found}")
    check_length(len(cleaned), what)
    return cleaned


def check_length(chars: int, what: str = "text") -> None:
    """Raises TextError if a text of `chars` characters exceeds MAX_TEXT_CHARS."""
    if chars > MAX_TEXT_CHARS:
        raise TextError(f"{what} may have {MAX_TEXT_CHARS} characters, got {chars}: send it in several requests")


def segment_chars(longest: int | None, fed: bool) -> int:
    """The `max_chars` for splitting. longest: `Checkpoint.longest_text_chars`. fed: for `FeedSplitter`."""
    if longest is None:
        return SEGMENT_CHARS
    return min(SEGMENT_CHARS, int(longest / FeedSplitter.LONGEST) if fed else longest)


def split_text(text: str, max_chars: int) -> list[str]:
    """Splits a cleaned text into pieces of at most `max_chars`: at the last sentence end that fits, else at the last
    clause mark, else at the last space, else anywhere. Only whitespace at the cuts is dropped."""
    pieces, start = [], 0
    while len(text) - start > max_chars:
        end, best = start + max_chars, Cut.INSIDE
        for place in range(end, start, -1):
            after = _SPACE.match(text, place).end()
            cannot = after == len(text) or text[place - 1].isspace()
            grade = Cut.NONE if cannot else boundary(text[start:place], text[place:after], text[after])
            if grade > best:
                end, best = place, grade
            if best is Cut.SENTENCE:
                break
        pieces.append(text[start:end])
        start = _SPACE.match(text, end).end()
    return [*pieces, text[start:]] if start < len(text) else pieces


class FeedSplitter:
    """Splits text that arrives in pieces; the cuts depend only on the text, not on the pieces. A segment ends at the
    first sentence end after `max_chars`, at a clause mark after 1.5 times as many, at a space after twice as many, and
    anywhere at `LONGEST` times as many."""

    LONGEST = 2.5

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._segment = ""  # the current segment
        self._gap = ""  # whitespace held back until the next visible character decides whether there is a cut

    def push(self, piece: str) -> list[str]:
        """Returns texts: the first, perhaps "", continues the current segment; each of the others starts a new one."""
        texts = [""]
        for char in piece:
            if char.isspace():
                self._gap += char
                continue
            # The required grade drops by one for each half of `max_chars` beyond it.
            needed = max(Cut.NONE, 5 - 2 * len(self._segment) // self._max_chars)
            if needed <= Cut.SENTENCE and boundary(self._segment, self._gap, char) >= needed:
                texts.append("")
                self._segment = ""
            added = self._gap + char if self._segment else char
            texts[-1] += added
            self._segment += added
            self._gap = ""
        return texts


def boundary(before: str, gap: str, after: str) -> Cut:
    """Grades a cut between `before` and the character `after`. gap: the whitespace between the two."""
    if gap.count("\n") > 1:
        return Cut.SENTENCE
    before = before[-_LOOK_BACK_CHARS:]
    core = before.rstrip(_CLOSERS)
    mark = core[-1:]
    if not gap and (after in _MARKS or (after.isascii() and mark.isalnum())):
        return Cut.NONE  # a mark stays with the text before it, and a word, where most places are, is not cut
    if mark and mark in _WIDE_SENTENCE:
        return Cut.SENTENCE
    if before[-1:] in _WIDE_CLAUSE:
        return Cut.CLAUSE
    ends = mark and mark in _SENTENCE and not _goes_on(core, after, quoted=core != before)
    if ends and (gap or is_wide(after)):
        return Cut.SENTENCE
    if not gap:
        joined = "\u200d" in (before[-1], after) or after in _SKIN_TONES or unicodedata.category(after).startswith("M")
        return Cut.INSIDE if joined else Cut.NONE
    return Cut.CLAUSE if "\n" in gap or before[-1] in _CLAUSE else Cut.SPACE


def _goes_on(core: str, after: str, quoted: bool) -> bool:
    """Whether the sentence continues after the mark at the end of `core`: an abbreviation, an ordinal, a quotation."""
    if after.islower():
        return quoted or core[-1] not in "!?"
    if core[-1] != "." or core.endswith(".."):
        return False
    word = (core[:-1].split() or [""])[-1].lstrip("(\"'“‘«[").lower()
    return word in LISTS["abbreviations"] or bool(_STOPPED.fullmatch(word))  # for the model's European languages
