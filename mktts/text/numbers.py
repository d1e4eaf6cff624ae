"""Numbers, sums of money and measures as they are spoken."""

from __future__ import annotations

import re

from num2words import num2words

from mktts.text.letters import WORDS

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


_NAMES = {sign: words.split() for sign, words in WORDS["money"].items()}  # one, many, and the hundredth part of each
_CODES, SCALES = WORDS["currency_codes"], WORDS["scales"]
_SCALE = r"(?:\s?(?P<scale>(?i:hundred|thousand|million|billion|trillion|mn|bn|tn|k|m|b)\b))?"
_SIGN = r"(?:\b(?:US|CA?|AU?|NZ|HK|S))?(?P<sign>[$€£¥₹₩])\s?"
_CODE = "|".join(_CODES)
_RANGE = re.compile(rf"{_SIGN}(?P<low>{NUMBER})\s?-\s?[$€£¥₹₩]?(?P<high>{NUMBER}){_SCALE}")
_BEFORE = re.compile(rf"(?P<minus>(?<![\w)])-\s?)?{_SIGN}(?P<minus2>-)?(?P<sum>{NUMBER}){_SCALE}(?P<thing>-[a-z]+)?")
_AFTER = re.compile(rf"(?P<sum>{NUMBER}){_SCALE}\s?(?P<sign>[€£¥₹₩$]|(?i:{_CODE})\b)(?!\d)")
_CODE_FIRST = re.compile(rf"\b(?P<sign>{_CODE})\s?(?P<sum>{NUMBER}){_SCALE}")
_CENTS = re.compile(r"(?P<sum>\d+)\s?¢")
_THINGS = re.compile(r"\s(?:bill|note|coin|gift card|tip|deal|fee|fine|ticket)\b", re.IGNORECASE)


def spell_money(text: str) -> str:
    """`text` with its sums in words."""
    if not re.search(rf"[$€£¥₹₩¢]|{_CODE}", text, re.IGNORECASE):
        return text
    text = _RANGE.sub(lambda m: f"{number(m['low'])} to {number(m['high'])}{_scaled(m)} {_NAMES[m['sign']][1]}", text)
    for pattern in (_BEFORE, _CODE_FIRST, _AFTER):
        text = pattern.sub(_sum, text)
    return _CENTS.sub(lambda m: f"{number(m['sum'])} {'cent' if m['sum'] == '1' else 'cents'}", text)


def _sum(match: re.Match[str]) -> str:
    found = match.groupdict()
    one, many, cent, cents = _NAMES[_CODES.get(found["sign"].upper(), found["sign"])]
    written, scale = found["sum"], _scaled(match)
    whole, _, part = written.replace(",", "").partition(".")
    minus = "minus " if found.get("minus") or found.get("minus2") else ""
    if found.get("thing") or _THINGS.match(match.string, match.end()):  # "a $5 bill", "a $20-a-day habit"
        return f"{minus}{number(written)}{scale} {one}{(found.get('thing') or '').replace('-', ' ')}"
    if scale or len(part) not in (0, 2):
        return f"{minus}{number(written)}{scale} {many}"
    words = []
    if whole.strip("0") or not int(part or 0):
        words.append(f"{number(whole)} {one if whole == '1' else many}")
    if int(part or 0):
        words.append(f"{cardinal(int(part))} {cent if int(part) == 1 else cents}")
    return minus + " and ".join(words)


def _scaled(match: re.Match[str]) -> str:
    scale = (match["scale"] or "").lower()
    return f" {SCALES.get(scale, scale)}" if scale else ""


# Unit as written -> one of it; many are the same word with an s, or what stands behind the bar.
_UNITS = WORDS["units"]  # "foot|feet": one and several
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
    return _LARGE.sub(lambda m: m[0] if _LABELS.fullmatch(m[0]) else f"{number(m[1])} {SCALES[m[2].lower()]}", text)


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
