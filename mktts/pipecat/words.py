"""Estimated times of words, because the model gives no alignment.

A word's time in the audio follows from its place in the text: by the pace of earlier utterances while this one is being
made, and then by its own length. After an interruption the context holds about the words that were heard.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

# Written without spaces, and a syllable or more a character: kana, ideographs, and the marks that go with them.
_WIDE = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
_OPENING = ("Ps", "Pi")  # Unicode's categories of opening brackets and quotation marks
_WORD = re.compile(rf"{_WIDE.pattern}|(?:(?!{_WIDE.pattern})\S)+")
# Speech at 150 words a minute, six letters and spaces a word; Mandarin at 240 characters a minute.
_UNITS_PER_S = 15.0
_UNITS_OF_A_WIDE = 3.75
_LEARNED = 0.3  # the share of the newest utterance in the pace
_FASTEST, _SLOWEST = 0.5, 2.0  # of the usual pace; what is outside was no speech
_MEASURED_UNITS = 20  # shorter utterances are mostly pauses
_AHEAD_S = 1.0  # words are pushed this long before they are heard: the next chance comes with the next chunk


@dataclass(frozen=True)
class Word:
    """A word of the text, with its marks. wide: no space separates it from a wide neighbour."""

    text: str
    wide: bool

    @property
    def units(self) -> float:
        """Its duration in units of a letter, with the space after it."""
        wide = len(_WIDE.findall(self.text))
        return wide * _UNITS_OF_A_WIDE + (len(self.text) - wide) + (0 if self.wide else 1)


def split_words(text: str) -> list[Word]:
    """The words of `text`, each with the marks after it and the opening ones before it."""
    spans: list[tuple[int, int]] = []
    opening: int | None = None  # where marks began that wait for their word
    for match in _WORD.finditer(text):
        begin, end = match.span()
        begin = begin if opening is None else opening
        if any(map(str.isalnum, match.group())):
            spans.append((begin, end))
            opening = None
        elif spans and opening is None and unicodedata.category(match.group()[-1]) not in _OPENING:
            spans[-1] = (spans[-1][0], end)
        else:
            opening = begin
    if opening is not None:  # no word came any more
        begin = spans.pop()[0] if spans else opening
        spans.append((begin, len(text.rstrip())))
    return [Word(text[begin:end], wide=bool(_WIDE.match(text[end - 1]))) for begin, end in spans]


@dataclass
class Pace:
    """The pace of a voice, in s per unit, averaged over its utterances."""

    s_per_unit: float = 1 / _UNITS_PER_S

    def learn(self, units: float, audio_s: float) -> None:
        if units < _MEASURED_UNITS:
            return
        usual = 1 / _UNITS_PER_S
        newest = min(max(audio_s / units, _FASTEST * usual), _SLOWEST * usual)
        self.s_per_unit += _LEARNED * (newest - self.s_per_unit)


class WordTimes:
    """The words of one utterance and their offsets in its audio, in s."""

    def __init__(self, pace: Pace, spoken: Callable[[str], str] | None = None) -> None:
        """spoken: gives a word as it is spoken, "twelve dollars" for "$12"; None takes it as written."""
        self.units = 0.0  # of all words so far
        self._spoken = spoken
        self._pace = pace
        self._unfinished = ""  # the last word of the text so far: more letters or marks may follow
        self._left: list[Word] = []
        self._pushed_s = 0.0  # where the first word that is left is expected

    def feed(self, text: str, made_s: float = 0.0) -> None:
        """Adds text that comes after `made_s` of audio."""
        if not self._left and not self._unfinished:
            self._pushed_s = max(self._pushed_s, made_s)
        text = self._unfinished + text
        words = split_words(text)
        self._unfinished = text[text.rindex(words[-1].text) :] if words else text
        self._take(words[:-1])

    def finish(self) -> None:
        """No more text comes."""
        self._take(split_words(self._unfinished))
        self._unfinished = ""

    def due(self, made_s: float, heard_s: float) -> list[tuple[Word, float]]:
        """The words to push now, with `made_s` of audio made and at most `heard_s` heard."""
        due = []
        while self._left and self._pushed_s < min(made_s, heard_s + _AHEAD_S):
            word = self._left.pop(0)
            due.append((word, self._pushed_s))
            self._pushed_s += self._units(word) * self._pace.s_per_unit
        return due

    def rest(self, made_s: float) -> list[tuple[Word, float]]:
        """The words not pushed yet, spread over the rest of the complete audio of `made_s`."""
        units = sum(map(self._units, self._left))
        begin_s = min(self._pushed_s, made_s)
        rest = []
        for word in self._left:
            rest.append((word, begin_s))
            begin_s += self._units(word) / units * (made_s - min(self._pushed_s, made_s))
        self._left = []
        self._pace.learn(self.units, made_s)
        return rest

    def _take(self, words: list[Word]) -> None:
        self._left += words
        self.units += sum(map(self._units, words))

    def _units(self, word: Word) -> float:
        return word.units if self._spoken is None else replace(word, text=self._spoken(word.text)).units


class Playout:
    """When pushed audio is heard: one piece after another, none before it was pushed."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def push(self, duration_s: float, now_s: float) -> float:
        """Adds a piece; returns when it begins to be heard."""
        begin_s = max(self._until_s, now_s)
        self._until_s = begin_s + duration_s
        return begin_s

    def drop(self) -> None:
        """Drops the audio that has not been heard."""
        self._until_s = 0.0


@dataclass
class AudioTimes:
    """When the audio of one utterance is heard, with the pauses of a slow engine."""

    made_s: float = 0.0
    _offsets_s: list[float] = field(default_factory=list)
    _begins_s: list[float] = field(default_factory=list)

    def add(self, duration_s: float, begin_s: float) -> None:
        self._offsets_s.append(self.made_s)
        self._begins_s.append(begin_s)
        self.made_s += duration_s

    @property
    def begin_s(self) -> float | None:
        return self._begins_s[0] if self._begins_s else None

    def at(self, offset_s: float) -> float:
        """When the sample `offset_s` into the utterance is heard."""
        piece = bisect_right(self._offsets_s, offset_s) - 1
        return self._begins_s[piece] + offset_s - self._offsets_s[piece]
