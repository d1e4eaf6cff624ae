"""Word errors and word times by an independent recogniser: pocketsphinx, with a closed vocabulary or free dictation.

Closed: any sequence of the words of the held-out sentences, with equal probability at every position, so that word
order carries no information. As a unigram language model this takes 0.07 s of one core per second of speech with 1 550
words; the same loop as a grammar takes 4 s with 525 words. Free: the packaged trigram model."""

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
_ALIGNED_HZ = 100  # frames per second of pocketsphinx


def to_16_khz(pcm: np.ndarray) -> np.ndarray:
    """Resamples float32 (n,) at 24 kHz to float32 (ceil(2 n / 3),) at 16 kHz."""
    return resample(pcm, SAMPLE_RATE_HZ, RECOGNISER_RATE_HZ)


def loop_model(vocabulary: Iterable[str]) -> str:
    """A unigram language model in ARPA format in which all words and the end are equally likely."""
    names = ["</s>", *sorted(set(vocabulary))]
    share = f"{-math.log10(len(names)):.4f}"
    lines = [f"{share} {name}" for name in names]
    return "\n".join(("\\data\\", f"ngram 1={len(names) + 1}", "", "\\1-grams:", "-99 <s>", *lines, "", "\\end\\", ""))


def _decoder(what: str, **settings: Any) -> Any:
    """Makes a pocketsphinx decoder. Raises BackendUnavailable without the package."""
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise BackendUnavailable(f"{what} the package pocketsphinx: {error}") from None
    return Decoder(samprate=float(RECOGNISER_RATE_HZ), loglevel="FATAL", **settings)


class Recogniser:
    """pocketsphinx with its packaged English model. It processes one utterance at a time."""

    def __init__(self, vocabulary: Collection[str] | None = None) -> None:
        """vocabulary: the words of a closed loop; None for free dictation. Words that are not in the packaged
        dictionary (see `knows`) cannot be recognised. Raises BackendUnavailable without the package, MetricsError if no
        word of the vocabulary is known."""
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
        # A dictionary of only these words: with all 134,000 a loop takes ten seconds to load, for the same result.
        lines = [line for line in packaged.splitlines() if re.match(r"[^\s(]*", line)[0] in known]
        with tempfile.TemporaryDirectory() as folder:
            loop, words_of_loop = Path(folder) / "loop.arpa", Path(folder) / "loop.dict"
            loop.write_text(loop_model(known), encoding="utf-8")
            words_of_loop.write_text("\n".join([*lines, ""]), encoding="utf-8")
            self._decoder = _decoder(needs, lm=str(loop), dict=str(words_of_loop))

    def knows(self, word: str) -> bool:
        """Whether the packaged dictionary has the word, whether or not it is in the closed vocabulary."""
        return self._dictionary.lookup_word(word) is not None

    def sound(self, word: str) -> str:
        """The word's first pronunciation in the dictionary, or the word itself if it has none."""
        return self._dictionary.lookup_word(word) or word

    def hear(self, pcm: np.ndarray) -> str:
        """Recognises float32 (n,) at 24 kHz; returns the words in lower case, "" if there are none."""
        if not len(pcm):
            return ""
        self._decoder.reinit_feat()  # else the noise estimate of the previous utterance would be kept
        _listen(self._decoder, to_16_khz(pcm))
        found = self._decoder.hyp()
        return found.hypstr if found else ""


def _listen(decoder: Any, pcm: np.ndarray) -> None:
    """Decodes an utterance, float32 (n,) at 16 kHz."""
    decoder.start_utt()
    decoder.process_raw(to_pcm16(pcm), full_utt=True)
    decoder.end_utt()


class Aligner:
    """Finds the times of the words of a known text, by forced alignment with pocketsphinx' packaged English model."""

    def __init__(self) -> None:
        """Raises BackendUnavailable without the package."""
        self._decoder = _decoder("word times are measured with", lm=None)

    def align(self, pcm: np.ndarray, said: Sequence[str]) -> list[tuple[float, float]] | None:
        """Aligns float32 (n,) at 24 kHz with its words, as `words` returns them. Returns start and end of each in s, or
        None if there is no alignment or a word is not in the dictionary."""
        if not said or any(self._decoder.lookup_word(word) is None for word in said):
            return None
        padded = np.pad(to_16_khz(pcm), round(_PADDED_S * RECOGNISER_RATE_HZ))  # else one in nine alignments fails
        self._decoder.set_align_text(" ".join(said))
        self._decoder.reinit_feat()
        try:
            _listen(self._decoder, padded)
            self._decoder.set_alignment()  # second pass: aligns phones within the words that were found
            _listen(self._decoder, padded)
        except RuntimeError:
            return None
        found = [one for one in self._decoder.get_alignment() if one.name[0].isalpha()]
        edges = [(one.start, one.start + one.duration) for one in found]
        spans = [(begin / _ALIGNED_HZ - _PADDED_S, end / _ALIGNED_HZ - _PADDED_S) for begin, end in edges]
        return spans if len(spans) == len(said) else None  # an alignment may lack the last words


# ---- words and their errors


def words(text: str) -> list[str]:
    """The words of a text as the English front end reads it: lower case, split at hyphens; [] for only punctuation."""
    if not any(map(str.isalnum, text)):
        return []
    return re.findall(r"[a-z]+(?:'[a-z]+)*", spoken(text).lower())


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """The word-level Levenshtein distance: substitutions, insertions and deletions."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]
