"""Texts to learn from as the voice will meet them: the words of the text front end that its checkpoint names."""

from __future__ import annotations

from mktts.errors import TextError
from mktts.speech.front import spoken
from mktts.training.talker.sizes import LANGUAGE


def as_spoken(text: str) -> str:
    """The words of `text`; about 0.1 ms of one core. What is words already must not come again: "xml" becomes "X M L",
    and that "ten M L".

    Raises TextError, which names the text, where the front end cannot read it.
    """
    try:
        return spoken(text, LANGUAGE)
    except TextError as error:
        raise TextError(f"{text!r} cannot be learned from: {error}") from None
