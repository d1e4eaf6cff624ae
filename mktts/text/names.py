"""Names and addresses as they are spoken: titles, abbreviations, Roman numerals, labels; mail, web, telephone."""

from __future__ import annotations

import re

from mktts.text.letters import LISTS, WORDS, spell_unknown
from mktts.text.numbers import bare, cardinal, in_pairs, ordinal, singly, year

_TITLES = WORDS["titles"]  # before a name
_WORDS = ("rep", "hon")  # in lower case no titles
_ALWAYS = WORDS["short_forms"]  # with a full stop or without
_STOPPED = WORDS["stopped_short_forms"]  # with their full stop
_BEFORE_NUMBER = WORDS["before_numbers"]
_ENDS_TOO = frozenset({"ave", "blvd", "rd", "etc", "st"})  # what may well be a sentence's last word
ABBREVIATIONS = frozenset({*_TITLES, *_ALWAYS, *_STOPPED, *_BEFORE_NUMBER, "dr", "st", "e.g", "i.e", "al"})
_BARE = "|".join(sorted(_ALWAYS, key=len, reverse=True))
_SMALL = r"(?:in|on|at|of|and|or|to|is|was|for|by|with|near|from|are|were|has|had|but)\b"
_ALWAYS_AT = re.compile(rf"(?<![\w'-])({_BARE})\b(?!')\.?", re.IGNORECASE)
_TITLE_AT = re.compile(rf"(?<![\w'-])(?<!\d )({'|'.join(_TITLES)})\.(?=\s+[A-Za-z])", re.IGNORECASE)
_STOPPED_AT = re.compile(rf"(?<![\w'.-])({'|'.join(sorted(_STOPPED, key=len, reverse=True))})\.", re.IGNORECASE)
_NUMBER_AT = re.compile(rf"(?<![\w'-])({'|'.join(_BEFORE_NUMBER)})\.\s*(?=\d)", re.IGNORECASE)
_DR = re.compile(r"(?<![\w'-])dr\b\.?", re.IGNORECASE)
_ST = re.compile(r"(?<![\w'-])st(?:\.|\b(?=\s+[A-Z]))", re.IGNORECASE)

_ROMAN = r"(?=[ivxlcdm])m{0,3}(?:cm|cd|d?c{0,3})(?:xc|xl|l?x{0,3})(?:ix|iv|v?i{0,3})"
ROMANS = frozenset("ii iii iv vi vii viii ix xi xii xiii xiv xv xvi xvii xviii xix xx xxi xxii xxiii".split())
_KINGS, BINDERS = LISTS["kings"], LISTS["numbered"]  # the latter before a numeral of one letter
_ROMAN_AT = re.compile(rf"\b([A-Za-z]+)\s+({_ROMAN})\b(?!['-]|\.\s*[A-Za-z])", re.IGNORECASE)


def spell_names(text: str) -> str:
    """`text` with titles, abbreviations, Roman numerals and numbered things in words. Before numbers are read."""
    if "." in text:
        text = _NUMBER_AT.sub(lambda m: _BEFORE_NUMBER[m[1].lower()] + " ", text)
        text = _TITLE_AT.sub(lambda m: m[0] if m[1] in _WORDS else _TITLES[m[1].lower()], text)
    text = _ST.sub(_street_or_saint, _DR.sub(_drive_or_doctor, text))
    text = _ALWAYS_AT.sub(lambda m: _ALWAYS[m[1].lower()] + _kept_stop(m), text)
    if "." in text:
        text = _STOPPED_AT.sub(lambda m: m[0] if m[1] == "V" else _STOPPED[m[1].lower()] + _kept_stop(m), text)
    return _ROMAN_AT.sub(_roman, text)


def _kept_stop(match: re.Match[str]) -> str:
    """The full stop of an abbreviation that ends a sentence: a capital follows that is no small word's."""
    if not match[0].endswith("."):
        return ""
    after = match.string[match.end() :]
    goes_on = not re.match(r"\s+[A-Z][a-z]", after) or re.match(rf"\s+{_SMALL}", after, re.IGNORECASE)
    return "" if match[0].rstrip(".").lower() not in _ENDS_TOO or goes_on else "."


def _neighbours(match: re.Match[str]) -> tuple[str, str]:
    before = re.search(r"([\w'-]+)\s+$", match.string[: match.start()])
    after = re.match(r"\s+([\w'-]+)", match.string[match.end() :])
    return before[1] if before else "", after[1] if after else ""


def _street_or_saint(match: re.Match[str]) -> str:
    before, after = _neighbours(match)
    named = before[:1].isupper() or bool(re.search(r"\d(?:st|nd|rd|th)$", before))
    if after.lower().removesuffix("'s") in LISTS["saints"] or (after[:1].isupper() and not named):
        return "saint"
    return "street" + _kept_stop(match) if before else match[0]


def _drive_or_doctor(match: re.Match[str]) -> str:
    before, after = _neighbours(match)
    place = before[:1].isupper() and before.lower() not in _ALWAYS and not after[:1].isupper()
    return "doctor" if after and not place else "drive" if before else "doctor"


