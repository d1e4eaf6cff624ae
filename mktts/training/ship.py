"""From a training run to what is committed: `python -m mktts train ship`.

Writes mktts/checkpoint/small again, whole or not at all: the checkpoint with its model card, of the codec the decoder
only (a CustomVoice never hears a recording). outputs/reference/voice gets the curves, the evaluation, and a pair of
teacher and student to listen to for each speaker (`mktts.training.voice_report`).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio import read_audio, write_audio
from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import CODEC_FOLDER, SMALL, SMALL_FOLDER
from mktts.checkpoint.random.make import whole_folder, write_weights
from mktts.common import read_json, write_json
from mktts.errors import CheckpointError
from mktts.training.card import card
from mktts.training.voice_report import CURVES, EVALUATION, INDEX, clip, reference

CARD = "README.md"
MAX_POINTS = 300  # of a stage's curves; a run prints thousands


def ship(voice: Path, out: Path, evaluation: Mapping[str, Any] | None = None) -> Path:
    """Writes `out` from the checkpoint folder `voice`. evaluation: for the card.

    Raises CheckpointError where `voice` is no checkpoint or `out` has content already.
    """
    checkpoint = open_checkpoint(voice)
    with whole_folder(out) as work:
        shutil.copytree(voice, work, dirs_exist_ok=True)
        codec = {name: t.clone() for name, t in checkpoint.codec_files.map().items() if name.startswith("decoder.")}
        (work / CODEC_FOLDER / "model.safetensors").unlink()
        write_weights(work / CODEC_FOLDER, codec)
        (work / CARD).write_text(card(checkpoint, evaluation), encoding="utf-8")
    return out


def keep_evidence(
    folder: Path,
    evaluation: Mapping[str, Any] | None = None,
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    listen: Path | None = None,
    replaces: bool = False,
) -> None:
    """Replaces in `folder` what is given; audio becomes FLAC.

    replaces: what is there is of another voice: its clips of the same sentences stay as NAME_previous, its figures as
    `previous` of the evaluation. Without it, what is there of a voice before stays.

    evaluation: of its single sentences, what was heard is left out; its checkpoint is called by the name it now has.
    curves: stage -> lines. listen: a folder of `train evaluate --listen`, of which each speaker keeps one sentence, a
    different one each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if evaluation is not None:
        write_json(folder / EVALUATION, {**_shortened(evaluation), **_previous(folder / EVALUATION, replaces)})
    if curves is not None:
        write_json(folder / CURVES, {stage: thinned(lines) for stage, lines in curves.items()})
    if listen is not None:
        kept = one_each(read_json(listen / INDEX))
        before = _clips_before(folder, kept, replaces)
        for old in (*folder.glob("*.wav"), *folder.glob("*.flac")):
            old.unlink()
        for row in kept:
            for who in ("teacher", "student"):
                pcm, _ = read_audio(clip(listen, row["name"], who))
                write_audio(folder / f"{row['name']}_{who}.flac", pcm)
        for name, pcm in before.items():
            write_audio(folder / f"{name}_previous.flac", pcm)
        write_json(folder / INDEX, kept)


def _shortened(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was heard, and of everyday speech without the single sentences; the checkpoint by its new name."""
    rows = [{name: row[name] for name in row if name != "heard"} for row in evaluation["utterances"]]
    settings = {**evaluation["settings"], "checkpoint": SMALL}
    found = {**evaluation, "settings": settings, "utterances": rows}
    if "natural" in found:
        found["natural"] = {name: value for name, value in found["natural"].items() if name != "rows"}
    return found


def _previous(path: Path, replaces: bool) -> dict[str, Any]:
    """The figures of the voice before, for the evaluation of the new one."""
    there = read_json(path) if path.is_file() else {}
    key = "figures" if replaces else "previous"
    return {"previous": there[key]} if there.get(key) else {}


def _clips_before(folder: Path, rows: Sequence[Mapping[str, Any]], replaces: bool) -> dict[str, np.ndarray]:
    """By name the voice before, float32 (n,), where it says the same sentence by the same speaker."""
    index = folder / INDEX
    there = {row["name"]: row for row in (read_json(index) if index.is_file() else [])}
    found = {}
    for row in rows:
        old = there.get(row["name"])
        path = clip(folder, row["name"], "student" if replaces else "previous")
        if old and (old["text"], old["speaker"]) == (row["text"], row["speaker"]) and path.is_file():
            found[row["name"]] = read_audio(path)[0]
    return found


def one_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each speaker one row, of different texts where there are enough."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    speakers = list(dict.fromkeys(row["speaker"] for row in rows))
    wanted = {(speaker, texts[i % len(texts)]) for i, speaker in enumerate(speakers)}
    return [row for row in rows if (row["speaker"], row["text"]) in wanted]


def thinned(lines: list[dict[str, Any]], most: int = MAX_POINTS) -> list[dict[str, Any]]:
    """Every n-th line, the last one, and all that hold a held-out loss."""
    step = -(-len(lines) // most)
    last = len(lines) - 1
    return [line for i, line in enumerate(lines) if i % max(1, step) == 0 or i == last or "held_out_code0" in line]


EXAMPLES = """examples:
  python -m mktts train ship --voice OUT/voice --evaluation evaluation.json --listen LISTEN
  python -m mktts train ship --voice OUT/voice --curves CODEC/curves.json OUT/talker_curves.json

Replaces the voice in the package, whole or not at all, and what is given of its evidence in outputs/reference/voice.
The last line of standard output is JSON: the folder and its bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--voice", type=Path, required=True, help="the checkpoint that `train talker` wrote")
    parser.add_argument("--evaluation", type=Path, metavar="FILE", help="of `train evaluate --output`")
    parser.add_argument("--listen", type=Path, metavar="FOLDER", help="of `train evaluate --listen`")
    parser.add_argument("--curves", type=Path, nargs=2, metavar=("CODEC", "TALKER"), help="curves of both stages")
    parser.add_argument(
        "--replaces", action="store_true", help="another voice: clips and figures of the one there stay to compare with"
    )
    parser.add_argument("--out", type=Path, default=SMALL_FOLDER, help="default: the package's own folder")
    parser.add_argument("--reference", type=Path, help="default: outputs/reference/voice")


def main(arguments: argparse.Namespace) -> int:
    """Replaces voice and evidence. Raises CheckpointError for what cannot be shipped."""
    evaluation = read_json(arguments.evaluation) if arguments.evaluation else None
    curves = None
    if arguments.curves:
        curves = {stage: read_json(path) for stage, path in zip(("codec", "talker"), arguments.curves, strict=True)}
    evidence = arguments.reference or reference()
    if evaluation is not None:
        evaluation = {**evaluation, **_previous(evidence / EVALUATION, arguments.replaces)}  # the card shows both
    _replace(arguments.voice, arguments.out, evaluation)
    keep_evidence(evidence, evaluation, curves, arguments.listen, arguments.replaces)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(json.dumps({"folder": str(arguments.out), "size_bytes": size}))
    return 0


def _replace(voice: Path, out: Path, evaluation: Mapping[str, Any] | None) -> None:
    """`out` as it was where anything goes wrong."""
    new, previous = (out.with_name(f".{out.name}.{word}") for word in ("new", "previous"))
    for folder in (new, previous):
        shutil.rmtree(folder, ignore_errors=True)
    ship(voice, new, evaluation)
    try:
        if out.exists():
            out.rename(previous)
        new.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: expected to put the voice there, but: {error}") from None
    shutil.rmtree(previous, ignore_errors=True)
