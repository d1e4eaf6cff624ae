"""What `mktts.training.ship` put into outputs/reference/voice, for 09_voice and the card: curves, the evaluation, and
pairs to listen to. A file that is absent is no error here: what shows it says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mktts.common import read_json

CURVES, EVALUATION, INDEX = "curves.json", "evaluation.json", "index.json"
_CLIPS = {"teacher": "teacher", "the codec's copy": "copy", "voice": "student"}
NOT_MEASURED = "not measured yet: python -m mktts train evaluate"


@dataclass(frozen=True)
class Evidence:
    """What lies in the folder. pairs: a sentence each, `text`, `speaker` and `clips`: the files by teacher, the codec's
    copy and the voice. missing: one line for each thing that is not there."""

    curves: Mapping[str, list[dict[str, Any]]]
    evaluation: Mapping[str, Any] | None
    pairs: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...]


def reference() -> Path:
    """Where the committed evidence lies."""
    from mktts.notebook.nb import repository

    return repository() / "outputs" / "reference" / "voice"


def evidence(folder: Path | None = None) -> Evidence:
    """Reads `folder`, or the committed one. Raises CheckpointError for a file that is there and cannot be read."""
    folder = folder or reference()
    found = {n: read_json(folder / n) if (folder / n).is_file() else None for n in (CURVES, EVALUATION, INDEX)}
    pairs = []
    for row in found[INDEX] or ():
        clips = {by: folder / f"{row['name']}_{part}.flac" for by, part in _CLIPS.items()}
        pairs.append({**row, "clips": {by: path for by, path in clips.items() if path.is_file()}})
    missing = tuple(f"{name}: not recorded yet" for name, content in found.items() if content is None)
    return Evidence(found[CURVES] or {}, found[EVALUATION], tuple(pairs), missing)


def figures(evaluation: Mapping[str, Any] | None, required: bool) -> list[dict[str, Any]]:
    """Rows of a table: what is required, was measured and is met; or the figures without a limit."""
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
