"""What `mktts.training.ship` put into outputs/reference/voice, for 09_voice and the card: curves, the evaluation, and
pairs to listen to. A file that is absent is no error here: what shows it says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mktts.common import read_json

CURVES, EVALUATION, INDEX = "curves.json", "evaluation.json", "index.json"
_WHO = {"teacher": "teacher", "the codec's copy": "copy", "voice": "student"}
NOT_MEASURED = "not measured yet: python -m mktts train evaluate"


@dataclass(frozen=True)
class Pair:
    """One sentence by the teacher and by the student."""

    text: str
    speaker: str
    folder: Path
    name: str

    def clips(self) -> dict[str, Path]:
        """Who says it -> the file, where there is one."""
        files = {who: self.folder / f"{self.name}_{part}.flac" for who, part in _WHO.items()}
        return {who: path for who, path in files.items() if path.is_file()}


@dataclass(frozen=True)
class Evidence:
    """What lies in the folder. missing: one line for each thing that does not."""

    curves: Mapping[str, list[dict[str, Any]]]
    evaluation: Mapping[str, Any] | None
    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]


def reference() -> Path:
    """Where the committed evidence lies."""
    from mktts.notebook.nb import repository

    return repository() / "outputs" / "reference" / "voice"


def evidence(folder: Path | None = None) -> Evidence:
    """Reads `folder`, or the committed one. Raises CheckpointError for a file that is there and cannot be read."""
    folder = folder or reference()
    found = {n: read_json(folder / n) if (folder / n).is_file() else None for n in (CURVES, EVALUATION, INDEX)}
    pairs = tuple(Pair(row["text"], row["speaker"], folder, row["name"]) for row in found[INDEX] or ())
    missing = tuple(f"{name}: not recorded yet" for name, content in found.items() if content is None)
    return Evidence(found[CURVES] or {}, found[EVALUATION], pairs, missing)


def quality(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What is required as rows of a table: what was measured, the limit, whether it is met."""
    return _rows(evaluation, required=True)


def reported(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Figures without a limit."""
    return _rows(evaluation, required=False)


def _rows(evaluation: Mapping[str, Any] | None, required: bool) -> list[dict[str, Any]]:
    if evaluation is None:
        return [{"figure": NOT_MEASURED}]
    rows = []
    for name, figure in evaluation["figures"].items():
        between = figure.get("interval_95") or (figure.get("low"), figure.get("high"))
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
