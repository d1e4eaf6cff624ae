"""What is dialled or typed: URLs, mail addresses, telephone numbers, network addresses, versions."""

from __future__ import annotations

import re

from mktts.speech.front.letters import spell_unknown
from mktts.speech.front.numbers import bare, cardinal, in_pairs, number, singly

_ENDS = "com org net edu gov mil int info biz io ai co app dev uk us ca de fr eu jp cn au in tv me fm ly gg xyz".split()
_HOST = rf"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:{'|'.join(_ENDS)})"
_PATH = r"(?::\d+)?(?:[/?#][\w%&=+~#?/@!$*:;,.-]*[\w/=])?/?"
_MAIL = re.compile(r"(?:mailto:)?(?<![\w.])([\w.+%-]+)@((?:[\w-]+\.)+[a-z]{2,})\b", re.IGNORECASE)
_URL = re.compile(
    rf"\b(?:https?://|ftp://)([\w-]+(?:\.[\w-]+)*{_PATH})|(?<![\w@.])((?:www\.[\w-]+(?:\.[\w-]+)+|{_HOST}){_PATH})"
    r"(?![\w@])",
    re.IGNORECASE,
)
_MARKS = {
    ".": "dot",
    "/": "slash",
    "-": "dash",
    "_": "underscore",
    "@": "at",
    "+": "plus",
    "?": "question mark",
    "=": "equals",
    "&": "and",
    "#": "hash",
    "%": "percent",
    ":": "colon",
    "~": "tilde",
}
_SPELLED_ENDS = {"uk", "us", "de", "fr", "eu", "jp", "cn", "au", "tv", "fm", "ly", "gg", "io", "ai", "html", "php"}
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[^\w\s]|_", re.ASCII)

_PHONE = re.compile(
    r"(?<![\w.,-])(?:(\+?\d{1,3})[-. ]\s?)?(?:\((\d{3})\)\s?|(\d{3})[-. ])(\d{3})[-. ](\d{4})(?![\w-])|"
    r"(?<![\w.,-])(\d{3})-(\d{4})(?![\w-])"
)
_FOREIGN = re.compile(r"\+(\d{1,3})((?:[ -]?\(?\d{1,5}\)?){2,5})(?![\w-])")
_DOTTED = re.compile(r"(?<![\w.])v?(\d+(?:\.\d+){2,})(?![\w]|\.\d)", re.IGNORECASE)
_VERSION = re.compile(r"(?<![\w.])v\.?\s?(\d+)(?:\.(\d+))?(?![\w.]*\w)", re.IGNORECASE)
_SOCIAL = re.compile(r"(?<![\w-])(\d{3})-(\d\d)-(\d{4})(?![\w-])")


def spell_addresses(text: str) -> str:
    """`text` with its addresses in words."""
    if "@" in text:
        text = _MAIL.sub(lambda m: f"{_typed(m[1])} at {_typed(m[2])}", text)
    if "." in text or "://" in text:
        text = _URL.sub(lambda m: _typed((m[1] or m[2]).rstrip("/")), text)
    if any(char.isdigit() for char in text):
        text = _PHONE.sub(_phone, text)
        text = _FOREIGN.sub(lambda m: f"plus {singly(m[1])}, {_groups(m[2])}", text)
        text = _SOCIAL.sub(lambda m: ", ".join(singly(part) for part in m.groups()), text)
        text = _DOTTED.sub(_dotted, text)
        text = _VERSION.sub(
            lambda m: "version " + number(m[1]) + (f" point {singly(m[2], 'zero')}" if m[2] else ""), text
        )
    return text


def _typed(address: str) -> str:
    """ "bob.smith99@mail.org" -> "bob dot smith ninety-nine at mail dot org"."""
    words = []
    for piece in _PIECE.findall(address):
        if piece in _MARKS:
            words.append(_MARKS[piece])
        elif piece.isdigit():
            words.append(bare(piece))
        elif piece.lower() == "www":
            words.append("W W W")
        elif piece.isalpha():
            whole = piece.lower()
            words.append(" ".join(whole.upper()) if whole in _SPELLED_ENDS else spell_unknown(whole))
    return " ".join(words)


def _phone(match: re.Match[str]) -> str:
    country, area, bare_area, middle, last, short, tail = match.groups()
    if short:
        return f"{singly(short)}, {singly(tail)}"
    area = area or bare_area
    groups = [in_pairs(area) if area in ("800", "900") else singly(area), singly(middle), singly(last)]
    if country:
        groups.insert(0, ("plus " if country[0] == "+" else "") + singly(country))
    return ", ".join(groups)


def _groups(written: str) -> str:
    return ", ".join(singly(group) for group in re.findall(r"\d+", written))


def _dotted(match: re.Match[str]) -> str:
    parts = match[1].split(".")
    point = " dot " if len(parts) == 4 else " point "
    version = "version " if match[0][0] in "vV" else ""
    return version + point.join(cardinal(int(part)) if len(part) < 4 else singly(part) for part in parts)
