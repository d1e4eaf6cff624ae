"""The voice against its teacher: `python -m mktts train evaluate`.

Every sentence is held out. The record has a part for each section (mktts.training.judge.sections), `lines` of the first
voice's goals, and `figures` (mktts.training.judge.figures), which say in short how good the voice is. $FLITE names the
teacher, as in mktts.training.data.teacher.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mktts.common import read_json, write_json
from mktts.errors import MetricsError
from mktts.measure.environment import environment
from mktts.training.data.teacher import SPEAKERS
from mktts.training.judge.figures import figures
from mktts.training.judge.quality import Figures, lines
from mktts.training.judge.sections import SECTIONS, Given

QUICK_SENTENCES = 30
_LEFT_OUT_OF_QUICK = ("upstream", "speed")
_ROWS = {"utterances": None, "natural": "rows"}  # of the single sentences: key, and what of it


EXAMPLES = """examples:
  FLITE=./flite python -m mktts train evaluate --checkpoint OUT/voice --output evaluation.json --listen LISTEN
  FLITE=./flite python -m mktts train evaluate --checkpoint OUT/voice --output evaluation.json --only natural,forms
  FLITE=./flite python -m mktts train evaluate --checkpoint OUT/voice --output evaluation.json --quick

The variable FLITE names the teacher, as for `train teacher`. With --keep, a run that was cut off goes on where it was,
and what is measured again is not spoken again. --only measures some sections and puts them into the record that is
there; without it the record begins anew. The last line of standard output is the record as JSON, without the single
sentences, which the file has too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="folder in the Hub's layout, or small")
    parser.add_argument("--output", type=Path, required=True, help="JSON, written whole after every section")
    parser.add_argument("--only", metavar="A,B", help=f"sections of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for audio and what was heard (default: not kept)")
    parser.add_argument("--sentences", type=int, default=200, help="of the grammar, judged (default: 200)")
    parser.add_argument("--natural", type=int, help="of everyday speech, each by every speaker (default: all)")
    parser.add_argument("--forms", type=int, default=120, help="sentences in every written form (default: 120)")
    parser.add_argument("--eos", type=int, default=500, help="utterances whose end is counted (default: 500)")
    parser.add_argument("--speed", type=int, default=24, help="streams timed, 0 for none (default: 24)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SENTENCES} sentences of each kind, no timing")
    parser.add_argument("--greedy", action="store_true", help="word errors of the grammar by argmax too")
    parser.add_argument("--speakers", default=",".join(SPEAKERS), help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first utterance; the next ones count up")
    parser.add_argument("--layout", choices=("whole", "streaming"), help="of the prompt (default: the checkpoint's)")
    parser.add_argument("--device", default="cpu", help="the student's (default: cpu)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--teacher-cache", type=Path, help="folder of the teacher's audio, if not that of --keep")
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
    print(table(document))
    print(json.dumps(_without_rows(document), sort_keys=True))
    return 0


def evaluate(given: argparse.Namespace, sections: Mapping[str, Callable[[Given], Figures]] = SECTIONS) -> Figures:
    """The whole record, also in the file. Raises MetricsError for settings that do not fit, and what teacher, student
    and recogniser raise; what was measured before that is in the file."""
    chosen = _chosen(given, sections)
    document: Figures = {}
    if given.only and given.output.exists():
        document = read_json(given.output, MetricsError)
    document["environment"] = environment()
    with tempfile.TemporaryDirectory() as folder:
        told = _told(given, given.keep or Path(folder))
        for name in chosen:
            started_s = time.perf_counter()
            document |= sections[name](told)
            where = document["environment"]
            document.setdefault("measured", {})[name] = {
                "date_utc": where["date_utc"],
                "git_revision": where["git_revision"],
                "seconds": round(time.perf_counter() - started_s, 1),
            }
            document["lines"] = lines(document)
            document["figures"] = figures(document)
            given.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(given.output, document)
    return document


def _chosen(given: argparse.Namespace, sections: Mapping[str, object]) -> list[str]:
    left_out = {*(_LEFT_OUT_OF_QUICK if given.quick else ()), *(() if given.speed else ("speed",))}
    names = given.only.split(",") if given.only else [name for name in sections if name not in left_out]
    unknown = [name for name in names if name not in sections]
    if unknown:
        raise MetricsError(f"expected sections of {', '.join(sections)}, got {', '.join(unknown)}")
    return names


def _told(given: argparse.Namespace, keep: Path) -> Given:
    quick = QUICK_SENTENCES if given.quick else None
    return Given(
        checkpoint=given.checkpoint,
        speakers=tuple(given.speakers.split(",")),
        keep=keep,
        sentences=quick or given.sentences,
        natural=quick or given.natural,
        forms=quick or given.forms,
        ends=0 if given.quick else given.eos,
        streams=given.speed,
        greedy=given.greedy,
        seed=given.seed,
        layout=given.layout,
        device=given.device,
        workers=given.workers,
        teacher_cache=given.teacher_cache,
        codec_state=given.codec_state,
        codec_audio=given.codec_audio,
        codec_figures=given.codec_figures,
        listen=given.listen,
    )


def table(document: Figures) -> str:
    """What people read first."""
    found = [f"{'':28}{'value':>10}   {'95 % interval':20}{'must':>14}"]
    for name, row in document["figures"].items():
        value = "none" if row["value"] is None else f"{row['value']:.3f}"
        interval = "{:.3f} to {:.3f}".format(*row["interval_95"]) if row["interval_95"] else ""
        must = "{} {:g}".format(*row["must"]) + ("  met" if row["met"] else "  NOT MET") if "must" in row else ""
        found.append(f"{name:28}{value:>10}   {interval:20}{must:>14}")
    for key in ("word_errors", "word_errors_greedy", "word_errors_codec"):
        for mode, figures_ in document.get(key, {}).items():
            rates = {name: figures_[name] for name in ("teacher", "student", "greedy", "codec") if name in figures_}
            found.append(f"{key} {mode}: " + "  ".join(f"{name} {rate:.3f}" for name, rate in rates.items()))
    for speaker, of in document.get("natural", {}).get("by_speaker", {}).items():
        rates = "  ".join(f"{voice} {of[voice]['rate']:.3f}" for voice in ("teacher", "student"))
        found.append(f"natural sentences, {speaker}: {rates}" + (f"  ratio {of['ratio']:.2f}" if of["ratio"] else ""))
    for name, of in document.get("forms", {}).get("forms", {}).items():
        found.append(f"{name}: {of['rate']:.3f}" + (f"  ratio {of['ratio']:.2f}" if of.get("ratio") else ""))
    for name, of in document.get("distortion", {}).items():
        found.append(f"mel-cepstral distortion, {name}: median {of['median']:.2f} dB, p95 {of['p95']:.2f} dB")
    return "\n".join(found)


def _without_rows(document: Figures) -> Figures:
    kept = dict(document)
    for key, inner in _ROWS.items():
        if inner is None:
            kept.pop(key, None)
        elif key in kept:
            kept[key] = {name: value for name, value in kept[key].items() if name != inner}
    return kept
