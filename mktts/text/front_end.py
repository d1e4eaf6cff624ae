"""The front end called "english" in a checkpoint's generation_config.json: English is read, other languages pass."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache

from mktts.errors import TextError
from mktts.text import english
from mktts.text.lexicon import Lexicon
from mktts.text.readers import WORDS
from mktts.text.split import Chain, Feed

ENGLISH = "english"
AUTO = "auto"
_LATIN = "LATIN"
_LONGEST_CHARS = 240  # held back at most: a text without a plain word is cut at a space
_ENDS = ".!?"
_PAUSES = ",;:"
_MARKS = _ENDS + _PAUSES
_ITEM = re.compile(r"[-*•]|\d{1,2}[.)]")  # what begins a line of a list
_BULLET = re.compile(r"^(?:[-*•>]|#{1,6})(?=\s|$)\s*")


class FrontEndFeed(Feed):
    """What is read, joined, is one sentence after another, each begun with a capital and ended by a mark."""

    def __init__(self, languages: tuple[str, ...]) -> None:
        """languages: that the text may be in. English alone is read, other text stays as it is."""
        self._languages = languages
        self._scripts = {_LATIN}.union(*(WORDS["scripts"].get(language, ()) for language in languages))
        self._reads = languages == (ENGLISH,)
        self._letters = False  # one came, or a digit
        self._held = ""  # words that may belong together, a space behind each
        self._word = ""  # the last one, perhaps not complete
        self._gap = ""  # whitespace after it
        self._begins_line = False  # the last word
        self._said = ""  # the last mark or letter that was handed on
        self._pause = ""  # a mark after it that is handed on only if words follow

    def take(self, piece: str, final: bool) -> str:
        """The words that are certain, in front of them the space that joins them to what came before. Raises TextError
        for letters of another script, the piece is then not taken; at the end where no letter or digit came."""
        for place, char in enumerate("" if piece.isascii() else piece):
            if _script(char) not in self._scripts:
                raise TextError(
                    f"expected text that a voice of {', '.join(self._languages)} can speak, in the letters "
                    f"{', '.join(sorted(self._scripts))}, got {_script(char)} in {piece[place : place + 20]!r}: "
                    "leave it out, or take a checkpoint of that language"
                )
        self._letters = self._letters or any(map(str.isalnum, piece))
        said = self._read(piece, final) if self._reads else piece
        if final and not (self._letters and (self._said or not self._reads)):
            raise TextError("expected text with a letter or a digit, got none of them: marks and signs have no words")
        return said

    def _read(self, piece: str, final: bool) -> str:
        said = ""
        for gap, part in re.findall(r"(\s*)(\S*)", piece):
            self._gap += gap
            if self._gap and part:
                said += self._complete()
                self._gap = ""
            self._word += part
        return said + self._complete() + self._hand_on(ends=True) if final else said

    def _complete(self) -> str:
        """Books the last word. Returns what was held before it, where there is a cut."""
        word, self._word, said = self._word, "", ""
        last_two = (*self._held.split()[-1:], word)
        if self._begins_line and _ITEM.match(word):
            said = self._hand_on(ends=True)
        elif self._held and (all(map(english.is_plain, last_two)) or len(self._held) + len(word) > _LONGEST_CHARS):
            said = self._hand_on()
        self._held += f"{word} "
        self._begins_line = "\n" in self._gap
        if self._gap.count("\n") > 1:
            said += self._hand_on(ends=True)
        elif english.ends_sentence(word):
            said += self._hand_on()
        return said

    def _hand_on(self, ends: bool = False) -> str:
        """What was held. ends: with the mark that ends it, where it has none."""
        text, said, self._held = self._held.strip(), "", ""
        begins = self._said in _ENDS
        text = english.reading(_BULLET.sub("", text, count=1) if begins else text)
        if begins or self._pause:
            text = text.lstrip(_MARKS + " ")
        if text:
            if begins:
                text = text[0].upper() + text[1:]
            joined = self._pause + (" " if self._said and text[0] not in _MARKS else "")
            words = text.rstrip(_PAUSES)
            said = joined + words if words else ""
            self._said, self._pause = words[-1:] or self._said, text[len(words) :]
        if ends and self._said not in _ENDS:
            self._said, said = ".", said + "."
        if ends:
            self._pause = ""
        return said


@cache
def _script(char: str) -> str:
    """Latin also for a sign, and for a letter that every language may use."""
    for part in unicodedata.normalize("NFKC", char):
        own = not part.isascii() and part not in WORDS["greek"]
        if own and unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo", "Nd"):
            return unicodedata.name(part, "UNKNOWN").split()[0]
    return _LATIN


class FrontEnd:
    """How a checkpoint reads text."""

    def __init__(self, languages: Iterable[str] = (ENGLISH,)) -> None:
        """languages: those that the checkpoint speaks; where it is one beside "auto", "auto" means it."""
        self.languages = tuple(language for language in languages if language != AUTO)
        self.read("1", ENGLISH)  # its tables are loaded, so that no text waits for that

    def feed(self, language: str = AUTO, markup: str = "speak", lexicon: Lexicon | None = None) -> Chain:
        """Reads one text in `language`. markup: of `mktts.engine.options.Markup`. lexicon: what is said for words."""
        known = self.languages if language == AUTO else (language,)
        return Chain((lexicon or Lexicon()).feed(markup), FrontEndFeed(known))

    def read(self, text: str, language: str = AUTO, markup: str = "speak") -> str:
        """`text` as it is spoken. Raises TextError as `FrontEndFeed.take`."""
        return self.feed(language, markup).take(text, final=True)

    def word(self, written: str, language: str = AUTO) -> str:
        """One word of a text as it is spoken, apart from its neighbours; what cannot be spoken stays as it stands."""
        try:
            words = self.read(written, language)
        except TextError:
            return written
        return words if written[-1:] in ".!?" else words.rstrip(".")


def spoken(text: str, language: str = ENGLISH, markup: str = "strip") -> str:
    """`text` as the front end of `language` reads it; for a language without one as it stands. Raises TextError."""
    return FrontEnd((language,)).read(text, language, markup)
