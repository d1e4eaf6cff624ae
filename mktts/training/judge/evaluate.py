"""The voice against its teacher: `python -m mktts train evaluate`.

Every judged sentence, all of them held out, is spoken once, speakers in turn, with the checkpoint's own sampling.
$FLITE names the teacher, as in mktts.training.data.teacher.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mktts.common import read_json, write_json
from mktts.errors import MetricsError
from mktts.measure.environment import environment
from mktts.measure.metrics import percentiles
from mktts.measure.recogniser import Recogniser, vocabulary_of
from mktts.measure.word_errors import words
from mktts.speech.metrics import summarise
from mktts.training.data.held_out import held_out
from mktts.training.data.teacher import SPEAKERS
from mktts.training.judge.quality import Figures, all_figures, lines
from mktts.training.judge.speakers import Centroids
from mktts.training.judge.utterances import Measured, Setup, Task, measure

QUICK_SENTENCES = 30
CENTROID_CLIPS = 20  # of the teacher, of each speaker
LISTEN_SENTENCES = 3
_ORDER_SEED = 5  # of the sentences: the first ones are a fair part of all
_PROGRESS_S = 10.0

Measure = Callable[[Setup, Sequence[Task], int], Iterator[Measured]]


EXAMPLES = """examples:
  FLITE=./flite python -m mktts train evaluate --checkpoint OUT/voice --output evaluation.json --listen LISTEN
  FLITE=./flite python -m mktts train evaluate --checkpoint OUT/voice --output evaluation.json --quick

