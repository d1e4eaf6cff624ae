"""English words as the phonemes that Kokoro was trained with, by the word lists of misaki (Apache-2.0).

"The", "a" and "to" go by what follows, endings by rule, and there are no parts of speech, so that "read" and "live"
have their commonest reading. What no list has is spelt letter by letter; `knows` tells, and lists do without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MARKS = ';:,.!?—…"()“”'
_ENDS = ".!?;:"
_VOWELS = set("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻ")
_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*|[" + re.escape(MARKS) + "]")
_FLAPPED = "AIOWYiuæɑəɛɪɹʊʌ"  # a t behind one of them, before an ending, is a tap
_MOST = 510


class Phonemes:
    """Phoneme numbers of texts in the words of the text front end."""

    def __init__(self, words: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        """words: word -> phonemes, or {"DEFAULT": ..., "None": before a pause}."""
        self._words, self._numbers = words, numbers

    def knows(self, text: str) -> bool:
        """Whether a list has all words of `text`, or what they end in."""
        tokens = _WORD.findall(text.replace("-", " "))
        return all(t in MARKS or self._listed(t) or self._ended(t.lower()) for t in tokens)

    def __call__(self, text: str) -> list[int]:
        """At most 510 numbers, which is as long as a style goes."""
        return [self._numbers[sign] for sign in self.written(text) if sign in self._numbers][:_MOST]

    def written(self, text: str) -> str:
        """In phonemes, words apart by spaces."""
        found: list[str] = []
        following = ""
        for token in reversed(_WORD.findall(text.replace("-", " "))):  # "the" and "to" go by the next word
            if token in MARKS:
                found.append(token)
                following = "" if token in _ENDS else following
            else:
                following = self._word(token.replace("’", "'"), following)
                found.append(f" {following}")
        return "".join(reversed(found)).strip().replace("ɾ", "T").replace("ʔ", "t")

    def _word(self, word: str, following: str) -> str:
        small, vowel = word.lower(), following.lstrip("ˈˌ")[:1] in _VOWELS
        if small == "to":
            return "tʊ" if vowel else "tə" if following else "tu"
        fixed = {"the": "ði" if vowel else "ðə", "a": "ɐ", "an": "ɐn"}.get(small) or ("ˌI" if word == "I" else None)
        return fixed or self._listed(word, not following) or self._ended(small) or self._spelt(word)

    def _listed(self, word: str, last: bool = False) -> str | None:
        forms = word, word.lower(), word.capitalize()
        found = next((self._words[form] for form in forms if form in self._words), None)
        if isinstance(found, Mapping):
            return found.get("None") if last and found.get("None") else found["DEFAULT"]
        return found

    def _ended(self, word: str) -> str | None:
        """A listed word with -s, -ed or -ing."""
        stems = {
            "s": ((1, ""), (2, ""), (3, "y")),
            "ed": ((1, ""), (2, ""), (3, "")),
            "ing": ((3, ""), (3, "e"), (4, "")),
        }
        for ending, ways in stems.items():
            if word.endswith(ending) and len(word) > len(ending) + 2:
                for cut, put in ways:
                    if len(word) - cut > 1 and (stem := self._listed(word[:-cut] + put)):
                        return _with_ending(stem, ending)
        return None

    def _spelt(self, word: str) -> str:
        return "".join(self._listed(letter.upper()) or "" for letter in word)


def _with_ending(stem: str, ending: str) -> str:
    last, tapped = stem[-1], stem[-1] == "t" and stem[-2:-1] != "" and stem[-2] in _FLAPPED
    if ending == "s":
        return stem + ("s" if last in "ptkfθ" else "ᵻz" if last in "szʃʒʧʤ" else "z")
    body = stem[:-1] + "ɾ" if tapped else stem
    if ending == "ing":
        return body + "ɪŋ"
    return body + "ᵻd" if last in "td" else stem + ("t" if last in "pkfθʃsʧ" else "d")
