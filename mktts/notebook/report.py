"""From measurements to the rows that notebooks 04 and 06 show: one utterance -> many repeats -> many runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from mktts.common import read_object
from mktts.errors import MetricsError
from mktts.measure.metrics import percentiles
from mktts.notebook.grid import PARTIAL
from mktts.notebook.nb import MANUAL, repository
from mktts.speech.metrics import StreamMetrics

if TYPE_CHECKING:
    from mktts.speech.options import Chunk

TABLE = "metrics.parquet"
STAGES = ("talker", "predictor", "codec")
PERCENTILES = ("ttfc_ms", "audible_ttfc_ms", "rtf", "prebuffer_ms")  # of StreamMetrics, recorded as median and p95
SPEED_COLUMNS = (
    "ttfc_ms_median",
    "ttfc_ms_p95",
    "audible_ttfc_ms_median",
    "rtf_median",
    "rtf_p95",
    "underruns",
    "repeats",
)
PARITY_COLUMNS = (
    "prompts_equal",
    "codes_equal",
    "frames_compared",
    "codec_error_streamed",
    "codec_error_upstream",
    "kernel",
    "kernel_error_ratio",
    "kernel_frames_equal",
)
TEXT_CHARS = 40  # of a text that names a row


def notebooks() -> list[str]:
    """The names of the repository's notebooks, in order, but for the report itself."""
    names = sorted(path.stem for path in (repository() / "notebooks").glob("*.ipynb"))
    return [name for name in names if not name.endswith("_report")]


def wall_ms_per_frame(result: StreamMetrics) -> float:
    """Wall time from the call to the last PCM over the frames: prompt, talker, predictor, codec, hand-over, Python.

    (`frame_ms` of a bench document is another figure: from one frame's codes to the next one's, codec left out.)
    """
    return 1e3 * result.rtf * result.audio_s / result.frames


def stages_per_frame(results: Iterable[StreamMetrics]) -> dict[str, float]:
    """Mean ms per frame by stage; "other" is the rest of the time to the last PCM (prefill, hand-over, Python)."""
    results = list(results)
    stages = {stage: mean(getattr(r, f"{stage}_ms_per_frame") for r in results) for stage in STAGES}
    total_ms = mean(wall_ms_per_frame(result) for result in results)
    return {**stages, "other": max(0.0, total_ms - sum(stages.values()))}


def stage_samples(runs: Iterable[Sequence[Chunk]]) -> dict[str, list[float]]:
    """Stage -> ms per frame of every chunk of every utterance."""
    chunks = [chunk for run in runs for chunk in run if chunk.frames]
    return {stage: [getattr(c.timings, f"{stage}_ms") / c.frames for c in chunks] for stage in STAGES}


def over_repeats(results: Sequence[StreamMetrics]) -> dict[str, float | int]:
    """The scalars that describe repeated utterances of one configuration, ready for `metrics.record`."""
    recorded: dict[str, float | int] = {"repeats": len(results)}
    for name in PERCENTILES:
        values = [value for value in (getattr(r, name) for r in results) if value is not None]
        if values:  # an utterance that is never audible has no audible TTFC
            spread = percentiles(values)
            recorded |= {f"{name}_median": spread["median"], f"{name}_p95": spread["p95"]}
    recorded |= {f"{stage}_ms_per_frame": value for stage, value in stages_per_frame(results).items()}
    recorded["wall_ms_per_frame"] = mean(wall_ms_per_frame(result) for result in results)
    recorded["never_audible"] = sum(r.audible_ttfc_ms is None for r in results)
    recorded["underruns"] = sum(r.underruns for r in results)
    recorded["audio_s"] = sum(r.audio_s for r in results)
    return recorded


def by_text(results: Mapping[str, Sequence[StreamMetrics]]) -> list[dict[str, Any]]:
    """One row per text, of the results of its repeats: how long it is, and medians of what it took."""
    rows = []
    for text, repeats in results.items():
        medians = {
            name: percentiles(getattr(result, field) for result in repeats)["median"]
            for name, field in (("audio (s)", "audio_s"), ("TTFC (ms)", "ttfc_ms"), ("RTF", "rtf"))
        }
        shown = text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 1]}…"
        underruns = sum(result.underruns for result in repeats)
        rows.append({"text": shown, "characters": len(text), **medians, "underruns": underruns})
    return rows


