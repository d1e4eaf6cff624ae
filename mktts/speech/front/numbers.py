"""Numbers in English words, as an American says them: num2words' words without its commas and its "and"."""

from __future__ import annotations

import re

from num2words import num2words

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"  # 7, 1,234.56, .5
_ONES = "oh one two three four five six seven eight nine".split()
_MOST_DIGITS = 15  # more have no name that a listener would know: they are read one by one
_YEARS = range(1_100, 2_100)  # four digits without a comma that are read in pairs


def _american(words: str) -> str:
    return words.replace(",", "").replace(" and ", " ")


def cardinal(value: int) -> str:
    """1234 -> "one thousand two hundred thirty-four". value: at least 0."""
    return _american(num2words(value))


def ordinal(value: int) -> str:
    """21 -> "twenty-first"."""
    return _american(num2words(value, to="ordinal"))


def year(value: int) -> str:
    """1984 -> "nineteen eighty-four", 1905 -> "nineteen oh five", 2005 -> "two thousand five"."""
    return _american(num2words(value, to="year")).replace("oh-", "oh ")


def singly(digits: str, zero: str = "oh") -> str:
    """Digit by digit; what is no digit is left out."""
    return " ".join(zero if digit == "0" else _ONES[int(digit)] for digit in digits if digit.isdigit())


def in_pairs(digits: str) -> str:
    """How rooms, flights and models are called: 305 "three oh five", 747 "seven forty-seven", 1200 "twelve hundred"."""
    if digits.startswith("0") or len(digits) > 4:
        return singly(digits)
    value = int(digits)
    if len(digits) < 3 or value % 1_000 == 0:
        return cardinal(value)
    first, rest = divmod(value, 100)
    if not rest:
        return f"{cardinal(first)} hundred"
    return f"{cardinal(first)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def number(written: str) -> str:
    """What `NUMBER` matches, as an amount: "1,234.5" -> "one thousand two hundred thirty-four point five"."""
    whole, point, fraction = written.replace(",", "").partition(".")
    words = [] if not whole else [singly(whole, "zero") if len(whole) > _MOST_DIGITS else cardinal(int(whole))]
    if point:
        words += ["point", singly(fraction, "zero")]
    return " ".join(words)


def bare(written: str) -> str:
    """A number that nothing around it explains: a year, an amount, or a code that is read digit by digit."""
    if not written.isdigit():
        return number(written)
    if len(written) == 4 and int(written) in _YEARS:
        return year(int(written))
    code = len(written) > 4 and not written.endswith("00")  # an amount of five digits would be written with a comma
    return singly(written) if code or (written[0] == "0" and len(written) > 1) else number(written)


def plural(words: str) -> str:
    """Of the last word: "nineteen ninety" -> "nineteen nineties"."""
    return re.sub(r"y$", "ie", words) + ("es" if words.endswith(("x", "s")) else "s")


def fraction(above: int, below: int) -> str:
    """3/4 -> "three quarters", 1/2 -> "one half"; below: 2 to 100."""
    name = {2: "half", 4: "quarter"}.get(below) or ordinal(below)
    return f"{cardinal(above)} {name if above == 1 else 'halves' if below == 2 else name + 's'}"
