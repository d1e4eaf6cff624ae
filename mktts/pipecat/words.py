"""When each word is heard: an estimate, because the model aligns nothing.

A word's place in the audio is its place in the text. While an utterance is being made, its length is taken from the
pace of earlier ones; once it is made, the words that are left are spread over the audio that is left. A listener who
interrupts has then heard the words of the conversation's context, give or take the unevenness of speech.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

# Written without spaces, and a syllable or more a character: kana, ideographs, and the marks that go with them.
_WIDE = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
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
    """A piece of the text, character for character. `wide`: no space stands between it and a wide neighbour."""

    text: str
    wide: bool

    @property
    def units(self) -> float:
        """Its share of the speaking time, with the space after it."""
        wide = len(_WIDE.findall(self.text))
        return wide * _UNITS_OF_A_WIDE + (len(self.text) - wide) + (0 if self.wide else 1)


def split_words(text: str) -> list[Word]:
    """The words of `text`. Marks and symbols belong to the word before them, opening ones to the word after."""
    spans: list[tuple[int, int]] = []
    opening: int | None = None  # where marks began that wait for their word
    for match in _WORD.finditer(text):
        begin, end = match.span()
        begin = begin if opening is None else opening
        if any(map(str.isalnum, match.group())):
            spans.append((begin, end))
            opening = None
        elif spans and opening is None and not _opens(match.group()):
            spans[-1] = (spans[-1][0], end)
        else:
            opening = begin
    if opening is not None:  # no word came any more
        begin = spans.pop()[0] if spans else opening
        spans.append((begin, len(text.rstrip())))
    return [Word(text[begin:end], wide=bool(_WIDE.match(text[end - 1]))) for begin, end in spans]


def _opens(marks: str) -> bool:
    """Whether these marks belong to the word after them: a bracket or quotation mark that opens."""
    return unicodedata.category(marks[-1]) in ("Ps", "Pi")


@dataclass
class Pace:
    """How fast a voice speaks, from the utterances so far."""

    s_per_unit: float = 1 / _UNITS_PER_S

    def learn(self, units: float, audio_s: float) -> None:
        if units < _MEASURED_UNITS:
            return
        usual = 1 / _UNITS_PER_S
        newest = min(max(audio_s / units, _FASTEST * usual), _SLOWEST * usual)
        self.s_per_unit += _LEARNED * (newest - self.s_per_unit)


class WordTimes:
    """The words of one utterance and where in its audio they begin, in seconds from its first sample."""

    def __init__(self, pace: Pace, spoken: Callable[[str], str] | None = None) -> None:
        """spoken: a word as it is heard: "$12" takes the time of "twelve dollars". None: as it is written."""
        self.units = 0.0  # of all words so far
        self._spoken = spoken
        self._pace = pace
        self._unfinished = ""  # the last word of the text so far: more letters or marks may follow
        self._left: list[Word] = []
        self._pushed_s = 0.0  # where the first word that is left is expected

    def feed(self, text: str, made_s: float = 0.0) -> None:
        """Adds text, when `made_s` of audio exist already: none of them says any of it."""
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
        """Words to push now, of an utterance of which `made_s` exist and at most `heard_s` have been heard."""
        due = []
        while self._left and self._pushed_s < min(made_s, heard_s + _AHEAD_S):
            word = self._left.pop(0)
            due.append((word, self._pushed_s))
            self._pushed_s += self._units(word) * self._pace.s_per_unit
        return due

    def rest(self, made_s: float) -> list[tuple[Word, float]]:
        """All words not pushed yet, over the audio that is left of `made_s`, now that all of it exists."""
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
    """When the audio a service has pushed is heard: one piece after another, none before it was pushed."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def push(self, duration_s: float, now_s: float) -> float:
        """Adds a piece; returns when it begins to be heard."""
        begin_s = max(self._until_s, now_s)
        self._until_s = begin_s + duration_s
        return begin_s

    def drop(self) -> None:
        """What has not been heard yet never will be."""
        self._until_s = 0.0


@dataclass
class AudioTimes:
    """Where the audio of one utterance is on the listener's clock; pauses of a slow engine included."""

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
