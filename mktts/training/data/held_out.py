"""The sentences to be judged by, and what a text to learn from may not have in common with them.

Two lists, each a file, so that no later word or pattern changes them. `held_out.txt`: sentences of the training
grammar, hard to guess from their context. `natural.txt`: sentences of everyday speech (news, dialogue, requests,
stories, descriptions; 4 to 20 words, no digits), written for this purpose and taken from nowhere. 14 of 332 written
were left out, once and for all: pocketsphinx misheard more than a quarter of their words when flite said them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from mktts.errors import TextError
from mktts.text import spoken
from mktts.training.talker.sizes import LANGUAGE

RUN_WORDS = 6  # as many words in a row of a natural sentence no text to learn from may have


def normal(text: str) -> str:
    """What makes two sentences the same: words in lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower().replace("’", "'")))


def as_spoken(text: str) -> str:
    """The words that the text front end makes of `text`, which is what a voice meets. What is words already must not
    come again: "xml" becomes "X M L", and that "ten M L".

    Raises TextError, which names the text, where the front end cannot read it.
    """
    try:
        return spoken(text, LANGUAGE)
    except TextError as error:
        raise TextError(f"{text!r} cannot be learned from: {error}") from None


def held_out() -> list[str]:
    """The grammar's sentences to be judged by, all different; they are never in a list to learn from."""
    return list(_lines("held_out.txt"))


def natural() -> list[str]:
    """The sentences of everyday speech to be judged by, all different; nor are they in a list to learn from."""
    return list(_lines("natural.txt"))


def is_held_out(text: str) -> bool:
    """Whether `text` may not be learned from: one of either list, or with six words in a row of a natural sentence, or
    all of a shorter one. Case and punctuation make no difference."""
    words = normal(text).split()
    whole, runs = _kept()
    return " ".join(words) in whole or any(run in runs for n in range(1, RUN_WORDS + 1) for run in _runs(words, n))


@cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple(files("mktts.training.data").joinpath(name).read_text(encoding="utf-8").splitlines())


@cache
def _kept() -> tuple[frozenset[str], frozenset[tuple[str, ...]]]:
    """Both lists' sentences; every run of six words of a natural one, of a shorter one the whole."""
    spoken = [normal(line).split() for line in _lines("natural.txt")]
    runs = frozenset(run for words in spoken for run in _runs(words, min(RUN_WORDS, len(words))))
    return frozenset(map(normal, (*_lines("held_out.txt"), *_lines("natural.txt")))), runs


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))
