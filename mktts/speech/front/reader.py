"""Text as it is written, made into text as it is spoken, also while it is being written.

Text is cut only where nothing depends on what stands on the other side: between two words that are read as they are
written, and after a sentence's end. The cuts depend on the text alone, so pieces give what the whole gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_CHARS = 240  # held back at most: a text without a plain word is cut at a space
_ENDS = ".!?"
_PAUSES = ",;:"
_MARKS = _ENDS + _PAUSES
_ITEM = re.compile(r"[-*•]|\d{1,2}[.)]")  # what begins a line of a list
_BULLET = re.compile(r"^(?:[-*•>]|#{1,6})(?=\s|$)\s*")


@dataclass(frozen=True)
class Rules:
    """How one language is read. plain, ends: of a word between spaces; reading: of the words between two cuts."""

    plain: Callable[[str], bool]
    ends: Callable[[str], bool]
    reading: Callable[[str], str]


class Reader:
    """One text. What `push` and `finish` return, joined, is one sentence after another, each begun with a capital
    and ended by a mark."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._held: list[str] = []  # words that may belong together
        self._held_chars = 0
        self._word = ""  # the last one, perhaps not complete
        self._gap = ""  # whitespace after it
        self._plain = False  # of the last complete word
        self._said = ""  # the last mark or letter that was handed on
        self._pause = ""  # a mark after it that is handed on only if words follow

    @property
    def silent(self) -> bool:
        """Whether nothing was handed on so far."""
        return not self._said

    def push(self, piece: str) -> str:
        """The words that `piece` makes certain, in front of them the space that joins them to what came before."""
        said = []
        for part in re.findall(r"\s+|\S+", piece):
            if part.isspace():
                self._gap += part
                continue
            if self._gap:
                said.append(self._complete(part))
                self._gap = ""
            self._word += part
        return "".join(said)

    def finish(self) -> str:
        """The rest, with the mark that ends it; "" where there was nothing to say."""
        return self._complete("") + self._hand_on() + self._end()

    def _complete(self, follows: str) -> str:
        """Books the last word. Returns what was held before it, where there is a cut."""
        word, said = self._word, ""
        if not word:
            return said
        plain = self._rules.plain(word)
        if self._held and ((plain and self._plain) or self._held_chars + len(word) > _LONGEST_CHARS):
            said = self._hand_on()
        self._held.append(word)
        self._held_chars += len(word) + 1
        self._plain, self._word = plain, ""
        line = "\n" in self._gap and (self._gap.count("\n") > 1 or _ITEM.match(follows))
        if line and follows:
            said += self._hand_on() + self._end()
        elif self._rules.ends(word):
            said += self._hand_on()
        return said

    def _hand_on(self) -> str:
        text, self._held, self._held_chars = " ".join(self._held), [], 0
        begins = not self._said or self._said in _ENDS
        text = self._rules.reading(_BULLET.sub("", text, count=1) if begins else text)
        if begins or self._pause:
            text = text.lstrip(_MARKS + " ")
        if not text:
            return ""
        if begins:
            text = text[0].upper() + text[1:]
        joined = self._pause + (" " if self._said and text[0] not in _MARKS else "")
        words = text.rstrip(_PAUSES)
        self._pause = text[len(words) :]
        self._said = words[-1:] or self._said
        return joined + words if words else ""

    def _end(self) -> str:
        """The mark that ends what was handed on, where it has none."""
        self._pause = ""
        if not self._said or self._said in _ENDS:
            return ""
        self._said = "."
        return "."