The variable FLITE names the teacher, as for `train teacher`. The last line of standard output is the record as JSON,
without the single sentences, which the file has too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="folder in the Hub's layout")
    parser.add_argument("--output", type=Path, required=True, help="JSON, written whole")
    parser.add_argument("--sentences", type=int, default=200, help="held-out sentences judged (default: 200)")
    parser.add_argument("--eos", type=int, default=500, help="utterances whose end is counted (default: 500)")
    parser.add_argument("--speed", type=int, default=24, help="streams timed, 0 for none (default: 24)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SENTENCES} sentences, as many ends, no timing")
    parser.add_argument("--greedy", action="store_true", help="word errors by argmax too")
    parser.add_argument("--speakers", default=",".join(SPEAKERS), help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first utterance; the next ones count up")
    parser.add_argument("--layout", choices=("whole", "streaming"), help="of the prompt (default: the checkpoint's)")
    parser.add_argument("--device", default="cpu", help="the student's (default: cpu)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--teacher-cache", type=Path, help="folder to keep the teacher's audio in")
    codec = parser.add_mutually_exclusive_group()
    codec.add_argument(
        "--codec-state", type=Path, help="file of `train fit` or `train codec`, to judge the codec alone"
    )
    codec.add_argument("--codec-audio", type=Path, help="its copies of the teacher's audio, named as in the cache")
    codec.add_argument("--codec-figures", type=Path, help="JSON with the codec's own figures, copied to the record")
    parser.add_argument("--listen", type=Path, help="folder for WAV files of a few sentences by every speaker")


def main(arguments: argparse.Namespace) -> int:
    """Writes and prints the record. Raises as `evaluate`."""
    document = evaluate(arguments)
    write_json(arguments.output, document)
    print(table(document))
    print(json.dumps({name: value for name, value in document.items() if name != "utterances"}, sort_keys=True))
    return 0


def evaluate(given: argparse.Namespace, measure: Measure = measure, speed: bool = True) -> Figures:
    """The whole record. Raises MetricsError for settings that do not fit, and what teacher and student raise."""
    sentences = QUICK_SENTENCES if given.quick else given.sentences
    ends = 0 if given.quick else given.eos
    speakers = tuple(given.speakers.split(","))
    known, unknown = sorted_out(held_out())
    tasks = judging_tasks(known, unknown, speakers, sentences, ends, given.seed, given.greedy)
    listening = listen_tasks(known, speakers, given.seed, given.listen) if given.listen else []
    setup = Setup(
        given.checkpoint,
        tuple(vocabulary_of(held_out())),
        given.device,
        given.layout,
        given.teacher_cache,
        given.codec_state,
        given.codec_audio,
    )
    started_s = time.perf_counter()
    everything = [*tasks, *listening]
    measured = list(_with_progress(measure(setup, everything, given.workers), len(everything)))[: len(tasks)]
    embeddings: dict[str, list] = {speaker: [] for speaker in speakers}
    for m in measured:
        if m.embedding is not None:
            embeddings[m.task.speaker].append(m.embedding)
    document: Figures = {
        "environment": environment(),
        "settings": {
            "checkpoint": given.checkpoint,
            "sentences": sentences,
            "speakers": list(speakers),
            "seed": given.seed,
            "layout": given.layout,
            "device": given.device,
            "workers": given.workers,
            "greedy": given.greedy,
            "vocabulary": len(setup.vocabulary),
            "left_out_words": sorted({word for _, missing in unknown for word in missing}),
            "left_out_sentences": len(unknown),
        },
        **all_figures([m for m in measured if m.embedding is None], Centroids.of(embeddings)),
    }
    document["settings"]["measured_s"] = round(time.perf_counter() - started_s, 1)
    if given.codec_figures:
        document["codec_figures"] = read_json(given.codec_figures, MetricsError)
    if given.listen:
        _write_list(given.listen, listening)
    if given.speed and not given.quick and speed:
        document["speed"] = speed_figures(given.checkpoint, given.device, known, speakers, given.speed, given.layout)
    document["lines"] = lines(document)
    return document


def sorted_out(sentences: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Sentences all of whose words the recogniser has, mixed; and the others, each with the words it lacks."""
    recogniser = Recogniser(vocabulary_of(sentences))
    missing = {text: [word for word in words(text) if not recogniser.knows(word)] for text in sentences}
    known = [text for text in sentences if not missing[text]]
    random.Random(_ORDER_SEED).shuffle(known)
    return known, [(text, lacking) for text, lacking in missing.items() if lacking]


def judging_tasks(
    known: Sequence[str],
    unknown: Sequence[tuple[str, list[str]]],
    speakers: Sequence[str],
    sentences: int,
    ends: int,
    seed: int,
    greedy: bool,
) -> list[Task]:
    """The judged sentences, the utterances that count ends only (other sentences first, then the same again with other
    speakers), and the teacher's for the centroids, of sentences that are not judged.

    Raises MetricsError where there are too few sentences for it.
    """
    apart = CENTROID_CLIPS * len(speakers)
    if not 0 < sentences <= len(known) - apart:
        raise MetricsError(
            f"expected 1 to {len(known) - apart} sentences ({apart} more are for the centroids), got {sentences}"
        )
    texts = [*known, *(text for text, _ in unknown)]
    tasks = []
    for i in range(max(sentences, ends)):
        again, place = divmod(i, len(texts))
        judged = i < sentences
        speaker = speakers[(place + again) % len(speakers)]
        tasks.append(Task(texts[place], speaker, seed + i, judged=judged, greedy=greedy and judged))
    clips = known[-apart:]
    return tasks + [Task(text, speakers[i % len(speakers)], seed, centroid=True) for i, text in enumerate(clips)]


def listen_tasks(known: Sequence[str], speakers: Sequence[str], seed: int, folder: Path) -> list[Task]:
    """A few of the judged sentences by every speaker, to WAV files."""
    return [
        Task(text, speaker, seed + i, listen=folder / f"{i}_{speaker}")
        for i, text in enumerate(known[:LISTEN_SENTENCES])
        for speaker in speakers
    ]


def speed_figures(
    checkpoint: str, device: str, texts: Sequence[str], speakers: Sequence[str], count: int, layout: str | None
) -> Figures:
    """RTF and audible TTFC (mktts.speech.metrics) of `count` warm streams, one at a time, alone on the machine."""
    import torch

    from mktts.synth import Synthesizer
    from mktts.synth.synthesizer import default_cpu_threads

    with Synthesizer.load(checkpoint, backend="torch", device=device) as synthesizer:
        synthesizer.warm_up()
        found = []
        for i in range(count):
            speaker = speakers[i % len(speakers)]
            found.append(summarise(synthesizer.stream(texts[i % len(texts)], speaker=speaker, seed=i, layout=layout)))
        threads = default_cpu_threads(synthesizer.checkpoint) or torch.get_num_threads()
    audible = [m.audible_ttfc_ms for m in found if m.audible_ttfc_ms is not None]
    return {
        "rtf": percentiles(m.rtf for m in found),
        "ttfc_ms": percentiles(m.ttfc_ms for m in found),
        "audible_ttfc_ms": percentiles(audible) if audible else None,
        "never_audible": count - len(audible),
        "underruns": sum(m.underruns for m in found),
        "backend": "torch",
        "device": device,
        "threads": threads,
    }


def table(document: Figures) -> str:
    """What people read first."""
    found = [f"{'':28}{'value':>10}{'limit':>10}"]
    for name, line in document["lines"].items():
        value = "none" if line["value"] is None else f"{line['value']:.3f}"
        found.append(f"{name:28}{value:>10}{line['limit']:>10.3f}  {'met' if line['met'] else 'NOT MET'}")
    for key in ("word_errors", "word_errors_greedy", "word_errors_codec"):
        for mode, figures in document.get(key, {}).items():
            rates = {name: figures[name] for name in ("teacher", "student", "greedy", "codec") if name in figures}
            said = "  ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
            interval = figures["interval_95"] and "{:.2f} to {:.2f}".format(*figures["interval_95"])
            found.append(f"{key} {mode}: {said}  ratio's 95 % interval {interval}")
    for name, figures in document["distortion"].items():
        found.append(f"mel-cepstral distortion, {name}: median {figures['median']:.2f} dB, p95 {figures['p95']:.2f} dB")
    who = document["speakers"]
    found.append(f"speaker: teacher {who['teacher_accuracy']:.3f}, student {who['student_accuracy']:.3f} right")
    return "\n".join(found)


def _with_progress(measured: Iterator[Measured], count: int) -> Iterator[Measured]:
    """Says on standard error how far it is."""
    started_s = printed_s = time.perf_counter()
    for done, m in enumerate(measured, 1):
        now_s = time.perf_counter()
        if now_s - printed_s > _PROGRESS_S or done == count:
            printed_s = now_s
            print(f"{done}/{count} utterances, {now_s - started_s:.0f} s", file=sys.stderr, flush=True)
        yield m


def _write_list(folder: Path, tasks: Sequence[Task]) -> None:
    """index.json: what each pair of WAV files says."""
    rows = [{"name": task.listen.name, "text": task.text, "speaker": task.speaker, "seed": task.seed} for task in tasks]
    write_json(folder / "index.json", rows, sort_keys=False)
