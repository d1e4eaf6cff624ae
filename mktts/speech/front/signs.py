"""Characters before the rules, marks after them: quotation marks, dashes, accents, brackets, emoji."""

from __future__ import annotations

import re
import unicodedata

from mktts.speech.front.scripts import GREEK

_BEFORE = str.maketrans(
    dict.fromkeys("‘’‚ʼ′`´", "'")
    | dict.fromkeys("“”„″«»", '"')
    | dict.fromkeys("‐‑‒–−", "-")
    | dict.fromkeys("—―", " — ")
    | dict.fromkeys("™®©", "")
    | {"²": "^2", "³": "^3", "×": " x ", "÷": " divided by ", "≈": "about ", "±": " plus or minus ", "…": "..."}
    | {"≥": " at least ", "≤": " at most ", "→": ", ", "•": ", ", "·": " ", "№": "No. ", "⁄": "/"}
)
# Letters that do not come apart into a plain letter and an accent.
_LETTERS = str.maketrans(
    {"ß": "ss", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "ð": "th", "Ð": "Th", "þ": "th", "Þ": "Th", "ı": "i"}
    | {"æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ŋ": "ng", "ħ": "h"}
    | {letter: f" {name} " for letter, name in GREEK.items() if letter not in "μΩ"}  # those two stand in units
)
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")  # 2½ is two and a half, not 21/2
_DROPPED = re.compile(r"[^A-Za-z0-9\s.,;:?!'-]")
_CURRENCIES = "$€£¥₹₩¢°µμΩ"


def plain_characters(text: str) -> str:
    """`text` in ASCII, but for signs that the rules read ($ and its like): one form of each mark, no accents."""
    if text.isascii():
        return text.replace("`", "'")
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text.translate(_BEFORE))).translate(_BEFORE)
    apart = unicodedata.normalize("NFD", text.translate(_LETTERS))
    return "".join(char for char in apart if char.isascii() or char in _CURRENCIES or char == "—")


def plain_marks(text: str) -> str:
    """Words and the marks . , ; : ? ! with one space between words: brackets and dashes become commas, the rest
    falls away."""
    text = re.sub(r"\s+-+\s+|—|--+|[()\[\]{}|]", ", ", text)
    text = re.sub(r"\.{2,}(?=\s+[a-z])", ",", text)
    text = _DROPPED.sub(" ", text)
    text = re.sub(r"(?<![A-Za-z])['-]+|['-]+(?![A-Za-z])", " ", text)
    text = re.sub(r"\s+([.,;:?!])", r"\1", " ".join(text.split()))
    return re.sub(r"[.,;:?!]{2,}", _strongest, re.sub(r"(?<=[.,;:?!]) (?=[.,;:?!])", "", text))


def _strongest(marks: re.Match[str]) -> str:
    return next(mark for mark in "?!.:;," if mark in marks[0])
