"""`python -m mktts run`: runs notebooks headless with papermill, one folder per run; `records.runs` reads them.

The folder of a run, whose name has the values that were set, holds executed.ipynb, parameters.json, environment.json,
metrics.json and the files that the notebook wrote. metrics.json has what the notebook recorded, duration_s, and status:
ok, error, or skipped if a package is needed that has no wheel for this system; the latter two add ename, evalue and
cell. If the status is missing, the run did not finish."""

import argparse
import ast
import csv
import glob
import hashlib
import html
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
import traitlets
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from mktts.common import python_path, write_json, write_whole
from mktts.errors import BatchError, PackageMissing
from mktts.measure.environment import environment
from mktts.measure.metrics import record
from mktts.notebook.nb import as_mp3

RUN_DIR = "RUN_DIR"  # the parameter that the runner sets
CELL_LIMIT_S = 1_800  # time limit of a cell
LONGEST_NAME = 100  # characters of a run folder's name
TYPES = {"int": int, "float": float, "bool": bool, "str": str}  # by the parameter's annotation, or the default's type
PICTURES = ("04_streaming/chunk_timeline.png",)  # files that the README shows; notebooks embed their own figures
PAGE = '<a href="../agent_page.png">the page, as it looks while it runs</a>'
CONTROLS = "(controls, in a notebook that runs)"
_PLAIN = re.compile(r"[A-Za-z0-9._,+-]*")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_AUDIO = re.compile(r'<audio controls title="([^"]+)" src="data:[^"]*"></audio>')
_LINK = re.compile(r"\]\((\d\d_\w+)\.ipynb\)")
_IFRAME = re.compile(r"<iframe\b.*?</iframe>", re.DOTALL)
EXAMPLES = """examples:
  python -m mktts run notebooks/*.ipynb
  python -m mktts run notebooks/05_metrics.ipynb --set SEED=1,2,3 --set CHECKPOINT=random:tiny,random:0.6b
  python -m mktts run notebooks/04_streaming.ipynb --set 'TEXT="Yes, please.","No."'
  python -m mktts run notebooks/*.ipynb --publish outputs/reference

Values are separated by commas and take the type of the notebook's parameter; several --set make every combination.
A value with a comma goes in double quotes, in which a double quote is doubled. A name that one of the notebooks
does not have is refused before anything runs. Exit status: 0, 1 if a run failed, or 2 for bad input."""


# ---- planning of runs


Parameters = dict[str, tuple[str, Any]]  # of a notebook: name -> (type name, default)


@dataclass(frozen=True)
class NotebookRun:
    """One execution of the notebook `path`. known: its parameters; parameters: those set on the command line."""

    path: Path
    known: Parameters
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The notebook's name and the set values, such as 05_metrics-SEED=1-CHECKPOINT=small, valid as a folder's name
        on any file system. A colon is written ~. If a value has another special character, or the name is too long,
        eight hexadecimal digits of a hash replace the values, which parameters.json has."""
        stem = self.path.stem
        values = {name: str(value).replace(":", "~") for name, value in self.parameters.items()}
        name = "-".join([stem, *(f"{key}={value}" for key, value in values.items())])
        plain = all(_PLAIN.fullmatch(str(value).replace(":", "")) for value in self.parameters.values())
        if plain and len(name) <= LONGEST_NAME and not name.endswith("."):  # Windows drops a trailing dot
            return name
        return f"{stem}-{hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()[:8]}"


def parameters_of(path: Path) -> Parameters:
    """Reads the cell tagged `parameters`, which assigns literals, one name per statement. Raises BatchError."""
    try:
        cells = [cell for cell in json.loads(path.read_bytes())["cells"] if cell["cell_type"] == "code"]
        tagged = [cell["source"] for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BatchError(f"{path}: expected a notebook, could not read it: {error!r}") from None
    parameters: Parameters = {}
    try:
        for statement in ast.parse("".join(next(iter(tagged), ""))).body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value):
                    parameters[name] = (ast.unparse(kind), ast.literal_eval(value))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    parameters[name] = (type(ast.literal_eval(value)).__name__, ast.literal_eval(value))
                case _:
                    raise ValueError(f"line {statement.lineno} is something else")
    except (SyntaxError, ValueError) as error:
        rule = "the cell tagged `parameters` must hold assignments of literals, one name each"
        raise BatchError(f"{path}: {rule}: {error}") from None
    return parameters


def plan(paths: Sequence[Path], settings: Sequence[str]) -> list[NotebookRun]:
    """Every notebook with every combination of the settings, notebooks outermost, in the given order.

    Wildcards in a path are expanded, because some shells (Windows) do not, unless a file has exactly that name. Raises
    BatchError if a path matches nothing, a setting is malformed, one of the notebooks does not have its name, or a
    value does not have the parameter's type."""
    found: list[Path] = []
    for path in paths:
        exact = path.exists() or not glob.has_magic(str(path))
        matches = [path] if exact else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise BatchError(f"{path}: expected notebooks of this pattern, found none")
        found += matches
    if not found or len({path.stem for path in found}) != len(found):
        raise BatchError(f"expected one or more notebooks of different names, found {[str(path) for path in found]}")
    split = _split_settings(settings)
    runs = []
    for path in found:
        known = parameters_of(path)
        axes = {name: [_typed(path, known, name, text) for text in texts] for name, texts in split.items()}
        for name, values in axes.items():
            if len(set(values)) != len(values):
                raise BatchError(f"--set {name}: the same value is given twice: {split[name]}")
        chosen = itertools.product(*axes.values())
        runs += [NotebookRun(path, known, dict(zip(axes, values, strict=True))) for values in chosen]
    return runs


