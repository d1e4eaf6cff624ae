"""Sixty texts with numbers, prices, times, dates, titles and addresses: are they read right?

By the front end's words, against the readings that written_numbers.tsv allows; and by ear: a recogniser that may
choose among the right readings of all sixty, and wrong readings of each, is to choose a right one of this text. A
wrong reading is one a voice without a front end may give: signs left out, digits one by one, or left out too. The
choice tells a right reading from these; it does not tell whether a word was said well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from mktts.checkpoint import Checkpoint
from mktts.measure.recogniser import words
from mktts.speech.front import spoken
from mktts.training.data.held_out import normal
from mktts.training.judge.listener import CHOICE, STUDENT, TEACHER, Line, Listened

FILE = "written_numbers.tsv"
_ONES = "zero one two three four five six seven eight nine".split()

Figures = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A text as written, and the readings that are right: words in lower case, the likeliest first."""

    written: str
    readings: tuple[str, ...]


def items() -> list[Item]:
    """The sixty of the file."""
    return read_items(files("mktts.training.judge").joinpath(FILE).read_text(encoding="utf-8"))


def read_items(text: str) -> list[Item]:
    """From lines of: written, a tab, readings with " | " between them. Empty lines and those that begin with # go."""
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [Item(written, tuple(map(normal, readings.split(" | ")))) for written, readings in rows]


def front_end(checkpoint: Checkpoint) -> Callable[[str], str] | None:
    """A written text -> the words that are spoken; None for a checkpoint that names no front end."""
    language = checkpoint.text_front_end()
    return None if language is None else lambda text: spoken(text, language)


def word_section(found: Sequence[Item], read: Callable[[str], str] | None) -> Figures:
    """How many are right by the words of `read` (None: the text as it is), and which are wrong."""
    wrong = []
    for item in found:
        said = item.written if read is None else read(item.written)
        if normal(said) not in item.readings:
            wrong.append({"written": item.written, "words": said, "expected": item.readings[0]})
    return {"right": len(found) - len(wrong), "n": len(found), "front_end": read is not None, "wrong": wrong}


def lines(found: Sequence[Item], speakers: Sequence[str], seed: int) -> list[Line]:
    """Each text by every speaker; the teacher says the likeliest reading."""
    return [
        Line(item.written, item.readings[0], speaker, seed + i, (STUDENT, TEACHER), ears=CHOICE)
        for i, item in enumerate(found)
        for speaker in speakers
    ]


def wrong_readings(item: Item) -> list[str]:
    """What a voice without a front end may say: none of them is right."""
    digits = re.sub(r"\d", lambda digit: f" {_ONES[int(digit[0])]} ", item.written)
    none = re.sub(r"\d", " ", item.written)
    found = [normal(digits), normal(none), " ".join(words(item.written))]
    right = {reading.replace(" ", "") for reading in item.readings}  # "usa" sounds like "u s a"
    return [text for text in dict.fromkeys(found) if text and text.replace(" ", "") not in right]


def choices(found: Sequence[Item]) -> tuple[str, ...]:
    """All readings, right and wrong, that the recogniser chooses among."""
    return tuple(dict.fromkeys(text for item in found for text in (*item.readings, *wrong_readings(item))))


def ear_section(found: Sequence[Item], listened: Sequence[Listened]) -> Figures:
    """Of the results of `lines`, by voice: how many texts each speaker was heard to read right; the best speaker's."""
    readings = {item.written: item.readings for item in found}
    counts: dict[str, dict[str, int]] = {}
    for one in listened:
        for voice, heard in one.voices.items():
            of = counts.setdefault(voice, {})
            right = heard.heard in readings[one.line.text]
            of[one.line.speaker] = of.get(one.line.speaker, 0) + right
    return {
        "n": len(found),
        "choices": len(choices(found)),
        **{voice: {"by_speaker": of, "best": max(of.values())} for voice, of in counts.items()},
    }
