"""A few words of English as they are spoken: numbers, signs and short forms in words, one case, plain marks. The rules
run from the particular to the general, each on what those before it left: an address is no number, a date no fraction,
a price no measure."""

from __future__ import annotations

import re
import unicodedata

from mktts.text.dates import SHORT_NAMES, spell_dates, spell_times
from mktts.text.letters import (
    GREEK,
    WORDS,
    all_capitals,
    is_known,
    spell_dotted,
    spell_letters,
    split_camel,
    split_mixed,
)
from mktts.text.names import ABBREVIATIONS, BINDERS, ROMANS, spell_addresses, spell_names, typed
from mktts.text.numbers import NUMBER, bare, in_pairs, number, ordinal, singly, spell_measures, spell_money, year


def _table(name: str) -> dict[int, str]:
    """For str.translate, of a table of words: what stands for each of some characters."""
    return {ord(char): words for words, chars in WORDS[name].items() for char in chars}


_BEFORE = _table("characters")
# Letters that do not come apart into a plain letter and an accent; μ and Ω stand in units.
_LETTERS = _table("plain_letters") | {ord(char): f" {name} " for char, name in GREEK.items() if char not in "μΩ"}
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")  # 2½ is two and a half, not 21/2
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_DROPPED = re.compile(r"[^A-Za-z0-9\s.,;:?!'-]")
_CURRENCIES = "$€£¥₹₩¢°µμΩ"


def plain_characters(text: str) -> str:
    """`text` in ASCII, but for signs that the rules read ($ and its like): one form of each mark, no accents."""
    if text.isascii():
        return text.replace("`", "'")
    text = re.sub(r"(?<=\d)×(?=\d)", "x", re.sub(r"(?<=[\d\w)])\s?[·⋅]\s?(?=\d)", "*", text)).replace("·", " ")
    text = _RAISED.sub(lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text.translate(_BEFORE))).translate(_BEFORE)
    apart = unicodedata.normalize("NFD", text.translate(_LETTERS))
    plain = "".join(char for char in apart if char.isascii() or char in _CURRENCIES or char == "—")
    return re.sub(r"(?<=\S) {2,}", " ", plain)


def plain_marks(text: str) -> str:
    """Words and the marks . , ; : ? ! with one space between words: brackets and dashes become commas, the rest
    falls away."""
    text = re.sub(r"\s+-+\s+|—|--+|[()\[\]{}|]", ", ", text)
    text = re.sub(r"\.{2,}(?=\s+[a-z])", ",", text)
    text = _DROPPED.sub(" ", text)
    text = re.sub(r"(?<![A-Za-z])['-]+|['-]+(?![A-Za-z])", " ", text)
    text = re.sub(r"\s+([.,;:?!])", r"\1", " ".join(text.split()))
    text = re.sub(r"(?<=[.,;:?!]) (?=[.,;:?!])", "", text)
    return re.sub(r"[.,;:?!]{2,}", lambda m: next(mark for mark in "?!.:;," if mark in m[0]), text)


_PLAIN = re.compile(r"[\"'(]*(?P<core>[A-Za-z]?[a-z]*(?:'[a-z]+)?(?:-[a-z]+)*)[,;:.!?\"')]*")
_SENTENCE_END = re.compile(r"[\"'(]*(?P<core>[A-Za-z]{3,}|[A-Za-z]+'[A-Za-z]+)[.!?]+[\"')]*")
# They belong to what stands beside them.
_BOUND = ABBREVIATIONS | BINDERS | ROMANS | SHORT_NAMES | frozenset(WORDS["binders"].split()) | WORDS["units"].keys()
_ORDINAL = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:st|nd|rd|th)\b", re.IGNORECASE)
_HASH = re.compile(r"#\s?(?=\d)")
_MINUS = re.compile(r"(?<![\w.)])-(?=\.?\d)")
_SPAN = re.compile(rf"(?<![\w.,-])({NUMBER})\s?-\s?({NUMBER})(?![\w-])")
_NUMBER = re.compile(NUMBER)
_NAME = re.compile(rf"\b(?:{'|'.join(WORDS['names'])})(?=s?\b)")
_HOW = {  # of a group, in a rule's words
    "s": singly,
    "z": lambda digits: singly(digits, "zero"),
    "p": in_pairs,
    "n": number,
    "y": lambda digits: year(int(digits)),
    "t": typed,
}


_RULES = {
    name: [(re.compile(pattern), words) for pattern, words in WORDS[name]]
    for name in ("early", "codes", "operators", "latin", "labels", "signs")
}


def _apply(name: str, text: str) -> str:
    """Each rule of a list in turn. "{s1}" in its words is the first group, read as _HOW["s"] does."""
    for pattern, words in _RULES[name]:
        text = pattern.sub(
            lambda m, w=words: re.sub(r"\{(\w)(\d)\}", lambda hole: _HOW[hole[1]](m[int(hole[2])]), m.expand(w)), text
        )
    return text


def is_plain(token: str) -> bool:
    """Whether a word is read as it is written, and says nothing about how its neighbours are read."""
    found = _PLAIN.fullmatch(token)
    if not found:
        return False
    core = found["core"].lower()
    if len(core) < 2 or token == "in.":
        return core in ("a", "i")
    return core not in _BOUND and not is_known(core)


def ends_sentence(token: str) -> bool:
    """Whether a word and its full stop surely end a sentence: no abbreviation does."""
    found = _SENTENCE_END.fullmatch(token)
    return bool(found) and found["core"].lower() not in _BOUND


def reading(text: str) -> str:
    """Some words of a sentence as they are spoken, in lower case but for "I" and single letters; perhaps ""."""
    if not all(map(is_plain, text.split())):
        text = _rewritten(plain_characters(text))
    return _one_case(plain_marks(text))


def _rewritten(text: str) -> str:
    shouted = all_capitals(text)
    text = _NAME.sub(lambda m: WORDS["names"][m[0]], text)
    text = _apply("early", text)
    text = _apply("codes", spell_addresses(text))
    text = spell_dates(text)
    text = spell_times(text)
    text = _apply("operators", text)
    text = spell_money(text)
    text = spell_names(_apply("latin", text))
    text = spell_measures(text)
    text = spell_dotted(text)
    text = _HASH.sub("number ", text)
    text = _ORDINAL.sub(lambda m: ordinal(int(m[1].replace(",", ""))), text)
    text = _apply("labels", text)
    text = _SPAN.sub(r"\1 to \2", text)
    text = _MINUS.sub("minus ", text)
    text = split_mixed(split_camel(_apply("signs", text)))
    text = _NUMBER.sub(lambda m: f" {bare(m[0])} ", text)
    return spell_letters(text, shouted)


def _one_case(text: str) -> str:
    text = re.sub(r"[A-Za-z]*[A-Za-z][a-z][A-Za-z]*|[A-Z]{2,}", lambda m: m[0].lower(), text)
    text = re.sub(r"(?<=[A-Za-z]')[A-Z]+\b|\b[A-Z](?='[a-z]{2})", lambda m: m[0].lower(), text)
    text = re.sub(r"\bA(?= [a-z])", "a", re.sub(r"\bi\b", "I", text))
    return re.sub(r"(?<=[.!?] )[a-z]", lambda m: m[0].upper(), text)
