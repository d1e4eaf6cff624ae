"""Sums of money: "$12", "€3.50", "$1.2 million", "$5-10", "20 USD"."""

from __future__ import annotations

import re

from mktts.speech.front.numbers import NUMBER, cardinal, number

# One, many, and the hundredth part of each.
_NAMES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
    "₩": ("won", "won", "jeon", "jeon"),
}
_CODES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "KRW": "₩"}
SCALES = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion", "tn": "trillion"}
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