def collected(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the runs beside `run_dir`: of metrics.parquet in their folder or next to it, and of manual runs. A table
    further up is another grid's.

    A row has `run`, `notebook`, the recorded metrics under their names, `param.NAME` and `env.NAME`; absent values
    are left out. Runs by hand (outputs/runs/<notebook>-manual) carry what their notebooks recorded only.
    """
    folder = run_dir.resolve().parent
    if folder.name == PARTIAL:
        folder = folder.parent
    table = next((f / TABLE for f in (folder, folder.parent) if (f / TABLE).is_file()), None)
    rows = _rows_of_table(table) if table else []
    known = {row["run"] for row in rows}
    return rows + [row for row in _manual_rows(folder) if row["run"] not in known]


def of_notebook(rows: Iterable[dict[str, Any]], notebook: str) -> list[dict[str, Any]]:
    """The successful rows of one notebook."""
    return [row for row in rows if row["notebook"] == notebook and row.get("status", "ok") == "ok"]


def coverage(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per notebook: how many runs there are, how many failed, and how to get what is missing."""
    lines = []
    for notebook in notebooks():
        runs = [row for row in rows if row["notebook"] == notebook]
        failed = [row for row in runs if row.get("status", "ok") != "ok"]
        what = "" if len(runs) > len(failed) else f"missing: python -m mktts run notebooks/{notebook}.ipynb"
        lines.append({"notebook": notebook, "runs": len(runs), "failed": len(failed), "note": what})
    return lines


def label(row: dict[str, Any]) -> str:
    """What a figure calls a run: checkpoint, backend, device, threads, schedule; equal labels are repeats of one
    configuration. A run by hand has what it recorded."""
    dtype = "bfloat16" if row.get("param.BF16") else str(row.get("dtype", "")).removeprefix("torch.")
    checkpoint = row.get("param.CHECKPOINT") or row.get("checkpoint") or "checkpoint not recorded"
    parts = [checkpoint, row.get("backend"), row.get("device"), dtype]
    lines = [", ".join(str(part) for part in parts if part)]
    if schedule := row.get("param.SCHEDULE") or row.get("schedule"):
        threads = row.get("threads")
        wide = f", {threads:.0f} thread{'s'[: threads > 1]}" if threads else ""
        lines.append(f"chunks of {schedule}{wide}")
    return "\n".join(lines)


def points(rows: Iterable[dict[str, Any]], metric: str) -> list[tuple[str, float]]:
    """(label, value) of every row that has `metric`, in the order of the labels."""
    return sorted((label(row), float(row[metric])) for row in rows if metric in row)


def stage_rows(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Label -> stage -> ms per frame, of the last run of each label, for `plots.stage_breakdown`."""
    stages = (*STAGES, "other")
    bars = {label(r): {s: float(r[f"{s}_ms_per_frame"]) for s in stages} for r in rows if "wall_ms_per_frame" in r}
    return dict(sorted(bars.items()))


def machines(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per machine and software state that the runs came from."""
    names = ("cpu", "cpu_cores", "gpu", "gpu_driver", "torch", "python", "git_revision")
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        revision, *changes = str(row.get("env.git_revision", "")).partition("+")
        row = {**row, "env.git_revision": revision[:8] + "".join(changes)}
        key = tuple(row.get(f"env.{name}") or None for name in names)
        seen[key] = seen.get(key, 0) + 1
    return [{**dict(zip(names, key, strict=True)), "runs": count} for key, count in seen.items() if any(key)]


def columns(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows cut down to their label and `names`; what a row does not have is empty."""
    return [{"run": label(row), **{name: row.get(name, "") for name in names}} for row in rows]


def _rows_of_table(path: Path) -> list[dict[str, Any]]:
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except Exception as error:  # pyarrow raises half a dozen types on a torn file
        raise MetricsError(f"{path}: expected the table that `mktts run` writes, could not read it: {error}") from error
    return [{k: v for k, v in row.items() if not pandas.isna(v)} for row in frame.to_dict("records")]


def _manual_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob(f"*{MANUAL}*/metrics.json")):
        if found := re.fullmatch(rf"(.+){MANUAL}(-\d+)?", path.parent.name):
            rows.append({"run": path.parent.name, "notebook": found[1], **read_object(path, MetricsError)})
    return rows
