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
_AMBIGUOUS = frozenset({"us", "it"})
_OTHERWISE = WORDS["respelled"]
_SOUNDS = LISTS["sounds"]
_DOTTED = re.compile(r"(?<![\w.])((?:[A-Za-z]\.)+[A-Za-z]\b\.?|Ph\.?\s?D\b\.?)('?s\b)?", re.IGNORECASE)
_CAPITALS = re.compile(r"(?<![\w'])([A-Z]{2,})('?s|S')?(?![\w'])")
_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
_MIXED = re.compile(r"(?<=[A-Za-z])-?(?=\d)|(?<=\d)-?(?=[A-Za-z])")
_CAMEL = re.compile(r"\b(?!Mc[A-Z])[A-Za-z]*(?:[a-z][A-Z]|[A-Z]{2}[a-z]{2})[A-Za-z]*")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_LONGEST_SPELLED = 5


def letters(word: str) -> str:
    """ "usa" -> "U S A"."""
    return " ".join(word.upper())


def spell_dotted(text: str) -> str:
    """ "U.S.", "D.C." and "Ph.D." letter by letter."""

    def spelled(match: re.Match[str]) -> str:
        return letters(re.sub(r"[^A-Za-z]", "", match[1])) + (match[2] or "")

    return _DOTTED.sub(spelled, text) if "." in text else re.sub(r"\bphd\b", "P H D", text, flags=re.IGNORECASE)


def is_known(word: str) -> bool:
    """Whether a word in lower case is read otherwise than it is written, in any case."""
    return word in _SPELLED or word in _OTHERWISE or _no_vowel(word)


def spell_unknown(word: str) -> str:
    """A word in lower case of no sentence, of an address: letter by letter where nobody could say it."""
    if word in _OTHERWISE:
        return _OTHERWISE[word]
    return letters(word) if word in _SPELLED or _no_vowel(word) else word


def spell_letters(text: str, shouted: bool) -> str:
    """`text` with its acronyms as they are read. shouted: all words are in capitals, so that capitals say nothing."""
    text = _CAPITALS.sub(lambda m: _capitals(m, shouted), text)
    return _WORD.sub(lambda m: _word(m[0]), text)


def all_capitals(text: str) -> bool:
    """Whether every word is in capitals, and one at least is no acronym."""
    words = [word for word in re.findall(r"[A-Za-z']{2,}", text) if len(word.replace("'", "")) > 1]
    if not words or any(word != word.upper() for word in words):
        return False
    plain = [word.lower() for word in words if not is_known(word.lower()) and word.lower() not in _AS_WORDS]
    return len(plain) > 1 or any(len(word) > _LONGEST_SPELLED or word in _RAISED - _AMBIGUOUS for word in plain)


def split_mixed(text: str) -> str:
    """Letters and digits that stand together apart: "COVID-19" -> "COVID 19", "MP3" -> "MP 3"."""
    return re.sub(r"\b(?=\w*[A-Za-z])(?=[\w-]*\d)[A-Za-z\d]+(?:-[A-Za-z\d]+)*", lambda m: _MIXED.sub(" ", m[0]), text)


def split_camel(text: str) -> str:
    """ "ChatGPT" -> "Chat GPT"; a name such as "McDonald" stays."""
    return _CAMEL.sub(lambda m: m[0] if m[0].lower() in _OTHERWISE else _HUMP.sub(" ", m[0]), text)


def _capitals(match: re.Match[str], shouted: bool) -> str:
    word, tail = match[1].lower(), match[2] or ""
    if tail == "S'":
        word, tail = word + "s", ""
    if word in _AS_WORDS or word in _OTHERWISE:
        return _OTHERWISE.get(word, word) + tail.lower()
    spelled = word in _SPELLED or _no_vowel(word)
    if not shouted and not spelled:
        raised = word in _RAISED and word not in _AMBIGUOUS
        spelled = not raised and (len(word) <= 3 or (len(word) <= _LONGEST_SPELLED and not _sayable(word)))
    if not spelled:
        return word + tail.lower()
    return letters(word) + ("'s" if tail else "")


def _word(word: str) -> str:
    whole = word.lower()
    if len(word) < 2 or word in ("A", "I"):
        return word
    stem, apostrophe, tail = whole.partition("'")
    if stem in _OTHERWISE:
        return _OTHERWISE[stem] + apostrophe + tail
    if stem in _SPELLED or (_no_vowel(stem) and not apostrophe):
        return letters(stem) + apostrophe + tail
    if stem.endswith("s") and stem[:-1] in _SPELLED and len(stem) > 3:
        return letters(stem[:-1]) + "'s"
    return word


def _no_vowel(word: str) -> bool:
    """Such a word cannot be said, except for a few."""
    return len(word) > 1 and not re.search("[aeiouy']", word) and word not in _SOUNDS and word.isalpha()


def _sayable(word: str) -> bool:
    """Whether consonants and vowels take turns as in a word: no three consonants at an end, no four anywhere."""
    return bool(re.search("[aeiouy]", word)) and not re.search(
        r"^[^aeiouy]{3}|[^aeiouy]{3}$|[^aeiouy]{4}|[aeiou]{3}", word
    )