def _split_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    split: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals or not name.isidentifier():
            raise BatchError(f"--set {setting}: expected NAME=value or NAME=value,value")
        if name in split:
            raise BatchError(f"--set {name} is given twice: put all its values in one, separated by commas")
        try:
            rows = csv.reader([values], strict=True, skipinitialspace=True)
            split[name] = next(rows, None) or [""]  # NAME= means one empty value
        except csv.Error as error:
            raise BatchError(f'--set {setting}: {error}; quote a value as NAME="a, b","c"') from None
    return split


def _typed(path: Path, known: Parameters, name: str, text: str) -> Any:
    if name == RUN_DIR:
        raise BatchError(f"--set {RUN_DIR}: the runner sets it, one folder per run; --out says where they go")
    if name not in known:
        names = ", ".join(sorted(set(known) - {RUN_DIR})) or "none"
        raise BatchError(f"--set {name}: {path} has no such parameter; it has: {names}")
    kind = known[name][0]
    if kind not in TYPES:
        raise BatchError(f"--set {name}: its type in {path} is {kind}; only {', '.join(TYPES)} can be set")
    try:
        value = {"true": True, "false": False}[text.strip().lower()] if kind == "bool" else TYPES[kind](text)
        if kind != "float" or math.isfinite(value):
            return value
    except (KeyError, ValueError):
        pass
    expected = {"bool": "true or false", "int": "a whole number", "float": "a finite number"}[kind]
    raise BatchError(f"--set {name}: expected {expected}, found {text!r}")


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK", help="run in the order given")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=a,b,c", help="values of a parameter")
    parser.add_argument("--out", type=Path, default=Path("outputs/runs"), help="where runs go (default: %(default)s)")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="copy runs without --set here, to be read")


def main(arguments: argparse.Namespace) -> int:
    """Runs all combinations; returns 1 if a run failed, else 0. For bad input, raises BatchError before any run."""
    runs, out = plan(arguments.notebooks, arguments.set), arguments.out
    if arguments.publish and arguments.set:
        raise BatchError("--publish keeps the runs of the notebooks' own parameters: leave out --set")
    machine, named = environment(), {"ok": [], "skipped": [], "error": []}
    for number, run in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {run.name}", end="  ", flush=True)
        metrics = execute(run, out, machine)
        named[metrics["status"]].append(run.name)
        line = f"{metrics['status']}  {metrics['duration_s']:.1f} s"
        if metrics["status"] != "ok":
            line += f"  {metrics['ename']}: {str(metrics['evalue']).partition(chr(10))[0][:200]}"
        print(line, flush=True)
    left_out = f", {len(named['skipped'])} skipped" if named["skipped"] else ""
    print(f"{len(named['ok'])} of {len(runs)} runs succeeded{left_out}; folders in {out}")
    if arguments.publish:
        for name in named["ok"]:  # creates all folders first, because the copies link to one another
            (arguments.publish / name).mkdir(parents=True, exist_ok=True)
        for name in named["ok"]:
            publish(out / name, arguments.publish / name)
    for name in named["error"]:
        print(f"failed: {out / name / 'executed.ipynb'}", file=sys.stderr)
    return 1 if named["error"] else 0


