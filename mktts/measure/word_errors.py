"""Words and their errors: what was said against what was heard, and the ratio of two rates with its uncertainty."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from mktts.errors import MetricsError

_TITLES = {"mr": "mister", "mrs": "missus", "dr": "doctor"}
_YEARS = range(1_100, 2_000)  # four digits that are read in pairs
_LONGEST_DIGITS = 9  # of a number without commas; more are read one by one
_DRAWS = 10_000
_TAIL_PERCENT = 2.5


def words(text: str) -> list[str]:
    """Lower case, hyphens apart, digits in words, no punctuation but an apostrophe inside a word."""
    found: list[str] = []
    for token in re.findall(r"\d{1,3}(?:,\d{3})+|\d+|[a-z]+(?:'[a-z]+)*", text.lower().replace("’", "'")):
        found += _number(token) if token[0].isdigit() else [_TITLES.get(token, token)]
    return found


def _number(digits: str) -> list[str]:
    """A whole number's words as the teacher says them: years in pairs, a leading zero or many digits one by one."""
    from num2words import num2words

    if (digits.isdigit() and len(digits) > _LONGEST_DIGITS) or (len(digits) > 1 and digits[0] == "0"):
        return [num2words(int(digit)) for digit in digits]
    value = int(digits.replace(",", ""))
    said = num2words(value, to="year" if value in _YEARS and "," not in digits else "cardinal")
    return re.findall("[a-z]+", said.replace(" and ", " "))


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Substitutions, insertions and deletions of the cheapest alignment (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


def errors_by_sound(said: str, heard: str, sound: Callable[[str], str]) -> int:
    """Errors between two texts where words of one `sound` are one word: "to" and "two" count as the same."""
    return word_errors([sound(word) for word in words(said)], [sound(word) for word in words(heard)])


def rate_ratio(teacher: Sequence[int], student: Sequence[int], seed: int = 0) -> tuple[float, float, float] | None:
    """Ratio of two error rates on the same sentences, and its 95 % interval (percentile bootstrap over sentences).

    teacher, student: errors of each sentence. None where the teacher made no error: there is no ratio then. Draws in
    which it made none are left out. Raises MetricsError where the sentences are not the same number, or none.
    """
    if len(teacher) != len(student) or not len(teacher):
        raise MetricsError(f"expected errors of the same sentences, got {len(teacher)} and {len(student)}")
    a, b = np.asarray(teacher, np.float64), np.asarray(student, np.float64)
    if not a.sum():
        return None
    drawn = np.random.default_rng(seed).integers(len(a), size=(_DRAWS, len(a)))
    below, above = a[drawn].sum(1), b[drawn].sum(1)
    low, high = np.percentile(above[below > 0] / below[below > 0], (_TAIL_PERCENT, 100 - _TAIL_PERCENT))
    return float(b.sum() / a.sum()), float(low), float(high)
