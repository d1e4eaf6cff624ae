"""Numbers with a unit: "5 km", "70 mph", "3.5%", "20 °C", "5'11\\"", "5-10 kg", "2 1/2 cups", "8.3M"."""

from __future__ import annotations

import re

from mktts.speech.front.money import SCALES
from mktts.speech.front.numbers import NUMBER, cardinal, fraction, number

# Unit as written -> one of it; many are the same word with an s, or what stands behind the bar.
_UNITS = {
    "km": "kilometer",
    "m": "meter",
    "cm": "centimeter",
    "mm": "millimeter",
    "μm": "micrometer",
    "nm": "nanometer",
    "mi": "mile",
    "ft": "foot|feet",
    "yd": "yard",
    "yds": "yard",
    "mph": "mile per hour|miles per hour",
    "km/h": "kilometer per hour|kilometers per hour",
    "kmh": "kilometer per hour|kilometers per hour",
    "kph": "kilometer per hour|kilometers per hour",
    "m/s": "meter per second|meters per second",
    "mpg": "mile per gallon|miles per gallon",
    "kg": "kilogram",
    "g": "gram",
    "mg": "milligram",
    "μg": "microgram",
    "lb": "pound",
    "lbs": "pound",
    "oz": "ounce",
    "l": "liter",
    "ml": "milliliter",
    "cl": "centiliter",
    "gal": "gallon",
    "tbsp": "tablespoon",
    "tsp": "teaspoon",
    "kb": "kilobyte",
    "mb": "megabyte",
    "gb": "gigabyte",
    "tb": "terabyte",
    "kbps": "kilobit per second|kilobits per second",
    "mbps": "megabit per second|megabits per second",
    "gbps": "gigabit per second|gigabits per second",
    "hz": "hertz|hertz",
    "khz": "kilohertz|kilohertz",
    "mhz": "megahertz|megahertz",
    "ghz": "gigahertz|gigahertz",
    "w": "watt",
    "kw": "kilowatt",
    "mw": "megawatt",
    "kwh": "kilowatt hour",
    "v": "volt",
    "kv": "kilovolt",
    "ω": "ohm",
    "kω": "kilohm",
    "db": "decibel",
    "min": "minute",
    "mins": "minute",
    "sec": "second",
    "secs": "second",
    "s": "second",
    "ms": "millisecond",
    "hr": "hour",
    "hrs": "hour",
    "h": "hour",
    "yr": "year",
    "yrs": "year",
    "sq ft": "square foot|square feet",
    "sq. ft": "square foot|square feet",
    "sq km": "square kilometer",
    "sq mi": "square mile",
    "m^2": "square meter",
    "km^2": "square kilometer",
    "cm^2": "square centimeter",
    "ft^2": "square foot|square feet",
    "m^3": "cubic meter",
    "cm^3": "cubic centimeter",
    "rpm": "revolution per minute|revolutions per minute",
    "fps": "frame per second|frames per second",
    "kcal": "kilocalorie",
    "px": "pixel",
    "in.": "inch|inches",  # without its full stop it is a word
    "in^2": "square inch|square inches",
}
_LABELS = re.compile(r"\d+B|[248]K")  # "Apartment 3B" and "4K video" are no amounts
_SCALES = {"f": "fahrenheit", "c": "celsius", "k": "kelvin"}
_PART = r"\d{1,3}/\d{1,3}"
_AMOUNT = rf"(?:\d+\s{_PART}|{_PART}|{NUMBER})"
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
_HEAD = r"(?<![\w.,/:$€£-])"
_MEASURE = re.compile(
    rf"{_HEAD}(?P<low>-?{_AMOUNT})(?:\s?-\s?(?P<high>{NUMBER}))?(?P<gap>\s?|-)(?P<unit>{_UNIT})"
    r"(?![\w/^'])(?P<stop>\.(?=\s+[a-z(\d]|[,;]))?",
    re.IGNORECASE,
)
_PERCENT = re.compile(rf"{_HEAD}(?P<low>[-+]?{NUMBER})(?:\s?%?\s?-\s?(?P<high>{NUMBER}))?\s?%")
_DEGREES = re.compile(
    rf"{_HEAD}(?P<low>-?{NUMBER})(?:\s?°?\s?-\s?(?P<high>{NUMBER}))?\s?°(?:\s?(?P<scale>[CFKcfk])\b)?"
)
_FEET_INCHES = re.compile(r"(?<![\w.])(\d{1,2})'\s?(\d{1,2})(?:\"|''|(?![\w'\"]))")
_INCHES = re.compile(rf"(?<![\w.\"])({NUMBER})(?:\"|'')(?=[\s,.;-])")
_MIXED = re.compile(rf"{_HEAD}(?:(\d+)\s)?(\d{{1,3}})/(\d{{1,3}})(?![\w/])(\s(?:of a|an?)\s)?")
_LARGE = re.compile(rf"{_HEAD}({NUMBER})(K|M|B|bn|mn)\b(?!-)")
_TIMES = re.compile(r"(?<![\w.])(\d+)\s?[xX]\s?(?=\d+\b)")
_WHOLE_PARTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)  # of an inch, a cup, a class; others are scores and names


