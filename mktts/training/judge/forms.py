"""What the written form of a text costs: the same words in lower case, capitals, Title Case, without the final mark."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mktts.measure.recogniser import rate_ratio
from mktts.training.judge.listener import STUDENT, Line, Listened

AS_WRITTEN = "as_written"
FORMS: Mapping[str, Callable[[str], str]] = {
    AS_WRITTEN: lambda text: text,
    "lower_case": str.lower,
    "all_caps": str.upper,
    "title_case": lambda text: re.sub(r"(?<![A-Za-z'])[a-z]", lambda letter: letter[0].upper(), text),
    "no_final_mark": lambda text: text.rstrip(".!?"),
}

Figures = dict[str, Any]


def lines(texts: Mapping[int, str], speakers: Sequence[str], seed: int) -> list[Line]:
    """Every text, by its place in the file, once in every form, speakers in turn; speaker and seed are the same in all.

    As written they are lines of mktts.training.judge.natural, which need not be spoken again.
    """
    return [
        Line(form(text), text, speakers[i % len(speakers)], seed + place, (STUDENT,))
        for form in FORMS.values()
        for i, (place, text) in enumerate(texts.items())
    ]


def section(listened: Sequence[Listened]) -> Figures:
    """By form: error rate, and its ratio to that of the texts as written; `worst`: the form of the highest ratio.

    `listened` are the results of `lines`, in their order.
    """
    count = len(listened) // len(FORMS)
    errors = {
        name: [one.voices[STUDENT].errors or 0 for one in listened[i * count : (i + 1) * count]]
        for i, name in enumerate(FORMS)
    }
    words = sum(one.words for one in listened[:count])
    found: Figures = {AS_WRITTEN: {"rate": sum(errors[AS_WRITTEN]) / words}}
    for name in FORMS:
        if name != AS_WRITTEN:
            ratio = rate_ratio(errors[AS_WRITTEN], errors[name])
            rate = float(np.sum(errors[name]) / words)
            found[name] = {"rate": rate, "ratio": ratio and ratio[0], "interval_95": ratio and ratio[1:]}
    with_ratio = [name for name in FORMS if found[name].get("ratio") is not None]
    worst = max(with_ratio, key=lambda name: found[name]["ratio"], default=None)
    return {"forms": found, "worst": worst, "sentences": count, "words": words}
