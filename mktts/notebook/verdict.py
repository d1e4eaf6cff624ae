"""How a notebook ends: its question, the answer in a sentence, and figures each of which was checked.

A verdict is shown as a small table and kept as verdict.json in the run's folder. `collected` joins those of many runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mktts.common import read_object, write_json
from mktts.errors import MetricsError
from mktts.measure.environment import environment
from mktts.notebook import nb
from mktts.notebook.plots import short

FILE = "verdict.json"
BOUNDS = {"equal": ("=", operator.eq), "at_most": ("≤", operator.le), "at_least": ("≥", operator.ge)}


def here(on_gpu: bool = False) -> str:
    """What a figure calls this machine."""
    facts = environment()
    return str(facts["gpu"]) if on_gpu else f"{facts['cpu_cores']} cores of {facts['cpu']}"


def figure(name: str, value: float, unit: str, n: int, machine: str, **bound: float) -> dict[str, Any]:
    """A figure of a verdict. n: measurements behind it. bound: equal=, at_most= or at_least=, what must hold of it.

    Raises MetricsError where that does not hold.
    """
    ((kind, limit),) = bound.items()
    sign, holds = BOUNDS[kind]
    checked = f"{sign} {short(limit)}"
    if not holds(value, limit):
        raise MetricsError(f"{name}: expected {checked} {unit}, found {value}")
    value = value if isinstance(value, int) else float(value)
    return {"name": name, "value": value, "unit": unit, "n": n, "machine": machine, "checked": checked}


def state(run_dir: Path, question: str, answer: str, figures: Sequence[dict[str, Any]], limit: str) -> None:
    """Shows the verdict and writes it to `run_dir`. limit: what the answer does not say."""
    from IPython.display import Markdown, display

    stated = {"question": question, "answer": answer, "figures": list(figures), "limit": limit}
    write_json(Path(run_dir) / FILE, stated)
    display(Markdown(f"**{question}** {answer}"))
    columns = ("unit", "n", "checked", "machine")
    rows = [
        {"figure": one["name"], "value": short(one["value"]), **{key: one[key] for key in columns}} for one in figures
    ]
    nb.table(rows)
    display(Markdown(f"*The limit of it:* {limit}"))


def collected(folder: Path) -> list[dict[str, Any]]:
    """The verdicts of all runs in `folder`, each with its notebook, in the notebooks' order."""
    found = sorted(folder.glob(f"[0-9][0-9]_*/{FILE}"))
    return [{"notebook": path.parent.name, **read_object(path, MetricsError)} for path in found]
