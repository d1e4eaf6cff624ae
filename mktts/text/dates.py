"""Dates, decades and times of day: "Jan. 5, 2026", "12/25/2024", "the 1990s", "10:30 am", "14:05", "Mon.-Fri."."""

from __future__ import annotations

import re

from mktts.text.numbers import cardinal, ordinal, plural, year

MONTHS = "january february march april may june july august september october november december".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_MONTH_OF = {name[:3]: name for name in MONTHS} | {"sept": "september"}
_MONTH = "|".join([*MONTHS, "sept", *(name[:3] for name in MONTHS)])
_DAY_OF = {name[:3]: name for name in DAYS} | {"tues": "tuesday", "thur": "thursday", "thurs": "thursday"}
SHORT_NAMES = frozenset({*_MONTH_OF, *_DAY_OF, "march"})
_DAY = "mon|tues?|wed|thu(?:rs?)?|fri|sat|sun"
_YEAR = r"(?:1[1-9]\d\d|20\d\d)"

_DAY_SPAN = re.compile(rf"\b({_DAY})\.?\s?-\s?({_DAY})\b\.?", re.IGNORECASE)
_DAY_DOT = re.compile(
    rf"\b(?:(mon|tues?|thu(?:rs?)?|fri)\.(?!\w)|({_DAY})\.?(?=,?\s+(?:\d|(?:{_MONTH})\b))|(tues?|thu(?:rs?)?|fri)\b)",
    re.IGNORECASE,
)
_MONTH_DAY = re.compile(
    rf"\b(?P<month>{_MONTH})\.?\s+(?P<day>\d{{1,2}})(?P<th>st|nd|rd|th)?(?:\s?-\s?(?P<end>\d{{1,2}})(?:st|nd|rd|th)?)?"
    rf"(?![\w%:.,]?\d)(?:(?P<comma>,?)\s+(?P<year>{_YEAR})\b)?",
    re.IGNORECASE,
)
_DAY_MONTH = re.compile(
    rf"(?<![\w.,/:-])(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s+(?P<month>{_MONTH})\b\.?(?:,?\s+(?P<year>{_YEAR})\b)?",
    re.IGNORECASE,
)
_MONTH_YEAR = re.compile(rf"\b({'|'.join(name[:3] for name in MONTHS)}|sept)\.?(?=\s+{_YEAR}\b)", re.IGNORECASE)
_MONTH_DOT = re.compile(r"\b(jan|feb|aug|sept?|oct|nov|dec)\.(?!\w)", re.IGNORECASE)
_SLASHES = re.compile(r"(?<![\d/.])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\d/])")
_DOTS = re.compile(rf"(?<![\d.])(\d{{1,2}})\.(\d{{1,2}})\.({_YEAR})(?![\d/])")
_ISO = re.compile(rf"(?<![\d-])({_YEAR})-(\d\d)-(\d\d)(?![\d-])")
_DECADE = re.compile(r"(?<![\w.,])(?:(1[1-9]\d0|20\d0)'?s|'?([02-9]0)'?s)\b", re.IGNORECASE)
_YEARS = re.compile(rf"(?<![\w.,-])({_YEAR})\s?-\s?({_YEAR}|\d\d)(?![\w-])")

_HALF = r"(?P<half>[ap])\s?\.?\s?m\b(?P<stop>\.?)"
_CLOCK = re.compile(
    rf"(?<![\w.:,])(?P<hour>[01]?\d|2[0-4]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?(?![\d:])(?:\s?{_HALF})?",
    re.IGNORECASE,
)
_HOUR = re.compile(rf"(?<![\w.:,])(?P<hour>1[0-2]|0?[1-9])\s?{_HALF}", re.IGNORECASE)
_TIME = r"\d{1,2}(?::[0-5]\d)?(?:\s?[ap]\.?m\b\.?)?"
_TIME_SPAN = re.compile(rf"(?<![\w.:,/-])({_TIME})\s?-\s?(?={_TIME}(?![\w:/-]))", re.IGNORECASE)
_OF_A_TIME = re.compile(r":|[ap]\.?m", re.IGNORECASE)
_GOES_ON = re.compile(
    rf"\s+(?:(?i:(?:{_DAY}|{_MONTH})\w*|on|in|at|to|and|or|for|until|tomorrow|today)\b|[A-Z]{{2,4}}\b|[^A-Z])"
)
_BEFORE_DATE = re.compile(r"\b(?:on|in|by|since|until|till|of|from|before|after|between|to|the|for)\s+$")
_VERBS = ("may", "march", "mar", "dec")  # in lower case they are months only where a date may stand


