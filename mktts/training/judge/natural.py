"""Word errors on sentences of everyday speech: every sentence by every speaker, in free dictation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mktts.errors import MetricsError
from mktts.measure.recogniser import rate_ratio
from mktts.training.data.held_out import natural
from mktts.training.judge.intervals import of_rate
from mktts.training.judge.listener import CODEC, STUDENT, TEACHER, Line, Listened

Figures = dict[str, Any]


def sentences(count: int | None = None) -> dict[int, str]:
    """The natural sentences by their place in the file, or `count` of them, evenly spread: a fair part of all.

    Raises MetricsError for a count that is not 1 to the number there is.
    """
    found = natural()
    if count is not None and not 0 < count <= len(found):
        raise MetricsError(f"expected 1 to {len(found)} natural sentences, got {count}")
    return {(place := i * len(found) // (count or len(found))): found[place] for i in range(count or len(found))}


def lines(texts: Mapping[int, str], speakers: Sequence[str], seed: int, codec: bool = False) -> list[Line]:
    """Every text by every speaker, a text by all of them before the next one; codec: the codec's copy too.

    A text's seed is `seed` and its place, so that it sounds the same in a part of the sentences as in all.
    """
    voices = (STUDENT, TEACHER, CODEC) if codec else (STUDENT, TEACHER)
    return [
        Line(text, text, speaker, seed + place, voices, sound=True)
        for place, text in texts.items()
        for speaker in speakers
    ]


def word_section(listened: Sequence[Listened]) -> Figures:
    """Rates of teacher and student with their intervals, their ratio, of all and by speaker; the best speaker.

    The best is the one of whose words the recogniser mishears the fewest. Intervals are over sentences, each with all
    its speakers. `rows`: the errors of each utterance.
    """
    speakers = list(dict.fromkeys(one.line.speaker for one in listened))
    by_speaker = {name: ratio_of([one for one in listened if one.line.speaker == name]) for name in speakers}
    found = ratio_of(listened)
    found["by_speaker"] = by_speaker
    found["best"] = min(speakers, key=lambda name: by_speaker[name][STUDENT]["rate"])
    if all(CODEC in one.voices for one in listened):
        found[CODEC] = ratio_of(listened, CODEC)
    found["rows"] = [
        {
            "text": one.line.text,
            "speaker": one.line.speaker,
            "seed": one.line.seed,
            "words": one.words,
            "errors": {name: voice.errors for name, voice in one.voices.items()},
            "heard": {name: voice.heard for name, voice in one.voices.items()},
        }
        for one in listened
    ]
    return found


def ratio_of(listened: Sequence[Listened], voice: str = STUDENT) -> Figures:
    """Rates of teacher and `voice`, and their ratio: sentences of several speakers are one draw of the bootstrap."""
    words = _sums(listened, {id(one): one.words for one in listened})
    errors = {
        name: _sums(listened, {id(one): one.voices[name].errors or 0 for one in listened}) for name in (TEACHER, voice)
    }
    ratio = rate_ratio(errors[TEACHER].tolist(), errors[voice].tolist())
    return {
        **{
            name: {"rate": float(errors[name].sum() / words.sum()), "interval_95": of_rate(errors[name], words)}
            for name in (TEACHER, voice)
        },
        "ratio": ratio and ratio[0],
        "interval_95": ratio and ratio[1:],
        "sentences": len(words),
        "words": int(words.sum()),
    }


def _sums(listened: Sequence[Listened], values: Mapping[int, int]) -> np.ndarray:
    """(sentences,): the values of a sentence's utterances added up."""
    found: dict[str, int] = {}
    for one in listened:
        found[one.line.said] = found.get(one.line.said, 0) + values[id(one)]
    return np.array(list(found.values()))