def _roman(match: re.Match[str]) -> str:
    name, written = match[1], match[2]
    if not written or not (_is_one(match) if written in "Ii" else _is_roman(name, written)):
        return match[0]
    value = _value(written.lower())
    read = year if 1_500 < value < 2_100 else cardinal
    return f"{name} {'the ' + ordinal(value) if name.lower() in _KINGS else read(value)}"


def _is_roman(name: str, written: str) -> bool:
    """Whether `written`, which could be a numeral, is one after `name`: always after a king or a chapter."""
    head = name.lower() in _KINGS or name.lower() in BINDERS
    if len(written) == 1:
        return head and written in "VX" and name != "Malcolm"
    if head:
        return True
    if re.search("[cdm]", written, re.IGNORECASE) and (len(written) < 4 or not written.isupper()):
        return False  # "Washington DC", "the mix"
    if len(written) > 4 and written.isupper():
        return True
    if written.lower() == "xxx" or re.fullmatch(_SMALL + "|an?|this|that|my|your|his|her", name, re.IGNORECASE):
        return False
    if written.isupper() and not name.isupper():
        return name[0].isupper() or len(written) > 2
    return len(written) > 2 and "l" not in written.lower()


def _is_one(match: re.Match[str]) -> bool:
    """Whether "I" is a numeral: "World War I", "Part I of the book"; but "the book I read"."""
    if match[1].lower() == "war":
        return bool(re.search(r"\bworld\s+$", match.string[: match.start()], re.IGNORECASE))
    after = match.string[match.end() :]
    return match[1].lower() in BINDERS and match[1][0].isupper() and bool(re.match(r"\s*(?:$|[.,;:)]|of\b)", after))


def _value(roman: str) -> int:
    values = [{"i": 1, "v": 5, "x": 10, "l": 50, "c": 100, "d": 500, "m": 1_000}[letter] for letter in roman]
    return sum(-v if any(w > v for w in values[i + 1 :]) else v for i, v in enumerate(values))


_HOST = rf"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:{'|'.join(sorted(LISTS['hosts']))})"
_PATH = r"(?::\d+)?(?:[/?#][\w%&=+~#?/@!$*:;,.-]*[\w/=])?/?"
_MAIL = re.compile(r"(?:mailto:)?(?<![\w.])([\w.+%-]+)@((?:[\w-]+\.)+[a-z]{2,})\b", re.IGNORECASE)
_URL = re.compile(
    rf"\b(?:https?://|ftp://)([\w-]+(?:\.[\w-]+)*{_PATH})|(?<![\w@.])((?:www\.[\w-]+(?:\.[\w-]+)+|{_HOST}){_PATH})"
    r"(?![\w@])",
    re.IGNORECASE,
)
_MARKS, PATHS = WORDS["marks"], WORDS["paths"]  # of addresses
_SPELLED_ENDS = {"uk", "us", "de", "fr", "eu", "jp", "cn", "au", "tv", "fm", "ly", "gg", "io", "ai", "html", "php"}
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[^\w\s]|_", re.ASCII)

_PHONE = re.compile(
    r"(?<![\w.,-])(?:(\+?\d{1,3})[-. ]\s?)?(?:\((\d{3})\)\s?|(\d{3})[-. ])(\d{3})[-. ](\d{4})(?![\w-])|"
    r"(?<![\w.,-])(\d{3})-(\d{4})(?![\w-])"
)
_FOREIGN = re.compile(r"\+(\d{1,3})((?:[ -]?\(?\d{1,5}\)?){2,5})(?![\w-])")
_DOTTED = re.compile(r"(?<![\w.])v?(\d+(?:\.\d+){2,})(?![\w]|\.\d)", re.IGNORECASE)


def spell_addresses(text: str) -> str:
    """`text` with its addresses in words."""
    if "@" in text:
        text = _MAIL.sub(lambda m: f"{typed(m[1])} at {typed(m[2])}", text)
    if "." in text or "://" in text:
        text = _URL.sub(lambda m: typed((m[1] or m[2]).rstrip("/")), text)
    if any(char.isdigit() for char in text):
        text = _PHONE.sub(_phone, text)
        text = _FOREIGN.sub(lambda m: "plus " + ", ".join(map(singly, [m[1], *re.findall(r"\d+", m[2])])), text)
        text = _DOTTED.sub(_dotted, text)
    return text


def typed(address: str) -> str:
    """An address or a path: "bob.smith99@mail.org" -> "bob dot smith ninety-nine at mail dot org"."""
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
            words.append(
                " ".join(whole.upper()) if whole in _SPELLED_ENDS else PATHS.get(whole) or spell_unknown(whole)
            )
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


def _dotted(match: re.Match[str]) -> str:
    parts = match[1].split(".")
    point = " dot " if len(parts) == 4 else " point "
    version = "version " if match[0][0] in "vV" else ""
    return version + point.join(cardinal(int(part)) if len(part) < 4 else singly(part) for part in parts)
