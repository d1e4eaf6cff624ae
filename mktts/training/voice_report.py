"""The results of a training run in outputs/reference/voice (curves, evaluation, pairs of clips), for 09_voice and the
card; and `python -m mktts train ship`, which writes them there and copies the voice into the package."""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from mktts.audio import from_pcm16, read_audio, write_audio
from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL, SMALL_FOLDER
from mktts.checkpoint.random.make import whole_folder
from mktts.common import read_json, write_json
from mktts.measure.metrics import cell
from mktts.training.codec.model import Codec, encoded, load_codec
from mktts.training.data.audio import clips_in
from mktts.training.state import read_state

CURVES, EVALUATION, INDEX = "curves.json", "evaluation.json", "index.json"
_CLIPS = {"teacher": "teacher", "the codec's copy": "copy", "voice": "student"}
NOT_MEASURED = "not measured yet: python -m mktts train evaluate"


class Evidence(NamedTuple):
    """Results of a run. pairs: a sentence's `text`, `speaker` and `clips`, files by source. missing: lines of text."""

    curves: Mapping[str, list[dict[str, Any]]]
    evaluation: Mapping[str, Any] | None
    pairs: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...]


def reference() -> Path:
    """The folder of the committed results."""
    from mktts.notebook.nb import repository

    return repository() / "outputs" / "reference" / "voice"


def evidence(folder: Path | None = None) -> Evidence:
    """Reads the results in `folder`, or the committed ones. Raises CheckpointError for an unreadable file."""
    folder = folder or reference()
    found = {n: read_json(folder / n) if (folder / n).is_file() else None for n in (CURVES, EVALUATION, INDEX)}
    pairs = []
    for row in found[INDEX] or ():
        clips = {by: folder / f"{row['name']}_{part}.ogg" for by, part in _CLIPS.items()}
        pairs.append({**row, "clips": {by: path for by, path in clips.items() if path.is_file()}})
    missing = tuple(f"{name}: not recorded yet" for name, content in found.items() if content is None)
    return Evidence(found[CURVES] or {}, found[EVALUATION], tuple(pairs), missing)


def figures(evaluation: Mapping[str, Any] | None, required: bool) -> list[dict[str, Any]]:
    """Rows of a table: the figures with a requirement and whether it is met, or else those without one."""
    if evaluation is None:
        return [{"figure": NOT_MEASURED}]
    rows = []
    for name, figure in evaluation["figures"].items():
        between = (figure.get("low"), figure.get("high"))
        row = {"figure": name.replace("_", " ")}
        row["measured"] = "none" if figure["value"] is None else float(f"{figure['value']:.3g}")
        row |= {"95 % interval": "{:.3g} to {:.3g}".format(*between)} if between[0] is not None else {}
        row["n"] = figure["n"]
        if required and "must" in figure:
            bound, limit = figure["must"]
            row |= {"required": f"{bound} {limit:g}", "met": figure["met"]}
        if required == ("must" in figure):
            rows.append(row)
    return rows


MAX_POINTS = 300  # of the curves of a stage
PAIRS = 5  # sentences to listen to


def card(voice: Path, evaluation: Mapping[str, Any]) -> str:
    """The text of the checkpoint's README.md. Raises CheckpointError if `voice` is not a checkpoint."""
    opened, rows = open_checkpoint(voice), figures(evaluation, required=True)
    talker, decoder = (sum(s.params for s in f.tensors.values()) / 1e6 for f in (opened.files, opened.codec_files))
    speakers = list(opened.config.speakers)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, ["---"] * len(columns), *([cell(row.get(c, "")) for c in columns] for row in rows)]
    given = {"talker": talker, "decoder": decoder, "params": talker + decoder, "speaker": speakers[0]}
    given |= {"speakers": " and ".join(speakers), "entries": opened.config.predictor.vocab_size}
    text = files("mktts.training.data").joinpath("card.txt").read_text(encoding="utf-8")
    return text.format(**given, quality="\n".join(f"| {' | '.join(row)} |" for row in cells))


def keep_clips(folder: Path, keep: Path, teacher: Sequence[Path], codec: Codec) -> None:
    """Writes clips of the first PAIRS sentences to `folder`: the student, the teacher, and the codec's copy of it."""
    for old in folder.glob("*.ogg"):
        old.unlink()
    rows: list[dict[str, str]] = []
    for number, (text, speaker, pcm) in enumerate(clips_in(*teacher)):
        spoken, name = keep / f"{speaker}_{number:04}.flac", f"{len(rows)}_{speaker}"
        if spoken.is_file() and len(rows) < PAIRS:
            write_audio(folder / f"{name}_student.ogg", read_audio(spoken)[0])
            write_audio(folder / f"{name}_teacher.ogg", from_pcm16(pcm))
            (codes,) = encoded(codec, [pcm])
            write_audio(folder / f"{name}_copy.ogg", codec.decode(codes[None].long())[0, : len(pcm)].numpy())
            rows.append({"name": name, "text": text, "speaker": speaker})
    write_json(folder / INDEX, rows)


EXAMPLES = """examples:
  python -m mktts train ship --voice VOICE --evaluation e.json --keep KEEP --teacher NATURAL --curves CODEC TALKER

Replaces the voice in the package, and its evidence in outputs/reference/voice. The last line of standard output is
JSON: the folder and its bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--voice", type=Path, required=True, help="the checkpoint that `train talker` wrote")
    parser.add_argument("--evaluation", type=Path, required=True, metavar="FILE", help="of `train evaluate --output`")
    parser.add_argument("--keep", type=Path, required=True, metavar="FOLDER", help="of the same: clips to listen to")
    parser.add_argument("--teacher", type=Path, required=True, nargs="+", metavar="NATURAL", help="of the same")
    parser.add_argument("--curves", type=Path, required=True, nargs=2, metavar=("CODEC", "TALKER"), help="both stages")
    parser.add_argument("--out", type=Path, default=SMALL_FOLDER, help="default: the package's own folder")
    parser.add_argument("--reference", type=Path, help="default: outputs/reference/voice")


def main(arguments: argparse.Namespace) -> int:
    """Replaces the voice and its results. Raises CheckpointError if a file is missing or invalid."""
    evaluation, stages = read_json(arguments.evaluation), arguments.curves
    folder = arguments.reference or reference()
    lines = {stage: read_state(path)["curves"] for stage, path in zip(("codec", "talker"), stages, strict=True)}
    codec = load_codec(stages[0])
    text = card(arguments.voice, evaluation)
    shutil.rmtree(arguments.out, ignore_errors=True)
    with whole_folder(arguments.out) as work:
        shutil.copytree(arguments.voice, work, dirs_exist_ok=True)
        (work / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / EVALUATION, {**evaluation, "checkpoint": SMALL})
    write_json(folder / CURVES, {stage: found[:: -(-len(found) // MAX_POINTS)] for stage, found in lines.items()})
    keep_clips(folder, arguments.keep, arguments.teacher, codec)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(json.dumps({"folder": str(arguments.out), "size_bytes": size}))
    return 0
