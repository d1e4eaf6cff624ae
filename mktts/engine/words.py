"""Estimates when words are said. The model gives no alignment: the sounds that letters stand for are found in the PCM.

Every sound is one of a few kinds, which the levels of three bands tell apart roughly, and has a usual duration. The
times are those of the likeliest sequence of sounds and pauses (a hidden semi-Markov model, Yu 2010, section 2.2).
Pauses are likelier after punctuation, and of exact length where the text asks for one. A word is settled once the sound
has gone on for `LAG_S` after it; what follows begins there."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mktts.engine.options import WordTime
from mktts.errors import TextError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.text.parts import Pause, TextFeed
from mktts.text.words import PAUSED, sounds, split_words

LAG_S = 0.5
_RATE_HZ = 100  # frames a second, in which times are counted here
_BANDS_HZ = (80, 1_000, 3_500, 11_000)
_LEAST_DB = -60.0  # of the loudest frame: below that there is no speech
_LOUD_DB = 25.0  # frames within this of the loudest give the mean to which levels are compared, as voices differ
# Mean and deviation, in dB, of the lowest band and of each other band over the one below it, and the usual frames: from
# 100 sentences by the voice in the box and 54 by Kokoro, with the phones of pocketsphinx.
_KINDS = {
    "vowel": ((3, 1, -4), (10, 8, 6), 9),
    "liquid": ((1, -4, -3), (10, 11, 8), 9),
    "nasal": ((3, -12, -1), (10, 9, 5), 8),
    "voiced": ((-10, -10, 4), (13, 17, 6), 7),
    "stop": ((-24, 8, 6), (14, 16, 7), 8),
    "fricative": ((-15, 5, 6), (16, 15, 6), 8),
    "sibilant": ((-23, 21, 16), (15, 19, 12), 12),
    "any": ((-6, 2, 1), (16, 15, 10), 8),
    "pause": ((-44, 11, 4), (12, 8, 6), 0),
}
_WEIGHT = 0.2  # of a frame's cost, since frames resemble their neighbours
_MOST_COST = 30.0  # of a frame
_SPREAD = 0.45  # deviation of the logarithm of durations
_DURATIONS = np.arange(1, 46)  # frames of a sound
_PAUSE_COST, _PAUSED_FRAME_COST = 8.0, 0.01  # of a pause where no mark makes one likely, and of each frame of any pause
_LOUD_COST = 5.0  # of a frame that is not silent, in a pause that the text asks for
_GIVEN_UP = 40.0  # what costs so much more than the likeliest end is not followed further
_BONUS = 1.0  # for a sound of usual length, so that sequences of more sounds are no worse
_LOOK_BACK = 150  # frames in which settled words still take part in the search, as the beginning of what follows
_LONG_PAUSE = 200  # frames; what precedes such a pause takes no part in the search any more
_MOST_SOUNDS = 100  # sounds of a word that are looked for, each again for every chunk: thousands would take seconds


@dataclass
class _SpokenItem:
    """A word, or a pause that the text asks for. silent: frames of the pause, 0 for a word. earliest: the first frame
    at which it can begin: its text was not there before. told: it was returned. settled: its time is final."""

    word: str
    silent: int
    earliest: int
    spoken: Callable[[str], str]
    told: bool = False
    settled: bool = False

    @cached_property
    def sounds(self) -> list[str]:
        return [] if self.silent else sounds(self.spoken(self.word))[:_MOST_SOUNDS]

    @property
    def frames(self) -> int:
        """How many frames the item usually takes."""
        return self.silent or sum(_KINDS[kind][2] for kind in self.sounds)


class WordTimes:
    """The words of one stream and their times, as its text and its sound come; text may come from another thread.

    settled: words whose times are final."""

    def __init__(self, text: TextFeed, spoken: Callable[[str], str], sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
        """text: tells words from tags. spoken: returns a word as it is said, "twelve dollars" for "$12".
        sample_rate_hz: of the sound."""
        self.settled: list[WordTime] = []
        self._text, self._spoken = text, spoken
        self._writing = threading.Lock()
        self._written = ""  # the text after the last word that was found in it
        self._unfinished = ""  # the last word so far: more letters or marks may follow
        self._items: list[_SpokenItem] = []  # those that take part in the search
        self._hop = sample_rate_hz // _RATE_HZ
        self._window = np.hanning(2 * self._hop)
        self._samples = 0
        self._waiting = np.zeros(self._hop // 2, np.float32)  # samples of incomplete frames
        self._settled_until = 0  # the frame after the last settled word
        self._begin = 0  # the frame at which `_items` begin
        self._levels_db = np.zeros((0, len(_BANDS_HZ) - 1))  # of the frames from there on
        self._silent = np.zeros(0, bool)  # of the same frames: every sample is 0
        self._peak_db = _LEAST_DB
        self._loud, self._mean_db = 0, np.zeros(len(_BANDS_HZ) - 1)

    def feed(self, piece: str) -> None:
        """Adds text. Raises as `TextFeed.take`."""
        with self._writing:
            self._written += piece
            self._take(self._text.take(piece))

    def finish(self) -> None:
        with self._writing:
            try:
                self._take([*self._text.take("", final=True), Pause(0)])
            except TextError:  # there is nothing to hear
                self._take([Pause(0)])

    def add(self, pcm: np.ndarray, heard_s: float = 0.0) -> list[WordTime]:
        """Adds sound, (S,) float32. Returns words that were not returned before: settled ones, and those that begin in
        the first `heard_s`, with times as far as they are known."""
        self._samples += len(pcm)
        self._measure(pcm)
        return self._settle(LAG_S * _RATE_HZ, heard_s * _RATE_HZ)

    def end(self, complete: bool = True) -> list[WordTime]:
        """Ends the sound. complete: it has the whole text; otherwise words that it does not reach are left out."""
        self._measure(np.zeros(2 * self._hop, np.float32))
        frames = self._samples // self._hop - self._begin
        self._levels_db, self._silent = self._levels_db[:frames], self._silent[:frames]
        return self._settle(0, math.inf, complete)

    def _take(self, parts: Sequence[object]) -> None:
        for part in parts:
            text, words = self._unfinished, []
            if isinstance(part, str):
                text += part
                *words, last = split_words(text) or [""]
                self._unfinished = text[text.rindex(last) :]
            else:
                words, self._unfinished = split_words(text), ""
            silent = part.samples if isinstance(part, Pause) else 0
            for word in (*words, "") if silent else words:
                frames = 0 if word else max(1, round(silent / SAMPLE_RATE_HZ * _RATE_HZ))
                now = self._samples // self._hop
                self._items.append(_SpokenItem(self._as_written(word), frames, now, self._spoken))

    def _as_written(self, word: str) -> str:
        """A word as the caller wrote it, without punctuation that stands for markup."""
        for text in (word, word.rstrip(".,")):
            found = self._written.find(text)
            if found >= 0:
                self._written = self._written[found + len(text) :]
                return text
        return word

    def _measure(self, pcm: np.ndarray) -> None:
        """Adds the levels of the frames that are complete by now."""
        hop, samples = self._hop, np.concatenate((self._waiting, pcm))
        count = max(0, len(samples) // hop - 1)
        self._waiting = samples[count * hop :]
        if not count:
            return
        frames = np.lib.stride_tricks.sliding_window_view(samples, 2 * hop)[: count * hop : hop]
        power = np.abs(np.fft.rfft(frames * self._window)) ** 2 / self._window.sum() ** 2
        edges = [min(hz * 2 // _RATE_HZ, hop) for hz in _BANDS_HZ]
        levels_db = 10 * np.log10(4 * np.add.reduceat(power, edges, axis=1)[:, :-1] + 1e-9)
        self._peak_db = max(self._peak_db, levels_db.max())
        loud = levels_db[levels_db.max(axis=1) > self._peak_db - _LOUD_DB]
        self._loud += len(loud)
        self._mean_db = self._mean_db + (loud - self._mean_db).sum(axis=0) / max(self._loud, 1)
        silent = ~frames[:, hop // 2 : -(hop // 2)].any(axis=1)
        self._levels_db = np.concatenate((self._levels_db, levels_db))
        self._silent = np.concatenate((self._silent, silent))

    def _settle(self, lag: float, heard: float, complete: bool = False) -> list[WordTime]:
        """Returns new words: those with `lag` frames of sound after them, and those that begin before frame `heard`."""
        items, told, passed = self._items.copy(), [], 0
        end = self._begin + len(self._levels_db)
        spans = self._spans(items, complete)
        for item, (start, stop) in zip(items, spans, strict=False):
            passed += stop <= end - _LOOK_BACK
            certain = stop <= end - lag
            if item.silent or item.settled or not (certain or start < heard):
                continue
            start = max(start, self._settled_until)
            time = WordTime(item.word, start / _RATE_HZ, max(start, stop) / _RATE_HZ)
            told += [] if item.told else [time]
            item.told, item.settled = True, certain
            if certain:
                self.settled.append(time)
                self._settled_until = max(start, stop)
        begin = spans[passed - 1][1] if passed else self._begin
        follows = min(spans[passed][0] if passed < len(spans) else end, end - _LOOK_BACK)
        begin = follows if follows - begin > _LONG_PAUSE else begin
        self._levels_db, self._silent = self._levels_db[begin - self._begin :], self._silent[begin - self._begin :]
        self._begin = begin
        del self._items[:passed]
        return told

    def _spans(self, items: Sequence[_SpokenItem], complete: bool) -> list[tuple[int, int]]:
        """The first frame of each item that has begun, and the frame after its last."""
        frames = len(self._levels_db)
        spans = None
        if self._peak_db > _LEAST_DB:
            costs = _costs(self._levels_db - self._mean_db)
            costs["silence"] = np.concatenate(([0], np.cumsum(_LOUD_COST * ~self._silent)))
            spans = _likeliest(items, costs, self._begin, complete)
        if spans is None:  # no speech, or too little of it for the text
            scale = frames / max(sum(item.frames for item in items), 1) if complete else 1.0
            spans, stop = [], 0.0
            for item in items:
                start, stop = stop, stop + scale * item.frames
                if round(start) >= frames and not complete:
                    break
                spans.append((round(start), min(round(stop), frames)))
        return [(self._begin + start, self._begin + stop) for start, stop in spans]


def _costs(levels_db: np.ndarray) -> dict[str, np.ndarray]:
    """Costs (T + 1,) of the first 0 to T frames (T, bands) as each kind of sound."""
    found = np.diff(levels_db, axis=1, prepend=0.0)
    costs = {}
    for kind, (mean, deviation, _) in _KINDS.items():
        each = (((found - mean) / deviation) ** 2 / 2 + np.log(deviation)).sum(axis=1)
        costs[kind] = np.concatenate(([0], np.cumsum(_WEIGHT * np.minimum(each, _MOST_COST))))
    costs["pause"] += _PAUSED_FRAME_COST * np.arange(len(found) + 1)
    return costs


_DURATION_COSTS = {
    kind: (np.log(_DURATIONS / usual) / _SPREAD) ** 2 / 2 - _BONUS for kind, (*_, usual) in _KINDS.items() if usual
}


def _likeliest(
    items: Sequence[_SpokenItem], costs: dict[str, np.ndarray], begin: int, complete: bool
) -> list[tuple[int, int]] | None:
    """Spans in frames of the items that have begun; None if the sound is complete and too short for all of them.

    costs: as `_costs`, and of "silence". begin: the frame from which the spans count."""
    search = _Search(costs)
    search.pause(0.0, items[0].earliest - begin if items else 0)
    for number, item in enumerate(items, 1):
        if search.least.min() - _GIVEN_UP > search.open[0] and not complete:  # later items would cost more still
            break
        if item.silent:
            search.silence(item.silent)
        for kind in item.sounds:
            search.sound(kind)
        following = items[number] if number < len(items) else None
        likely = following is None or bool(PAUSED.search(item.word))
        search.pause(0.0 if likely else _PAUSE_COST, 0 if following is None else following.earliest - begin)
    if complete:
        search.open = (float(search.least[-1]), len(search.steps), search.frames, False)
    return search.spans() if np.isfinite(search.open[0]) else None


class _Search:
    """Dynamic programming over what is said, with one step for each sound and each pause.

    least: (T + 1,), the cost of all steps so far if they end at a frame. steps: for each, where it begins, by where it
    ends. open: the likeliest end of all sound: its cost, the number of steps before it, the frame where what is
    unfinished began, and whether that belongs to an item."""

    def __init__(self, costs: dict[str, np.ndarray]) -> None:
        self._costs = costs
        self._at = np.arange(len(costs["pause"]))
        self.frames = len(self._at) - 1
        self.least = np.where(self._at == 0, 0.0, np.inf)
        self.steps: list[np.ndarray] = []
        self._pauses: set[int] = set()
        self.open = (math.inf, 0, 0, False)

    def pause(self, cost: float, earliest: int) -> None:
        """A pause, which may be empty. earliest: the frame at which the next item may begin."""
        through = self.least - self._costs["pause"]
        lowest = np.minimum.accumulate(through)
        begins = np.maximum.accumulate(np.where(through <= lowest, self._at, 0))
        paused = lowest + self._costs["pause"] + cost
        self._pauses.add(len(self.steps))
        self.steps.append(np.where(paused < self.least, begins, self._at))
        self.least = np.minimum(paused, self.least)
        self._consider(float(self.least[-1]), self.frames, False)
        self.least[: max(0, earliest)] = np.inf

    def sound(self, kind: str) -> None:
        durations = _DURATION_COSTS[kind]
        before = np.concatenate((np.full(len(durations), np.inf), self.least - self._costs[kind]))
        # Row t: for beginnings at t - 1, t - 2, ...
        begins = np.lib.stride_tricks.sliding_window_view(before[:-1], len(durations))[:, ::-1]
        unfinished = begins[-1] + np.where(_DURATIONS <= _KINDS[kind][2], 0.0, durations)
        lasted = int(unfinished.argmin())
        self._consider(float(unfinished[lasted] + self._costs[kind][-1]), self.frames - 1 - lasted, True)
        ended = begins + durations
        lasting = ended.argmin(axis=1)
        self.steps.append(self._at - 1 - lasting)
        self.least = ended[self._at, lasting] + self._costs[kind]

    def silence(self, frames: int) -> None:
        through = self.least - self._costs["silence"]
        begun = through[max(0, self.frames + 1 - frames) :]
        if len(begun):
            since = int(begun.argmin())
            self._consider(float(begun[since] + self._costs["silence"][-1]), self.frames + 1 - len(begun) + since, True)
        self.steps.append(np.maximum(self._at - frames, 0))
        self.least = np.concatenate((np.full(frames, np.inf), through))[: len(self._at)] + self._costs["silence"]

    def _consider(self, cost: float, begin: int, item: bool) -> None:
        if cost < self.open[0]:
            self.open = (cost, len(self.steps), begin, item)

    def spans(self) -> list[tuple[int, int]]:
        """The first frame of each item of the likeliest sequence, and the frame after its last."""
        _, count, at, inside = self.open
        found, stop = [], self.frames
        for step in reversed(range(count)):
            if step in self._pauses and inside:
                found.append((int(at), int(stop)))
            at = self.steps[step][at]
            if step in self._pauses:
                stop, inside = at, True
        return found[::-1]
