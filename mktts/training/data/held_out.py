"""The sentences to be judged by, and what a text to learn from may not have in common with them.

Two lists, each a file, so that no later word or pattern changes them. `held_out.txt`: sentences of the training
grammar, hard to guess from their context. `natural.txt`: sentences of everyday speech (news, dialogue, requests,
stories, descriptions; 4 to 20 words, no digits), written for this purpose and taken from nowhere. Of those written, a
sentence stayed if the recogniser has all its words and mishears at most a quarter of them when the teacher says it
(three speakers together; 14 of 332 went), whatever a student makes of it. That makes the teacher's own rate a little
better than by chance, 0.076 of 9 975 words (slt 0.103, rms 0.036, awb 0.089), and every ratio to it a little worse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files

RUN_WORDS = 6  # as many words in a row of a natural sentence no text to learn from may have


def normal(text: str) -> str:
    """What makes two sentences the same: words in lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower().replace("’", "'")))


def held_out() -> list[str]:
    """The grammar's sentences to be judged by, all different; they are never in a list to learn from."""
    return list(_lines("held_out.txt"))


def natural() -> list[str]:
    """The sentences of everyday speech to be judged by, all different; nor are they in a list to learn from."""
    return list(_lines("natural.txt"))


def is_held_out(text: str) -> bool:
    """Whether `text` may not be learned from.

    That is so where it is one of either list, or has six words in a row of a natural sentence, or all of a shorter
    one. Case and punctuation make no difference.
    """
    wanted = normal(text)
    return wanted in _sentences() or any(run in _runs() for run in _runs_of(wanted.split(), _run_lengths()))


def refused(texts: Iterable[str]) -> list[str]:
    """Those of `texts` that may not be learned from: none, in a list that is fit to train with."""
    return [text for text in texts if is_held_out(text)]


@cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple(files("mktts.training.data").joinpath(name).read_text(encoding="utf-8").splitlines())


@cache
def _sentences() -> frozenset[str]:
    return frozenset(map(normal, (*_lines("held_out.txt"), *_lines("natural.txt"))))


@cache
def _runs() -> frozenset[tuple[str, ...]]:
    """Every run of six words of a natural sentence; of a shorter sentence the whole."""
    sentences = [normal(line).split() for line in _lines("natural.txt")]
    return frozenset(run for words in sentences for run in _runs_of(words, (min(RUN_WORDS, len(words)),)))


@cache
def _run_lengths() -> tuple[int, ...]:
    return tuple(sorted({len(run) for run in _runs()}))


def _runs_of(words: list[str], lengths: Iterable[int]) -> Iterator[tuple[str, ...]]:
    for length in lengths:
        for start in range(len(words) - length + 1):
            yield tuple(words[start : start + length])
