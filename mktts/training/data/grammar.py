"""Sentences of dialogue, questions, requests and figures, from patterns and word lists in two plain files.

Numbers are written in figures; the text front end says them, as it does when the voice speaks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.resources import files

# Kinds by weight: what an agent says most comes most.
WEIGHTS = {
    "plain": 26, "talk": 30, "number": 8, "date": 5, "question": 18, "reply": 7, "long": 14, "name": 9, "people": 8,
    "digits": 10,
}  # fmt: skip
_COMPOUND = 0.7  # of long ones: two plain sentences with a word between
_SLOT = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SILENT_H = re.compile(r"(?:hour|honest|heir|honor)")
_YOU_SOUND = re.compile(r"(?:u(?:[bcfst]e|su|[bct]i|ni(?!m|nt|n[a-z]|d)|ra)|eu|ewe|one\b|once\b)", re.I)
_FORMS = {"": 0, "d": 0, "s": 1, "ed": 2, "en": 3, "ing": 4}


def _count(rng: random.Random) -> int:
    return rng.randrange(2, rng.choice((20, 100, 100, 1000)))


def _equation(rng: random.Random, sign: str, most: int) -> str:
    left, right = rng.randint(2, 80), rng.randint(2, most)
    return f"{left} {sign} {right} is {left + right if sign == 'plus' else left * right}"


_COMPUTED: dict[str, Callable[[random.Random], object]] = {
    "number": lambda rng: rng.randint(2, 99),
    "minutes": lambda rng: rng.randint(2, 29),
    "sum": lambda rng: _equation(rng, "plus", 80),
    "product": lambda rng: _equation(rng, "times", 12),
    "few": lambda rng: rng.randint(2, 12),
    "hour": lambda rng: rng.randint(1, 12),
    "digit": lambda rng: rng.randrange(10),
    "large": lambda rng: rng.choice((rng.randint(100, 999), 100 * rng.randint(10, 99), 1000 * _count(rng))),
    "year": lambda rng: rng.choice((rng.randint(1700, 1999), rng.randint(1900, 2029))),
    "clock": lambda rng: f"{rng.randint(1, 12)}:{rng.randrange(60):02}" + rng.choice(("", " AM", " PM")),
    "count": _count,
    "dom": lambda rng: rng.randint(1, 28),
    "price": lambda rng: f"{rng.randint(1, 99)}.{rng.randint(10, 99)}",
    "percent": lambda rng: f"{rng.randrange(100)}.{rng.randrange(1, 10)}",
    "phone": lambda rng: f"{rng.randint(200, 999)}-{rng.randrange(10_000):04}",
    "weight": lambda rng: rng.choice(("pounds", "kilograms", "tons", "grams")),
    "past2": lambda rng: rng.choice(("tried", "wanted", "hoped", "had", "forgot", "promised", "learned", "used")),
    "region_or_country": lambda rng: rng.choice(("north", "south", "east", "west", "mountains", "valley", "city")),
}


def article(word: str) -> str:
    """ "a" or "an" before a word, by its first sound as far as spelling tells."""
    vowel = word[0].lower() in "aeiou" and not _YOU_SOUND.match(word) or _SILENT_H.match(word)
    return "an" if vowel else "a"


def _sections(name: str) -> dict[str, list[str]]:
    """Lines under each [heading], without comments."""
    found: dict[str, list[str]] = {}
    for line in files("mktts.training.data").joinpath(name).read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            lines = found.setdefault(heading[1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


# List -> entries, each of them forms: a noun's and its plural, or a verb's five.
LISTS = {
    name: [tuple(word.replace("_", " ").split("/")) for word in dict.fromkeys(" ".join(lines).split())]
    for name, lines in _sections("vocabulary.txt").items()
}
TEMPLATES = _sections("templates.txt")


def sentence(rng: random.Random, kind: str | None = None) -> str:
    """One sentence; of a kind drawn by weight unless `kind` says."""
    kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if kind == "long" and rng.random() < _COMPOUND:
        left, right = (rng.choice(TEMPLATES[rng.choice(("plain", "people"))]) for _ in range(2))
        return _filled(rng, f"{left[:-1]}, {rng.choice(('and', 'but', 'so', 'because', 'while', 'although'))} {right}")
    return _filled(rng, rng.choice(TEMPLATES[kind]))


def _filled(rng: random.Random, template: str) -> str:
    """The template with choices made, slots filled, no word twice in one list, and "a" before a vowel as "an"."""
    used: set[str] = set()

    def draw(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        if name in _COMPUTED and (form == "d" or name not in LISTS):
            return str(_COMPUTED[name](rng))
        fresh = [entry for entry in LISTS[name] if entry[0] not in used]
        entry = rng.choice(fresh or LISTS[name])
        used.add(entry[0])
        return entry[_FORMS[form]]

    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = _SLOT.sub(draw, text)
    text = re.sub(r"\b([Aa]) (?=(\w+))", lambda match: match[1] + article(match[2])[1:] + " ", text)
    return text[0].upper() + text[1:]
