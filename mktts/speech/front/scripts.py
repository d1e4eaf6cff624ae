"""Which letters a language is written in, and text that a voice has no sounds for.

A letter's script is the first word of its Unicode name ("CYRILLIC SMALL LETTER A"), after compatibility forms are
resolved (NFKC), so that a full-width "Ａ" is Latin.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache

from mktts.errors import TextError

_LATIN = frozenset({"LATIN"})
_JAPANESE = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"})
# Of the model's languages, those that are not written in Latin letters alone.
_SCRIPTS = {
    "chinese": _LATIN | {"CJK"},
    "japanese": _LATIN | _JAPANESE,
    "korean": _LATIN | {"HANGUL", "CJK"},
    "russian": _LATIN | {"CYRILLIC"},
}
# Greek letters that stand in texts of any language as signs; a Greek word has others beside them.
GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "Δ": "delta",
    "θ": "theta",
    "λ": "lambda",
    "μ": "mu",
    "π": "pi",
    "Ω": "ohms",
}


def scripts_of(languages: Iterable[str]) -> frozenset[str]:
    """The scripts of `languages`, named as in Unicode."""
    return frozenset().union(*(_SCRIPTS.get(language, _LATIN) for language in languages))


def check_script(text: str, scripts: frozenset[str], languages: Iterable[str]) -> None:
    """Raises TextError naming the first letter or digit of `text` that is of another script than `scripts`."""
    if text.isascii():
        return
    for place, char in enumerate(text):
        script = _script(char)
        if script is not None and script not in scripts:
            raise TextError(
                f"expected text that a voice of {', '.join(languages)} can speak, in the letters "
                f"{', '.join(sorted(scripts))}, got {script} in {text[place : place + 20]!r}: leave it out, or take a "
                "checkpoint of that language"
            )


@cache
def _script(char: str) -> str | None:
    """None: a sign, or a letter that every language may use."""
    for part in unicodedata.normalize("NFKC", char):
        letter = unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo", "Nd")
        if letter and not part.isascii() and part not in GREEK:
            return unicodedata.name(part, "UNKNOWN").split()[0]
    return None
