"""Word error rate, and what an independent recogniser hears."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mktts.errors import BackendUnavailable, MetricsError

RECOGNISER_RATE_HZ = 16_000


def words(text: str) -> list[str]:
    """Lower case, hyphens apart, no punctuation but the apostrophe."""
    return re.findall(r"[a-z0-9']+", text.lower().replace("-", " "))


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Substitutions, insertions and deletions of the cheapest alignment (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


def word_error_rate(said: Sequence[str], heard: Sequence[str]) -> float:
    """Errors of all sentences over words said. Raises MetricsError where no word was said."""
    total = sum(len(words(text)) for text in said)
    if not total or len(said) != len(heard):
        raise MetricsError(f"expected as many texts heard as said, with words: got {len(said)} and {len(heard)}")
    return sum(word_errors(words(a), words(b)) for a, b in zip(said, heard, strict=True)) / total


class Recogniser:
    """pocketsphinx with its packaged English model; `sentences` None is free dictation, else any words of them."""

    def __init__(self, sentences: Sequence[str] | None = None) -> None:
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise BackendUnavailable(f"the word error rate needs the package pocketsphinx: {error}") from None
        if sentences is None:
            self._decoder: Any = Decoder(samprate=float(RECOGNISER_RATE_HZ), loglevel="FATAL")
            return
        self._decoder = Decoder(samprate=float(RECOGNISER_RATE_HZ), lm=None, loglevel="FATAL")
        vocabulary = sorted({word for text in sentences for word in words(text)})
        known = [word for word in vocabulary if self._decoder.lookup_word(word) is not None]
        self._decoder.add_jsgf_string("loop", f"#JSGF V1.0;\ngrammar loop;\npublic <said> = ({' | '.join(known)})+;\n")
        self._decoder.activate_search("loop")

    def hear(self, pcm: np.ndarray) -> str:
        """float32 (n,) at 16 kHz -> the words, "" where none."""
        self._decoder.start_utt()
        self._decoder.process_raw((np.clip(pcm, -1, 1) * 32_767).astype("<i2").tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr if found else ""
