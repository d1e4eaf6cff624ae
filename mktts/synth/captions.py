"""Captions of words and their times, as SubRip (.srt) or WebVTT (.vtt) has them."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Iterator

from mktts.engine.options import WordTime
from mktts.text.split import Cut, boundary
from mktts.text.words import is_wide

CAPTIONS = ("srt", "vtt")
_LINE_CHARS, _CUE_CHARS = 42, 80
_GAP_S = 0.7  # between two words: the next one begins a cue


def captions(words: Iterable[WordTime], kind: str, speed: float = 1.0) -> str:
    """A file of captions: sentences, or as much of one as fits. kind: of CAPTIONS. speed: at which the sound is."""
    cues = []
    for number, cue in enumerate(_cues(words), 1):
        start, stop = (_clock(time_s / speed, kind) for time_s in (cue[0].start_s, cue[-1].end_s))
        text = "\n".join(textwrap.wrap(_text(cue), _LINE_CHARS))
        head = f"{number}\n" if kind == "srt" else ""
        cues.append(f"{head}{start} --> {stop}\n{text if kind == 'srt' else html.escape(text, quote=False)}\n")
    return "\n".join(["WEBVTT\n", *cues] if kind == "vtt" else cues)


def _cues(words: Iterable[WordTime]) -> Iterator[list[WordTime]]:
    cue: list[WordTime] = []
    for word in words:
        if cue and (
            boundary(cue[-1].word, " ", word.word[0]) == Cut.SENTENCE
            or word.start_s - cue[-1].end_s > _GAP_S
            or len(_text([*cue, word])) > _CUE_CHARS
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _text(words: Iterable[WordTime]) -> str:
    text = ""
    for word in words:
        text += word.word if is_wide(text) and is_wide(word.word) else f" {word.word}"
    return text.strip()


def _clock(time_s: float, kind: str) -> str:
    """ "00:01:02,345"; WebVTT writes a full stop."""
    seconds, ms = divmod(round(1_000 * time_s), 1_000)
    mark = "," if kind == "srt" else "."
    return f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{mark}{ms:03}"
