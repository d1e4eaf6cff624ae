"""From a training run to what is committed:

    python -m mktts.training.ship --voice OUT/voice --evaluation FILE --listen FOLDER --curves CODEC/curves.json \\
      OUT/talker_curves.json

writes mktts/checkpoint/small anew, whole or not at all: the checkpoint with its model card, of the codec the decoder
only (a CustomVoice never hears a recording). outputs/reference/voice gets the curves, the evaluation, and a pair of
teacher and student to listen to for each speaker (`mktts.notebook.voice_report`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import CODEC_FOLDER, SMALL, SMALL_FOLDER
from mktts.checkpoint.random.make import whole_folder, write_weights
from mktts.common import read_json, write_json
from mktts.errors import CheckpointError, MkttsError
from mktts.notebook.voice_report import CURVES, EVALUATION, INDEX, reference
from mktts.training.card import card

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
        write_weights(work / CODEC_FOLDER, codec, 1)
        (work / CARD).write_text(card(checkpoint, evaluation), encoding="utf-8")
    return out


def keep_evidence(
    folder: Path,
    evaluation: Mapping[str, Any] | None = None,
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    listen: Path | None = None,
) -> None:
    """Replaces in `folder` what is given.

    evaluation: of its single sentences, what was heard is left out; its checkpoint is called by the name it now has.
    curves: stage -> lines. listen: a folder of `mktts.training.judge.evaluate --listen`, of which each speaker keeps
    one sentence, another for each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if evaluation is not None:
        rows = [{name: row[name] for name in row if name != "heard"} for row in evaluation["utterances"]]
        settings = {**evaluation["settings"], "checkpoint": SMALL}
        write_json(folder / EVALUATION, {**evaluation, "settings": settings, "utterances": rows})
    if curves is not None:
        write_json(folder / CURVES, {stage: thinned(lines) for stage, lines in curves.items()})
    if listen is not None:
        for old in folder.glob("*.wav"):
            old.unlink()
        kept = one_each(read_json(listen / INDEX))
        for row in kept:
            for who in ("teacher", "student"):
                shutil.copyfile(listen / f"{row['name']}_{who}.wav", folder / f"{row['name']}_{who}.wav")
        write_json(folder / INDEX, kept)


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mktts.training.ship", description=__doc__)
    parser.add_argument("--voice", type=Path, required=True, help="the checkpoint that talker_train wrote")
    parser.add_argument("--evaluation", type=Path, help="what evaluate wrote")
    parser.add_argument("--listen", type=Path, help="what evaluate --listen wrote")
    parser.add_argument("--curves", type=Path, nargs=2, metavar=("CODEC", "TALKER"), help="curves of both stages")
    parser.add_argument("--out", type=Path, default=SMALL_FOLDER, help="default: the package's own folder")
    parser.add_argument("--reference", type=Path, help="default: outputs/reference/voice")
    options = parser.parse_args(arguments)
    try:
        evaluation = read_json(options.evaluation) if options.evaluation else None
        curves = None
        if options.curves:
            curves = {stage: read_json(path) for stage, path in zip(("codec", "talker"), options.curves, strict=True)}
        _replace(options.voice, options.out, evaluation)
        keep_evidence(options.reference or reference(), evaluation, curves, options.listen)
    except MkttsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{options.out}: {size / 1e6:.2f} MB")
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


if __name__ == "__main__":
    sys.exit(main())
