"""Recorded measurements: the documents of an H200, in outputs/reference/h200, and the verdicts of notebooks."""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mktts.common import read_object, write_json
from mktts.errors import MetricsError
from mktts.measure.environment import environment
from mktts.measure.metrics import short
from mktts.notebook.nb import MANUAL, table

FOLDER = Path(__file__).resolve().parents[2] / "outputs" / "reference" / "h200"
COMMANDS = {
    "bench": "python -m mktts bench --peers --output outputs/reference/h200/bench.json",
    "codec": "python -m mktts parity small random:0.6b --parts codec --output outputs/reference/h200/codec.json",
    "gpu_tests": "python tests/gpu_record.py outputs/reference/h200/gpu_tests.json",
    "load": "python -m mktts bench --load --listeners 256,512,1024 --into outputs/reference/h200/load.json",
    "parity": "python -m mktts parity random:0.6b random:1.7b random:tiny random:tiny-projected "
    "--parts kernel --output outputs/reference/h200/parity.json",
    "trace": "python -m mktts lab trace --output outputs/reference/h200/trace.json",
}
# A persistent kernel of 132 blocks of 512 threads reads the 0.6B talker's 881 MB in 0.208 ms, median of 20.
H200_READ_GB_S = 4240.0
VERDICT = "verdict.json"  # in a run's folder
BOUNDS = {"equal": ("=", operator.eq), "at_most": ("≤", operator.le), "at_least": ("≥", operator.ge)}


def stored(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The document `name`.json, or None if there is none."""
    path = folder / f"{name}.json"
    return read_object(path, MetricsError) if path.is_file() else None


def reference(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The document `name`.json. If there is none, raises MetricsError with the command that makes it."""
    found = stored(name, folder)
    if found is None:
        raise MetricsError(f"expected the measurement {folder / name}.json, found none: {absent(name)}")
    return found


def absent(name: str) -> str:
    """The message for a document that does not exist."""
    how = f"; on a machine with a GPU: {COMMANDS[name]}" if name in COMMANDS else ""
    return f"outputs/reference/h200/{name}.json is not recorded yet{how}"


def median(bench: Mapping[str, Any], name: str) -> float | None:
    """The median of a figure in a document of `python -m mktts bench`, or None if it has no figure of that name."""
    figure = bench["figures"].get(name)
    return None if figure is None else float(figure["median"])


def provenance(found: Mapping[str, Any] | None) -> str:
    """One line on a document's origin: device, dates and revisions of all runs merged into it; "" for None."""
    if found is None:
        return ""
    merged = "points" in found and "revision" not in found
    runs = [*found["points"], *found["figures"].values()] if merged else [found]
    if not runs:
        return "nothing measured yet"
    days = sorted({str(run.get("date") or run.get("date_utc") or "")[:10] for run in runs})
    revisions = [run.get("revision") or run.get("git_revision") or "" for run in runs]
    commits = list(dict.fromkeys(revision.partition("+")[0][:8] for revision in revisions))
    named = ", ".join(commits) if len(commits) <= 3 else f"{commits[0]} to {commits[-1]} ({len(commits)})"
    changes = "+changes" if any("+" in revision for revision in revisions) else ""
    random = found.get("settings", {}).get("random_weights") or any(run.get("random_weights") for run in runs)
    parts = [
        f"measured on {found.get('device') or found.get('gpu') or found.get('cpu')}",
        " to ".join(dict.fromkeys((days[0], days[-1]))),
        f"at revision{'s'[: len(commits) > 1]} {named}{changes}" if any(commits) else "",
        "random weights" if random else "",
    ]
    return ", ".join(filter(None, parts))


def runs(folder: Path) -> list[dict[str, Any]]:
    """A row for each finished run in `folder`: run, notebook, status, and every metric by name; for a headless run also
    `param.NAME` and `env.NAME`. Raises MetricsError if a file cannot be read."""
    rows = []
    for path in sorted(folder.glob("*/metrics.json")):
        run, found = path.parent, read_object(path, MetricsError)
        about = stored("parameters", run)
        if about is None:  # an interactive run
            rows.append({"run": run.name, "notebook": run.name.partition(MANUAL)[0], "status": "ok", **found})
        elif "status" in found:  # otherwise the run was killed
            known = {f"param.{name}": value for name, value in about["parameters"].items()}
            known |= {f"env.{name}": value for name, value in (stored("environment", run) or {}).items()}
            rows.append({"run": run.name, **found, "notebook": about["notebook"], **known})
    return rows


# ---- the end of a notebook: its question, the answer in a sentence, and checked figures


def here(on_gpu: bool = False) -> str:
    """The name of this machine in a figure."""
    facts = environment()
    return str(facts["gpu"]) if on_gpu else f"{facts['cpu_cores']} cores of {facts['cpu']}"


def figure(name: str, value: float, unit: str, n: int, machine: str, **bound: float) -> dict[str, Any]:
    """Makes a figure of a verdict. n: number of measurements. bound: one of equal=, at_most=, at_least=. Raises
    MetricsError if the value violates the bound."""
    ((kind, limit),) = bound.items()
    sign, holds = BOUNDS[kind]
    checked = f"{sign} {short(limit)}"
    if not holds(value, limit):
        raise MetricsError(f"{name}: expected {checked} {unit}, found {value}")
    value = value if isinstance(value, int) else float(value)
    return {"name": name, "value": value, "unit": unit, "n": n, "checked": checked, "machine": machine}


def verdict(run_dir: Path, question: str, answer: str, figures: Sequence[dict[str, Any]], limit: str) -> None:
    """Shows the verdict and writes it to `run_dir`. limit: the limits of the answer."""
    from IPython.display import Markdown, display

    stated = {"question": question, "answer": answer, "figures": list(figures), "limit": limit}
    write_json(Path(run_dir) / VERDICT, stated)
    display(Markdown(f"**{question}** {answer}"))
    table([one | {"checked": one["checked"].replace(" ", "\N{NO-BREAK SPACE}")} for one in figures])
    display(Markdown(f"*Limits:* {limit}"))


def verdicts(folder: Path) -> list[dict[str, Any]]:
    """One verdict per notebook that was run in `folder`, in order; preferably of the run with the default
    parameters."""
    paths = sorted(folder.glob(f"[0-9][0-9]_*/{VERDICT}"), reverse=True)
    found = {path.parent.name.partition("-")[0]: path for path in paths}  # the shortest name comes last, and stays
    return [{"notebook": name, **read_object(found[name], MetricsError)} for name in sorted(found)]