def execute(run: NotebookRun, out: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Executes one run into `out / run.name`, replacing an earlier one, and returns its metrics. A notebook that fails
    does not raise: the metrics record the error."""
    folder = out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "environment.json", machine)
    defaults = {name: default for name, (_, default) in run.known.items() if name != RUN_DIR}
    about = {"notebook": run.path.stem, "parameters": {**defaults, **run.parameters}}
    write_json(folder / "parameters.json", about)
    logging.getLogger("papermill").setLevel(logging.ERROR)  # hides warnings about parameters, which `plan` has checked
    cwd = run.path.parent.resolve()  # as in JupyterLab, a notebook runs in its own folder
    parameters = dict(run.parameters)
    if RUN_DIR in run.known:
        parameters[RUN_DIR] = os.path.relpath(folder.resolve(), cwd)  # relative, so that no machine path is recorded
    start_s, outcome = time.perf_counter(), {"status": "ok"}
    try:
        papermill.execute_notebook(
            str(run.path).replace("{", "{{").replace("}", "}}"),  # papermill applies str.format to paths
            str(folder / "executed.ipynb").replace("{", "{{").replace("}", "}}"),
            parameters,
            kernel_name="python3",
            language="python",
            cwd=cwd,
            progress_bar=False,
            execution_timeout=CELL_LIMIT_S,
            kernel_manager_class=ThisInterpreter,
        )
    except papermill.PapermillExecutionError as error:
        status = "skipped" if error.ename == PackageMissing.__name__ else "error"
        outcome = {"status": status, "ename": error.ename, "evalue": error.evalue, "cell": error.exec_count or 0}
    except Exception as error:  # a dead kernel, a timeout, a notebook that papermill cannot read: recorded as well
        outcome = {"status": "error", "ename": type(error).__name__, "evalue": str(error), "cell": 0}
    return record(folder, duration_s=round(time.perf_counter() - start_s, 3), **outcome)


class ThisInterpreter(AsyncKernelManager):
    """A kernel manager that always uses ipykernel of the running interpreter, whatever kernels are installed."""

    kernel_spec = KernelSpec(**get_kernel_dict() | {"env": python_path()})

    @traitlets.default("transport_encryption")
    def _encrypt_where_possible(self) -> str:
        return "auto" if zmq.has("curve") else "disabled"


def publish(run: Path, target: Path) -> Path:
    """Replaces the folder `target` by a copy of a run that can be read where the repository is browsed: JSON files,
    PICTURES, sounds as MP3, and the executed notebook. In it, audio elements become links to the MP3 files, and links
    to other notebooks lead to their copies next to `target`, or else in the folder above.

    Returns `target`. Raises BatchError if there is no executed notebook, MkttsError if a sound cannot be read."""
    executed = run / "executed.ipynb"
    if not executed.is_file():
        raise BatchError(f"{run}: expected the folder of a run, found no executed.ipynb in it")
    notebook = nbformat.read(executed, as_version=4)
    sounds: dict[str, None] = {}

    def linked(found: re.Match[str]) -> str:
        name = html.unescape(found[1])
        sounds[name] = None
        link = html.escape(Path(name).with_suffix(".mp3").name)
        return f'<a href="{link}">{link}</a>'

    def beside(found: re.Match[str]) -> str:
        folder = next((f for f in (target.parent, target.parent.parent) if (f / found[1]).is_dir()), target.parent)
        return f"]({Path(os.path.relpath(folder / found[1], target)).as_posix()}/{executed.name})"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(beside, cell.source)
        for output in cell.get("outputs", []):
            if _WIDGET in output.get("data", {}):
                output["data"] = {"text/plain": CONTROLS}
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] = _IFRAME.sub(PAGE, _AUDIO.sub(linked, output["data"]["text/html"]))
    for name in ("widgets", "papermill"):  # the state of widgets, which are no longer active; paths of this machine
        notebook.metadata.pop(name, None)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(run.iterdir()):
        if path.suffix == ".json" or f"{run.name}/{path.name}" in PICTURES:
            shutil.copyfile(path, target / path.name)
    for name in sounds:
        write_whole(target / Path(name).with_suffix(".mp3"), as_mp3(run / name))
    write_whole(target / executed.name, nbformat.writes(notebook).encode())
    return target
