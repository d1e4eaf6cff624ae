"""The parts of a record, each measured on its own: name -> what it puts into evaluation.json."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.common import read_json
from mktts.errors import MetricsError
from mktts.measure.recogniser import vocabulary_of
from mktts.training.data.held_out import held_out
from mktts.training.judge import forms, grammar, likeness, natural, same_codes, sound, written
from mktts.training.judge.listener import Listened, ListenerSetup
from mktts.training.judge.quality import all_figures
from mktts.training.judge.speakers import Centroids
from mktts.training.judge.speed import speed_figures
from mktts.training.judge.utterances import Measured, Setup, measure

_PROGRESS_S = 10.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What `train evaluate` was told; its fields are the command's options."""

    checkpoint: str
    speakers: tuple[str, ...]
    keep: Path
    sentences: int = 200
    natural: int | None = None  # None: all
    forms: int = 120
    ends: int = 500
    streams: int = 24
    greedy: bool = False
    seed: int = 0
    layout: str | None = None
    device: str = "cpu"
    workers: int = 1
    teacher_cache: Path | None = None
    codec_state: Path | None = None
    codec_audio: Path | None = None
    codec_figures: Path | None = None
    listen: Path | None = None


def of_grammar(given: Given) -> Figures:
    """Word errors free and closed, of the codec alone too, distortion, lengths, ends, lead, speakers; the settings."""
    known, unknown = grammar.sorted_out(held_out())
    tasks = grammar.judging_tasks(known, unknown, given.speakers, given.sentences, given.ends, given.seed, given.greedy)
    listening = grammar.listen_tasks(known, given.speakers, given.seed, given.listen) if given.listen else []
    vocabulary = tuple(vocabulary_of(held_out()))
    setup = Setup(
        given.checkpoint,
        vocabulary,
        given.device,
        given.layout,
        given.teacher_cache,
        given.codec_state,
        given.codec_audio,
        given.keep,
    )
    everything = [*tasks, *listening]
    measured: list[Measured] = list(measured_with_progress("grammar", setup, everything, given.workers))[: len(tasks)]
    embeddings: dict[str, list] = {speaker: [] for speaker in given.speakers}
    for m in measured:
        if m.embedding is not None:
            embeddings[m.task.speaker].append(m.embedding)
    if given.listen:
        grammar.write_list(given.listen, listening)
    settings = {
        "checkpoint": given.checkpoint,
        "sentences": given.sentences,
        "speakers": list(given.speakers),
        "seed": given.seed,
        "layout": given.layout,
        "device": given.device,
        "workers": given.workers,
        "greedy": given.greedy,
        "vocabulary": len(vocabulary),
        "left_out_words": sorted({word for _, missing in unknown for word in missing}),
        "left_out_sentences": len(unknown),
    }
    found = {**all_figures([m for m in measured if m.embedding is None], Centroids.of(embeddings))}
    if given.codec_figures:
        found["codec_figures"] = read_json(given.codec_figures, MetricsError)
    return {"settings": settings, **found}


def of_natural(given: Given) -> Figures:
    """Word errors on sentences of everyday speech, and the sound of the same audio."""
    codec = bool(given.codec_state or given.codec_audio)
    lines = natural.lines(natural.sentences(given.natural), given.speakers, given.seed, codec)
    listened = _listened("natural", given, lines)
    found = {"natural": natural.word_section(listened), "sound": sound.section(listened)}
    copies = [one.likeness for one in listened if one.likeness is not None]
    return found | ({"likeness": likeness.section(copies)} if copies else {})


def of_forms(given: Given) -> Figures:
    """Word errors by the written form of the text."""
    texts = natural.sentences(given.forms)
    return {"forms": forms.section(_listened("forms", given, forms.lines(texts, given.speakers, given.seed)))}


def of_numbers(given: Given) -> Figures:
    """Numbers, prices, times, dates and titles, by the front end's words and by ear."""
    items = written.items()
    lines = written.lines(items, given.speakers, given.seed)
    listened = _listened("numbers", given, lines, written.choices(items))
    words = written.word_section(items, written.front_end(open_checkpoint(given.checkpoint)))
    return {"written": {"words": words, "ear": written.ear_section(items, listened)}}


def of_upstream(given: Given) -> Figures:
    """Codes of upstream qwen-tts and ours."""
    texts = list(natural.sentences(same_codes.SENTENCES).values())
    return {"same_codes": same_codes.section(given.checkpoint, texts, given.speakers)}


def of_speed(given: Given) -> Figures:
    """RTF and audible TTFC on a quiet machine."""
    known, _ = grammar.sorted_out(held_out())
    return {"speed": speed_figures(given.checkpoint, given.device, known, given.speakers, given.streams, given.layout)}


SECTIONS: Mapping[str, Callable[[Given], Figures]] = {
    "natural": of_natural,
    "forms": of_forms,
    "numbers": of_numbers,
    "grammar": of_grammar,
    "upstream": of_upstream,
    "speed": of_speed,
}


def measured_with_progress(name: str, setup: Any, tasks: Sequence[Any], workers: int) -> Iterator[Any]:
    """As `measure`; says on standard error how far it is."""
    started_s = printed_s = time.perf_counter()
    for done, one in enumerate(measure(setup, tasks, workers), 1):
        now_s = time.perf_counter()
        if now_s - printed_s > _PROGRESS_S or done == len(tasks):
            printed_s = now_s
            print(f"{name}: {done}/{len(tasks)} utterances, {now_s - started_s:.0f} s", file=sys.stderr, flush=True)
        yield one


def _listened(name: str, given: Given, lines: Sequence[Any], choices: tuple[str, ...] = ()) -> list[Listened]:
    setup = ListenerSetup(
        given.checkpoint, given.device, given.layout, given.keep, choices, given.codec_state, given.codec_audio
    )
    return list(measured_with_progress(name, setup, lines, given.workers))
