"""Ways in which one text may be written without sounding different: capitals, marks, commas.

A voice learns from each of its texts in all of them, drawn anew whenever the text comes up, so that none is strange to
it. No audio is made for that: flite says every form of a text alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np


def plain(text: str) -> str:
    """As the text front end of the released voice gives it: words of more than one letter small, but at a beginning."""
    text = re.sub(r"[A-Za-z][A-Za-z'-]+", lambda word: word[0] if word[0][:2] == "I'" else word[0].lower(), text)
    return re.sub(r"(^|[.?!]\s+)([a-z])", lambda match: match[1] + match[2].upper(), text)


def unmarked(text: str) -> str:
    """Without the mark at its end."""
    return text.rstrip(".!?,;: ") or text


def without_commas(text: str) -> str:
    """Without commas and semicolons, which people leave out in chats."""
    return re.sub(r"[,;](?=\s)", "", text)


def titled(text: str) -> str:
    """Every word with a capital; what follows an apostrophe stays small ("Don't")."""
    return re.sub(r"(^|[\s(-])([a-z])", lambda match: match[1] + match[2].upper(), text)


def lowered_unmarked(text: str) -> str:
    return unmarked(text).lower()


def bare(text: str) -> str:
    """Small letters, and no mark but apostrophes and hyphens."""
    return " ".join(re.sub(r"[^\w\s'-]", " ", text.lower()).split()) or text


# Form and how often it is drawn; the first is the text as it stands. The front end takes care of capitals and of the
# last mark where it runs, so its form counts most.
FORMS: tuple[tuple[Callable[[str], str], float], ...] = (
    (str, 0.30),
    (plain, 0.46),
    (str.lower, 0.03),
    (str.upper, 0.03),
    (titled, 0.03),
    (unmarked, 0.05),
    (lowered_unmarked, 0.03),
    (without_commas, 0.04),
    (bare, 0.03),
)


def drawn(count: int, generator: np.random.Generator) -> np.ndarray:
    """int64 (count,): indices into FORMS."""
    return generator.choice(len(FORMS), count, p=[share for _, share in FORMS])


def spread(texts: Iterable[str]) -> Iterator[str]:
    """Texts, plain or as they stand, some in capitals or titled too: for a tokenizer that must know the forms."""
    for i, text in enumerate(texts):
        yield (plain, str)[i % 2](text)
        if i % 8 < 2:
            yield (str.upper, titled)[i % 8](text)