def spell_dates(text: str) -> str:
    """`text` with dates, decades and spans of years in words."""
    text = _DAY_SPAN.sub(lambda m: f"{_day(m[1])} to {_day(m[2])}", text)
    text = _DAY_DOT.sub(lambda m: _day(m[1] or m[2] or m[3]), text)
    if not any(char.isdigit() for char in text):
        return _MONTH_DOT.sub(lambda m: _MONTH_OF[m[1].lower()], text)
    text = _ISO.sub(lambda m: _date(m[0], int(m[2]), int(m[3]), m[1]), text)
    text = _SLASHES.sub(lambda m: _slashes(m[0], int(m[1]), int(m[2]), m[3]), text)
    text = _DOTS.sub(lambda m: _date(m[0], int(m[2]), int(m[1]), m[3]), text)
    text = _MONTH_DAY.sub(_month_day, text)
    text = _DAY_MONTH.sub(_day_month, text)
    text = _MONTH_YEAR.sub(lambda m: _MONTH_OF[m[1].lower()], text)
    text = _MONTH_DOT.sub(lambda m: _MONTH_OF[m[1].lower()], text)
    text = _DECADE.sub(lambda m: plural(year(int(m[1])) if m[1] else cardinal(int(m[2]) or 2_000)), text)
    return _YEARS.sub(_years, text)


def spell_times(text: str) -> str:
    """`text` with times of day in words."""
    if not re.search(r"\d\s?(?::\d|[ap]\.?\s?m\b)", text, re.IGNORECASE):
        return text
    text = _TIME_SPAN.sub(_time_span, text)
    return _HOUR.sub(lambda m: cardinal(int(m["hour"])) + _half(m), _CLOCK.sub(_clock, text))


def _day(written: str) -> str:
    return _DAY_OF[written.lower()]


def _date(written: str, month: int, day: int, written_year: str) -> str:
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return written
    value = int(written_year)
    if len(written_year) < 4:
        value += 2_000 if value < 50 else 1_900
    return f"{MONTHS[month - 1]} {ordinal(day)}, {year(value)}"


def _slashes(written: str, first: int, second: int, written_year: str) -> str:
    """Month first, as in the United States, where that is a date."""
    return _date(written, *((first, second) if first <= 12 else (second, first)), written_year)


def _month_day(match: re.Match[str]) -> str:
    month, day = match["month"], int(match["day"])
    if not 1 <= day <= 31:
        return match[0]
    sure = match["th"] or match["year"] or match["end"]
    if month in _VERBS and not sure and not _BEFORE_DATE.search(match.string[: match.start()]):
        return match[0]  # "they march 3 miles"
    end = f" to {ordinal(int(match['end']))}" if match["end"] else ""
    tail = f", {year(int(match['year']))}" if match["year"] else ""
    return f"{_MONTH_OF[month.lower()[:3]]} {ordinal(day)}{end}{tail}"


def _day_month(match: re.Match[str]) -> str:
    day = int(match["day"])
    if not 1 <= day <= 31 or (match["month"] in _VERBS and not match["year"]):
        return match[0]
    tail = f", {year(int(match['year']))}" if match["year"] else ""
    return f"{_MONTH_OF[match['month'].lower()[:3]]} {ordinal(day)}{tail}"


def _years(match: re.Match[str]) -> str:
    first, second = match[1], match[2]
    if len(second) == 4 and int(second) <= int(first):
        return match[0]
    return f"{year(int(first))} to {year(int(second)) if len(second) == 4 else cardinal(int(second))}"


def _time_span(match: re.Match[str]) -> str:
    after = match.string[match.end() : match.end() + len("00:00 a.m.")]
    return f"{match[1]} to " if _OF_A_TIME.search(match[1] + after) else match[0]


def _clock(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"])
    half = _half(match)
    if match["second"]:
        return f"{cardinal(hour)} {_minutes(minute)} and {cardinal(int(match['second']))} seconds{half}"
    if minute:
        return f"{cardinal(hour)} {_minutes(minute)}{half}"
    if half:
        return cardinal(hour) + half
    if hour in (0, 24):
        return "midnight"
    return cardinal(hour) + (" hundred" if hour > 12 else " o'clock")


def _half(match: re.Match[str]) -> str:
    if not match["half"]:
        return ""
    ends = match["stop"] and match.end() < len(match.string) and not _GOES_ON.match(match.string, match.end())
    return f" {match['half'].upper()} M" + ("." if ends else "")


def _minutes(minute: int) -> str:
    return "oh oh" if not minute else f"oh {cardinal(minute)}" if minute < 10 else cardinal(minute)
