"""Sentences with what a text front end makes of figures: prices, times, dates, measures, letters, addresses, in words.

The voice never sees "$3.99" but "three dollars and ninety-nine cents", so that is what it must say well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from mktts.training.data.grammar import spoken
from mktts.training.data.words import LISTS

_DIGITS = "oh one two three four five six seven eight nine".split()
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
_UNITS = (
    "kilometers miles meters feet inches centimeters millimeters kilograms grams pounds ounces liters gallons tons "
    "acres watts volts degrees hours minutes seconds days weeks months years points gigabytes megabytes people"
).split()
_RATES = ("miles per hour", "kilometers per hour", "degrees celsius", "degrees fahrenheit", "square feet", "percent")
_COINS = (("dollar", "cent"), ("dollar", "cent"), ("pound", "penny"), ("euro", "cent"))
_ENDS = ("com", "com", "org", "net", "co dot U K", "edu")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ordinal(number: int) -> str:
    """1 to 999 999 as "twenty-first"."""
    head, last = re.fullmatch(r"(.*?)([a-z]+)", spoken(number)).groups()
    return head + _ORDINALS.get(last, (last[:-1] + "ie" if last.endswith("y") else last) + "th")


def _digits(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_DIGITS, k=count))


def _amount(rng: random.Random) -> str:
    (whole, part), large, small = rng.choice(_COINS), rng.choice((0, 1, rng.randint(2, 999))), rng.randint(2, 99)
    parts = f"{spoken(small)} {'pence' if part == 'penny' else part + 's'}"
    if not large:
        return parts
    first = f"{spoken(large)} {whole}{'s' * (large != 1)}"
    return rng.choice(
        (first, f"{first} and {parts}", f"{spoken(large)} point {_DIGITS[rng.randint(1, 9)]} million {whole}s")
    )


def _number(rng: random.Random) -> str:
    large = rng.choice((rng.randint(1_000, 9_999), rng.randint(10_000, 999_999), 1_000 * rng.randint(2, 99)))
    decimal = (
        f"{spoken(rng.randint(0, 120))} point {' '.join(spoken(rng.randrange(10)) for _ in range(rng.randint(1, 3)))}"
    )
    return rng.choice((spoken(large), decimal, spoken(rng.randint(20, 999)), f"minus {spoken(rng.randint(1, 40))}"))


def _time(rng: random.Random) -> str:
    hour, minute = rng.randint(1, 12), rng.randrange(60)
    past = f"oh {_DIGITS[minute]}" if 0 < minute < 10 else spoken(minute)
    clock = f"{spoken(hour)} {past}" if minute else spoken(hour)
    return f"{clock} {rng.choice('AP')} M" if rng.random() < 0.6 else clock if minute else f"{clock} o'clock"


def _year(rng: random.Random) -> str:
    century, rest = rng.choice((17, 18, 19, 19, 20)), rng.randint(10, 99)
    if rng.random() < 0.15:
        return f"the {spoken(century)} {spoken(10 * rng.randint(2, 9))[:-1]}ies"
    return f"{spoken(century)} {spoken(rest)}"


def _date(rng: random.Random) -> str:
    month, day = rng.choice(LISTS["month"]).form(""), ordinal(rng.randint(1, 31))
    written = rng.choice((f"{month} {day}", f"the {day} of {month}"))
    return f"{written}, {_year(rng)}" if rng.random() < 0.3 else written


def _measure(rng: random.Random) -> str:
    return f"{rng.choice((_number(rng), spoken(rng.randint(2, 99))))} {rng.choice((*_UNITS, *_RATES))}"


def _letters(rng: random.Random) -> str:
    return " ".join(rng.choices(_LETTERS, k=rng.randint(2, 4)))


def _address(rng: random.Random) -> str:
    noun = rng.choice(LISTS["item"]).form("")
    site = f"{noun} dot {rng.choice(_ENDS)}"
    return rng.choice(
        (f"W W W dot {site}", site, f"{rng.choice(LISTS['name']).form('')} at {site}", f"{site} slash news")
    )


_PARTS: dict[str, Callable[[random.Random], str]] = {
    "amount": _amount,
    "number": _number,
    "time": _time,
    "date": _date,
    "year": _year,
    "measure": _measure,
    "letters": _letters,
    "address": _address,
    "phone": lambda rng: f"{_digits(rng, 3)}, {_digits(rng, 3)}, {_digits(rng, 4)}",
    "code": lambda rng: " ".join(rng.choices((*_DIGITS, *_LETTERS), k=rng.randint(3, 6))),
    "room": lambda rng: rng.choice(
        (spoken(rng.randint(1, 99)), f"{spoken(rng.randint(1, 20))} hundred", _digits(rng, 3))
    ),
    "nth": lambda rng: ordinal(rng.randint(1, 99)),
    "percent": lambda rng: f"{rng.choice((_number(rng), spoken(rng.randint(1, 99))))} percent",
    "noun": lambda rng: rng.choice(LISTS["item"]).form(""),
    "name": lambda rng: rng.choice(LISTS["name"]).form(""),
}
_TEMPLATES = """\
it costs {amount}.
the {noun} was only {amount}.
that makes {amount} in all.
could you pay {amount} for it?
a ticket is {amount}, and a {noun} is {amount}.
the total was {number}.
there were {number} of them.
it is about {number}.
the train leaves at {time}.
we meet at {time} on {date}.
is {time} too early for you?
the shop opens at {time} and closes at {time}.
the meeting is on {date}, at {time}.
he was born in {year}.
it began on {date}.
songs of {year} are back.
in {year} it was {amount}.
it is {measure} long.
we need {measure} of it.
the {noun} weighs {measure}.
do not go over {measure}.
it was {measure} yesterday.
prices rose by {percent}.
only {percent} of them said yes, and {percent} said no.
call me at {phone}.
the number is {phone}.
your code is {code}.
flight {letters} {room} is late.
meet me in room {room}.
gate {room}, seat {code}.
turn to page {room}, please.
she works at the {letters}.
the {letters} and the {letters} agreed.
go to {address}.
write to {address}, or see {address}.
it is the {nth} of its kind.
he came {nth}, and she came {nth}.
the office is on {nth} street.
world war two ended in {year}.
mister {name} and missus {name} came at {time}.
doctor {name} has {number} of them.
number {room} is {name}'s {noun}."""


def sentence(rng: random.Random) -> str:
    """One sentence."""
    template = rng.choice(_TEMPLATES.splitlines())
    text = re.sub(r"\{(\w+)\}", lambda part: _PARTS[part[1]](rng), template)
    return text[0].upper() + text[1:]