def spell_measures(text: str) -> str:
    """`text` with measures, percentages, temperatures, heights and fractions in words."""
    if not any(char.isdigit() for char in text):
        return text
    text = _PERCENT.sub(lambda m: f"{_span(m)} percent", text)
    text = _DEGREES.sub(_degrees, text)
    text = _FEET_INCHES.sub(lambda m: f"{cardinal(int(m[1]))} foot {cardinal(int(m[2]))}", text)
    if text.count('"') == 1:  # else quotation marks
        text = _INCHES.sub(lambda m: f"{number(m[1])} inch", text)
    text = _MEASURE.sub(_measure, text)
    text = _MIXED.sub(_parts, text)
    text = _TIMES.sub(rf"\1 {'times' if '=' in text else 'by'} ", text)
    return _LARGE.sub(lambda m: _large(m[0], m[1], m[2]), text)


def _large(whole: str, written: str, scale: str) -> str:
    return whole if _LABELS.fullmatch(whole) else f"{number(written)} {SCALES[scale.lower()]}"


def _measure(match: re.Match[str]) -> str:
    written = match["unit"]
    one, _, many = _UNITS[written.lower()].partition("|")
    if len(written) == 1 and not match["gap"] and written in "GHVM":  # "5G", "4H", a label; "8M", millions
        return match[0]
    low = match["low"]
    single = (low == "1" or ("/" in low and " " not in low)) and not match["high"] or match["gap"] == "-"
    return f"{_span(match)} {one if single else many or one + 's'}"


def _degrees(match: re.Match[str]) -> str:
    scale = f" {_SCALES[match['scale'].lower()]}" if match["scale"] else ""
    degree = "degree" if match["low"] == "1" else "degrees"
    return f"{_span(match)} {degree}{scale}"


def _span(match: re.Match[str]) -> str:
    return _amount(match["low"]) + (f" to {number(match['high'])}" if match["high"] else "")


def _amount(written: str) -> str:
    if written[0] in "+-":
        return ("minus " if written[0] == "-" else "plus ") + _amount(written[1:])
    return _MIXED.sub(_parts, written) if "/" in written else number(written)


def _parts(match: re.Match[str]) -> str:
    whole, above, below = match[1], int(match[2]), int(match[3])
    tail = match[4] or ""
    if whole:
        if below not in (*_WHOLE_PARTS, 10) or above >= below:
            return match[0]
        return f"{number(whole)} and {'a ' if above == 1 else ''}{fraction(above, below).removeprefix('one ')}{tail}"
    if (below in _WHOLE_PARTS and 0 < above < below) or (above == 1 and below in (9, 10, 100)):
        return fraction(above, below) + tail
    if below in (10, 100) and above <= below:
        return f"{cardinal(above)} out of {cardinal(below)}{tail}"
    return f"{cardinal(above)} {cardinal(below)}{tail}"  # 24/7, 50/50, 9/11
