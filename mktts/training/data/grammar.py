"""Sentences from the patterns: words for the slots by kind, numbers and times computed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from mktts.training.data.words import LISTS, TEMPLATES, article

DIGITS = "digits"  # the kind whose numbers are written in figures
# Kinds by weight: what an agent says most comes most.
WEIGHTS = {
    "plain": 30,
    "talk": 28,
    "number": 7,
    "date": 5,
    "question": 16,
    "reply": 6,
    "long": 16,
    "name": 9,
    "people": 9,
    "digits": 3,  # few: a front end writes figures in words
}
_COMPOUND = 0.7  # of long ones: two plain sentences with a word between
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " \
    "seventeen eighteen nineteen".split()  # fmt: skip
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SLOT = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")


def spoken(number: int) -> str:
    """0 to 999 999 in words."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    size, unit = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = f" {spoken(number % size)}" if number % size else ""
    return f"{spoken(number // size)} {unit}{rest}"


def _year(rng: random.Random) -> str:
    century, rest = rng.choice((17, 18, 19, 19, 19, 20, 20)), rng.randrange(100)
    rest %= 30 if century == 20 else 100
    if century == 20 and rest < 10:
        return f"two thousand {_ONES[rest]}" if rest else "two thousand"
    if rest < 10:
        return f"{_ONES[century]} oh {_ONES[rest]}" if rest else f"{_ONES[century]} hundred"
    return f"{spoken(century)} {spoken(rest)}"


def _clock(rng: random.Random) -> str:
    hour, minute = spoken(rng.randint(1, 12)), rng.randint(1, 59)
    if rng.random() < 0.5:
        return f"{hour} {f'oh {_ONES[minute]}' if minute < 10 else spoken(minute)}"
    if minute in (15, 45, 30):
        return {15: "a quarter past ", 30: "half past ", 45: "a quarter to "}[minute] + hour
    plural = "s" * (minute not in (1, 59))
    return (
        f"{spoken(minute)} minute{plural} past {hour}"
        if minute < 31
        else f"{spoken(60 - minute)} minute{plural} to {hour}"
    )


def _count(rng: random.Random) -> int:
    return rng.randrange(2, rng.choice((20, 100, 100, 1000)))


def _sum(rng: random.Random, say: Callable[[int], str] = spoken) -> str:
    left, right = rng.randint(1, 80), rng.randint(2, 80)
    return f"{say(left)} plus {say(right)} is {say(left + right)}"


def _product(rng: random.Random) -> str:
    left, right = rng.randint(2, 50), rng.randint(2, 12)
    return f"{spoken(left)} times {spoken(right)} is {spoken(left * right)}"


_Draw = Callable[[random.Random], str]
_COMPUTED: dict[str, _Draw] = {
    "number": lambda rng: spoken(rng.randint(2, 99)),
    "minutes": lambda rng: spoken(rng.randint(2, 29)),
    "sum": _sum,
    "product": _product,
    "few": lambda rng: spoken(rng.randint(2, 12)),
    "hour": lambda rng: spoken(rng.randint(1, 12)),
    "digit": lambda rng: _ONES[rng.randrange(10)],
    "large": lambda rng: spoken(rng.choice((rng.randint(100, 999), 100 * rng.randint(10, 99), 1000 * _count(rng)))),
    "year": _year,
    "clock": _clock,
    "weight": lambda rng: rng.choice(("pounds", "kilograms", "tons", "grams")),
    "past2": lambda rng: rng.choice(("tried", "wanted", "hoped", "had", "forgot", "promised", "learned", "used")),
    "region_or_country": lambda rng: rng.choice(("north", "south", "east", "west", "mountains", "valley", "city")),
}
_FIGURES: dict[str, _Draw] = {
    "sum": lambda rng: _sum(rng, str),
    "count": lambda rng: str(_count(rng)),
    "digit": lambda rng: str(rng.randrange(10)),
    "dom": lambda rng: str(rng.randint(1, 28)),
    "year": lambda rng: str(rng.choice((rng.randint(1700, 1999), rng.randint(1900, 2029)))),
    "clock": lambda rng: f"{rng.randint(1, 12)}:{rng.randrange(60):02}",
    "price": lambda rng: f"{rng.randint(1, 99)}.{rng.randint(10, 99)}",
    "percent": lambda rng: f"{rng.randrange(100)}.{rng.randrange(1, 10)}",
    "phone": lambda rng: f"{rng.randint(200, 999)}-{rng.randrange(10_000):04}",
    "ordinal": lambda rng: rng.choice(("1st", "2nd", "3rd", "21st", *(f"{day}th" for day in range(4, 21)))),
}


def sentence(rng: random.Random, kind: str | None = None) -> str:
    """One sentence; of a kind drawn by weight unless `kind` says."""
    kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if kind == "long" and rng.random() < _COMPOUND:
        left, right = (rng.choice(TEMPLATES[rng.choice(("plain", "people"))]) for _ in range(2))
        return fill(rng, f"{left[:-1]}, {rng.choice(('and', 'but', 'so', 'because', 'while', 'although'))} {right}")
    return fill(rng, rng.choice(TEMPLATES[kind]))


def fill(rng: random.Random, template: str) -> str:
    """The template with choices made, slots filled, no word twice in one list, and "a" before a vowel as "an"."""
    used: set[str] = set()

    def draw(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        if form == "d":
            return _FIGURES[name](rng)
        if name in _COMPUTED:
            return _COMPUTED[name](rng)
        fresh = [entry for entry in LISTS[name] if entry.base not in used]
        entry = rng.choice(fresh or LISTS[name])
        used.add(entry.base)
        return entry.form(form)

    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = _SLOT.sub(draw, text)
    text = re.sub(r"\b([Aa]) (?=(\w+))", lambda match: match[1] + article(match[2])[1:] + " ", text)
    return text[0].upper() + text[1:]
