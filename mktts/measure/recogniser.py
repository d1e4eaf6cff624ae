"""What an independent recogniser hears, and how many words of it are wrong: pocketsphinx, with a closed vocabulary and
in free dictation.

Closed: any sequence of the words of the held-out sentences, each as likely as every other at every place, so that it
knows nothing of how they follow one another. As a language model of single words that takes 0.07 s of one core per
second of speech for 1 550 words; the same loop as a grammar takes 4 s for 525. Free: the packaged trigram model."""

import math
import re
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio import resample, to_pcm16
from mktts.errors import BackendUnavailable, MetricsError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.text import spoken

RECOGNISER_RATE_HZ = 16_000
_PADDED_S = 0.2
_ALIGNED_HZ = 100  # frames


def to_16_khz(pcm: np.ndarray) -> np.ndarray:
    """float32 (n,) at 24 kHz -> float32 (ceil(2 n / 3),) at 16 kHz."""
    return resample(pcm, SAMPLE_RATE_HZ, RECOGNISER_RATE_HZ)


def loop_model(vocabulary: Iterable[str]) -> str:
    """An ARPA language model of single words, all and the end as likely as each other."""
    names = ["</s>", *sorted(set(vocabulary))]
    share = f"{-math.log10(len(names)):.4f}"
    lines = [f"{share} {name}" for name in names]
    return "\n".join(("\\data\\", f"ngram 1={len(names) + 1}", "", "\\1-grams:", "-99 <s>", *lines, "", "\\end\\", ""))


def _decoder(what: str, **settings: Any) -> Any:
    """Raises BackendUnavailable without the package."""
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise BackendUnavailable(f"{what} the package pocketsphinx: {error}") from None
    return Decoder(samprate=float(RECOGNISER_RATE_HZ), loglevel="FATAL", **settings)


class Recogniser:
    """pocketsphinx with its packaged English model. One per process: it holds one utterance at a time."""

    def __init__(self, vocabulary: Collection[str] | None = None) -> None:
        """vocabulary: the words of a closed loop, None for free dictation. Words that the packaged dictionary does not
        have cannot be heard; `knows` tells them. Raises BackendUnavailable without the package, MetricsError where it
        knows no word of the vocabulary."""
        needs = "the word error rate needs"
        if vocabulary is None:
            self._dictionary = self._decoder = _decoder(needs)
            return
        self._dictionary = _decoder(needs, lm=None)
        known = {word for word in vocabulary if self.knows(word)}
        if not known:
            raise MetricsError(f"expected words of the recogniser's dictionary, got {sorted(vocabulary)[:5]}")
        from pocketsphinx import get_model_path

        packaged = Path(get_model_path("en-us/cmudict-en-us.dict")).read_text(encoding="utf-8")
        # A dictionary of these words alone: with all 134,000 a loop takes ten seconds to begin, and hears the same.
        lines = [line for line in packaged.splitlines() if re.match(r"[^\s(]*", line)[0] in known]
        with tempfile.TemporaryDirectory() as folder:
            loop, words_of_loop = Path(folder) / "loop.arpa", Path(folder) / "loop.dict"
            loop.write_text(loop_model(known), encoding="utf-8")
            words_of_loop.write_text("\n".join([*lines, ""]), encoding="utf-8")
            self._decoder = _decoder(needs, lm=str(loop), dict=str(words_of_loop))

    def knows(self, word: str) -> bool:
        """Whether the dictionary has the word (closed: whether it is also one of the loop's is not asked)."""
        return self._dictionary.lookup_word(word) is not None

    def sound(self, word: str) -> str:
        """The word's first pronunciation in the dictionary; the word itself where it has none."""
        return self._dictionary.lookup_word(word) or word

    def hear(self, pcm: np.ndarray) -> str:
        """float32 (n,) at 24 kHz -> the words in lower case, "" where none."""
        if not len(pcm):
            return ""
        self._decoder.reinit_feat()  # its estimate of noise would go on from the utterance before
        _listen(self._decoder, to_16_khz(pcm))
        found = self._decoder.hyp()
        return found.hypstr if found else ""


def _listen(decoder: Any, pcm: np.ndarray) -> None:
    """float32 (n,) at 16 kHz."""
    decoder.start_utt()
    decoder.process_raw(to_pcm16(pcm), full_utt=True)
    decoder.end_utt()


class Aligner:
    """When words of a text that is known are said: pocketsphinx' forced alignment, in its packaged English model."""

    def __init__(self) -> None:
        """Raises BackendUnavailable without the package."""
        self._decoder = _decoder("word times are measured with", lm=None)

    def align(self, pcm: np.ndarray, said: Sequence[str]) -> list[tuple[float, float]] | None:
        """float32 (n,) at 24 kHz and its words as `words` gives them -> where each begins and ends, s. None where it
        finds no alignment, or does not know a word."""
        if not said or any(self._decoder.lookup_word(word) is None for word in said):
            return None
        padded = np.pad(to_16_khz(pcm), round(_PADDED_S * RECOGNISER_RATE_HZ))  # else one in nine fails at its edges
        self._decoder.set_align_text(" ".join(said))
        self._decoder.reinit_feat()
        try:
            _listen(self._decoder, padded)
            self._decoder.set_alignment()  # of phones, within the words that were found
            _listen(self._decoder, padded)
        except RuntimeError:
            return None
        found = [one for one in self._decoder.get_alignment() if one.name[0].isalpha()]
        edges = [(one.start, one.start + one.duration) for one in found]
        spans = [(begin / _ALIGNED_HZ - _PADDED_S, end / _ALIGNED_HZ - _PADDED_S) for begin, end in edges]
        return spans if len(spans) == len(said) else None  # an alignment may end before the words do


# ---- words and their errors


def words(text: str) -> list[str]:
    """As the English front end reads them, in lower case, hyphens apart; none of a text without a letter or digit."""
    if not any(map(str.isalnum, text)):
        return []
    return re.findall(r"[a-z]+(?:'[a-z]+)*", spoken(text).lower())


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Substitutions, insertions and deletions of the cheapest alignment (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]
