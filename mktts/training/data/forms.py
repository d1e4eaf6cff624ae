"""Ways in which the words that the text front end gives may reach the voice without sounding different.

The front end leaves one case and a mark at the end, whatever was written, so no voice meets other capitals. What it
leaves is commas, which people leave out, and a long sentence that is said in segments, whose later ones begin small
and whose earlier ones have no mark at their end. A voice learns from each of its texts in all of these forms, drawn
anew whenever the text comes up. No audio is made for that: flite says every form of a text alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np


def unmarked(text: str) -> str:
    """Without the mark at its end."""
    return text.rstrip(".!?,;: ") or text


def without_commas(text: str) -> str:
    """Without commas and semicolons, which people leave out in chats."""
    return re.sub(r"[,;](?=\s)", "", text)


def continued(text: str) -> str:
    """With a small letter first, as the rest of a sentence begins; a letter that is said by itself stays."""
    return re.sub(r"^[A-Z](?=[a-z])|^A(?= )", lambda match: match[0].lower(), text)


def bare(text: str) -> str:
    """Begins small, and has no mark but apostrophes and hyphens."""
    return continued(" ".join(re.sub(r"[^\w\s'-]", " ", text).split())) or text


# Form and how often it is drawn; the first is the text as the front end gives it.
FORMS: tuple[tuple[Callable[[str], str], float], ...] = (
    (str, 0.84),
    (unmarked, 0.05),
    (continued, 0.03),
    (without_commas, 0.05),
    (bare, 0.03),
)


def drawn(count: int, generator: np.random.Generator) -> np.ndarray:
    """int64 (count,): indices into FORMS."""
    return generator.choice(len(FORMS), count, p=[share for _, share in FORMS])
