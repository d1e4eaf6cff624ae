"""Replacements for words that are pronounced otherwise than written: from a file, a mapping, or a request."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from mktts.errors import OptionsError
from mktts.text.readers import WORDS
from mktts.text.split import check_length, clean_piece, is_wide

MAX_ENTRY_CHARS = 100  # of a word, and of its replacement
_APOSTROPHES = "'’"
_JOINERS = _APOSTROPHES + ".@"  # between two letters they are part of a word
_IPA = WORDS["ipa"]
_SOUND = re.compile("|".join(sorted(_IPA, key=len, reverse=True)))
_SILENT = re.compile(r"[ˈˌ.‿/\[\]\u0329\u0361]")  # stress, syllables, brackets, ties
_OPEN = re.compile("ɑ(?=[bdfgɡklmnpstvzðŋɾʃθ])")  # the vowel of "lot"
_SHORT = re.compile("(?<![aeɔ])([æɒɛɪʌ])([bdfgɡklmnpstvz])(?=[aeiouæɐɑɒɔəɚɛɜɝɪʊʌ])")  # as in "dinner", not "diner"
_KEPT_CHARS = 2  # context before a word that decides whether a word begins


class Lexicon:
    """Replaces whole words, or phrases of several words; the longest match is used. A word with a capital letter
    matches only this spelling. "'s" may follow a word; East Asian words match anywhere in a text."""

    def __init__(self, words: Mapping[str, str] | None = None, others: Lexicon | None = None) -> None:
        """words: word -> replacement. others: used for words that are not among them. Raises OptionsError."""
        self.tables = [_table(words)] if words else []  # empty: nothing is replaced
        self.tables += others.tables if others else []

    @classmethod
    def of(cls, source: Mapping[str, str] | str | Path | None) -> Lexicon:
        """Reads a mapping, or a UTF-8 file with a word, a tab and its replacement on each line. Raises OptionsError."""
        if not isinstance(source, str | Path):
            return cls(source)
        if not Path(source).is_file():
            raise OptionsError(f"{source}: expected a lexicon, found no file of that name")
        try:
            lines = Path(source).read_bytes().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise OptionsError(f"{source}: expected UTF-8, found other bytes at {error.start}") from None
        words: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                written, *said = line.strip("\r ").split("\t")
                if len(said) != 1:
                    raise OptionsError(f"expected a word, a tab and what is said for it, found {len(said)} tabs")
                word, said = _entry(written, *said)
                if word in words:
                    raise OptionsError(f"{word!r} stands in a line before already: leave one of them out")
            except OptionsError as error:
                raise OptionsError(f"{source}, line {number}: {error}") from None
            words[word] = said
        return cls(words)

    def say(self, text: str) -> str:
        """Returns `text` with its words replaced. Raises TextError if it becomes longer than MAX_TEXT_CHARS."""
        return LexiconFeed(self).take(text, final=True) if self.tables else text

    def find(self, text: str, at: int, final: bool) -> tuple[int, str] | None:
        """End and replacement of the word at `at`, or of the single character there; None if more text is needed."""
        found = (at + 1, text[at])
        if at and _goes_on_before(text, at):
            return found
        for end in range(at + 1, len(text) + 1):
            forms = (text[at:end], text[at:end].casefold())
            known = [table[form] for table in self.tables for form in forms if form in table]
            if not known:
                return found
            said = next(filter(None, known), "")
            goes_on = not said or _goes_on_after(text, end)
            if goes_on is None and not final:
                return None
            if not goes_on:
                found = (end, said)
        return found if final else None


class LexiconFeed:
    """Applies a lexicon to a text that arrives in pieces; holds back only what may become a word of the lexicon."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._text = ""  # a few characters of context, then the text held back
        self._at = 0  # where the text held back begins
        self._chars = 0  # number of characters returned

    def take(self, piece: str, final: bool = False) -> str:
        """Returns what is now final. Raises TextError if the text has become too long."""
        text, at, said = self._text + piece, self._at, ""
        while at < len(text) and (found := self._lexicon.find(text, at, final)) is not None:
            at, words = found
            said += words
        kept = max(0, at - _KEPT_CHARS)
        self._text, self._at = text[kept:], at - kept
        self._chars += len(said)
        check_length(self._chars)
        return said


def respelled(ipa: str) -> str | None:
    """Respells a pronunciation in IPA approximately in English letters; None for a sound that English does not have."""
    sounds = _SILENT.sub("", unicodedata.normalize("NFC", ipa)).strip()
    if not sounds or _SOUND.sub("", sounds).strip():
        return None
    sounds = _SHORT.sub(r"\1\2\2", _OPEN.sub("ɒ", sounds))
    return _SOUND.sub(lambda sound: _IPA[sound[0]], sounds)


def _entry(word: str, said: str) -> tuple[str, str]:
    """Returns both cleaned. Raises OptionsError if they cannot be an entry."""
    for part in (word, said):
        if not isinstance(part, str) or not 0 < len(part.strip()) <= MAX_ENTRY_CHARS:
            found = f"{len(part)} characters" if isinstance(part, str) else type(part).__name__
            wanted = f"a word and what is said for it, 1 to {MAX_ENTRY_CHARS} characters each"
            raise OptionsError(f"pronunciations: expected {wanted}, got {found}: {str(part)[:20]!r}")
    word, said = (" ".join(unicodedata.normalize("NFC", clean_piece(part)).split()) for part in (word, said))
    if not word or not any(map(str.isalnum, said)):
        raise OptionsError(f"pronunciations: expected letters or digits to say for {word!r}, got {said!r}")
    return word, said


def _table(words: Mapping[str, str]) -> dict[str, str]:
    """Word -> replacement, and each proper prefix of a word -> "". Raises OptionsError."""
    if not isinstance(words, Mapping):
        kind = type(words).__name__
        raise OptionsError(f"pronunciations must be a mapping of words to what is said for them, got {kind}")
    table: dict[str, str] = {}
    for word, said in words.items():
        word, said = _entry(word, said)
        written = word if any(char.isupper() or char.istitle() for char in word) else word.casefold()
        for end in range(1, len(written)):
            table.setdefault(written[:end], "")
        table[written] = said
    return table


def _in_word(char: str) -> bool:
    return char.isalnum() or char == "_" or unicodedata.category(char).startswith("M")


def _goes_on_before(text: str, at: int) -> bool:
    """Whether the text at `at` continues a word."""
    before, first = text[at - 1], text[at]
    if _in_word(before):
        return not (is_wide(before) or is_wide(first))
    return before in _JOINERS and at > 1 and _in_word(first) and _in_word(text[at - 2])


def _goes_on_after(text: str, end: int) -> bool | None:
    """Whether the word continues after `end`; None if more text is needed to decide."""
    last, after = text[end - 1], text[end : end + 3]
    if after and _in_word(after[0]):
        return unicodedata.category(after[0]).startswith("M") or not (is_wide(last) or is_wide(after[0]))
    if after and not (after[0] in _JOINERS and _in_word(last)):
        return False
    rest = after[2:] if after[:1] in _APOSTROPHES and after[1:2].lower() == "s" else after[1:]
    return _in_word(rest[0]) if rest else None
