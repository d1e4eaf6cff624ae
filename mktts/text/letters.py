"""Words that are read letter by letter, acronyms that are read as words, and which is which."""

from __future__ import annotations

import json
import re
from pathlib import Path

# Tables of words that the rules read and write, of English and of signs in any language.
WORDS = json.loads(Path(__file__).with_name("english.json").read_text(encoding="utf-8"))
# Greek letters that stand in texts of any language as signs; a Greek word has others beside them.
GREEK = WORDS["greek"]

LISTS = {name: frozenset(words.split()) for name, words in WORDS["lists"].items()}

_AS_WORDS = LISTS["acronyms_as_words"]
_SPELLED = LISTS["spelled"]  # letter by letter in any case; none of them is a word otherwise
_RAISED = LISTS["raised"]  # common enough to be meant as words where capitals raise the voice
_WORD = re.compile(r"([A-Za-z]+)((?:'[A-Za-z]+)?)")
_LONGEST_SPELLED = 5
# Consonants and vowels do not take turns as in a word: three consonants at an end, four anywhere, three vowels.
_NO_WORD = re.compile(r"^[^aeiouy]{3}|[^aeiouy]{3}$|[^aeiouy]{4}|[aeiou]{3}|^[^aeiouy]*$")


def letters(word: str) -> str:
    """ "usa" and "U.S.A." -> "U S A"."""
    return " ".join(re.sub("[^A-Z]", "", word.upper()))


def read_alone(word: str) -> str:
    """A word in lower case as it is read in any case: letter by letter where it has no vowel, but for a few."""
    no_vowel = len(word) > 1 and not re.search("[aeiouy']", word) and word not in LISTS["sounds"] and word.isalpha()
    return letters(word) if word in _SPELLED or no_vowel else WORDS["respelled"].get(word, word)


def all_capitals(text: str) -> bool:
    """Whether every word is in capitals, and one at least is no acronym."""
    words = [word for word in re.findall(r"[A-Za-z']{2,}", text) if len(word.replace("'", "")) > 1]
    if not words or any(word != word.upper() for word in words):
        return False
    plain = [word for word in map(str.lower, words) if read_alone(word) == word and word not in _AS_WORDS]
    return len(plain) > 1 or any(len(word) > _LONGEST_SPELLED or word in _RAISED for word in plain)


def spell_letters(text: str, shouted: bool) -> str:
    """`text` with its acronyms as they are read. shouted: all words are in capitals, so that capitals say nothing."""

    def read(match: re.Match[str]) -> str:
        written, tail = match.groups()
        word = written.lower()
        if len(word) > 2 and not tail and word[-1] == "s" and word not in _SPELLED:  # "GPUs", "cpus"
            if (written[:-1].isupper() and written[-1] == "s") or (word[:-1] in _SPELLED and len(word) > 3):
                written, word, tail = written[:-1], word[:-1], "s"
        capitals = len(word) > 1 and written.isupper() and tail in ("", "s", "'s")
        if len(word) < 2 or (capitals and word in _AS_WORDS):
            return match[0]
        said = read_alone(word)
        if said == word and capitals and not shouted and word not in _RAISED:
            if len(word) <= 3 or (len(word) <= _LONGEST_SPELLED and _NO_WORD.search(word)):
                said = letters(word)
        if said == word and not capitals:
            return match[0]
        return said + ("'s" if tail == "s" and " " in said else tail)

    return _WORD.sub(read, text)
