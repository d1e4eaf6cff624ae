"""`python -m mktts run`: notebooks run headless through papermill, one folder per run, collected into one table.

A run happens in `<out>/.partial/<name>` and takes its final place when it is over, so a folder under its final name,
which tells the values that were set, is always whole. It holds executed.ipynb, parameters.json, environment.json,
metrics.json and the files the notebook wrote. metrics.json is whatever the notebook recorded, plus duration_s, status
(ok, error, or skipped where it needs a package that has no wheel for this system) and, unless ok, ename, evalue, cell.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mktts.common import python_path, read_object, write_json
from mktts.errors import BatchError, PackageMissing
from mktts.measure.environment import environment
from mktts.measure.metrics import record
from mktts.notebook.grid import PARTIAL, RUN_DIR, Run, plan
from mktts.notebook.publish import publish
from mktts.notebook.ray_runs import cluster, execute_all

PACKAGES = ("ipykernel", "pandas", "papermill", "pyarrow", "tqdm")  # that a run needs from its first to its last step
_RESTORE = "; delete the folder of this run, or restore it"
EXAMPLES = """examples:
  python -m mktts run notebooks/*.ipynb
  python -m mktts run notebooks/04_metrics.ipynb --set SEED=1,2,3 --set CHECKPOINT=random:tiny,random:0.6b
  python -m mktts run notebooks/03_streaming.ipynb --set 'TEXT="Yes, please.","No."'
  python -m mktts run notebooks/*.ipynb --resume --publish outputs/reference
  python -m mktts run notebooks/04_metrics.ipynb --set SEED=1,2,3,4 --ray

Values are separated by commas and take the type of the notebook's parameter; several --set make every combination.
A value with a comma goes in double quotes, a double quote inside those is doubled. A name that any one of the
notebooks does not have is refused before anything runs. Exit status: 0, or 1 where a run failed, or 2 on bad input."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK", help="run in the order given")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=a,b,c", help="values of a parameter")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/runs"), help="folder of run folders (default: %(default)s)"
    )
    parser.add_argument("--collect", type=Path, metavar="FILE", help="table of all runs (default: beside OUT)")
    parser.add_argument(
        "--publish", type=Path, metavar="DIR", help="copy runs without --set here, to be read: sound becomes links"
    )
    parser.add_argument("--ray", action="store_true", help="runs of one notebook side by side, one a GPU (or CPU)")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="of a cluster (default: this machine)")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="skip runs that succeeded with the same notebook before")
    again.add_argument("--fresh", action="store_true", help="run everything again (the default)")
    parser.add_argument(
        "--timeout", type=int, default=1_800, metavar="S", help="seconds per cell (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs the grid; 0 if every run succeeded, else 1. Raises BatchError before anything runs on bad input."""
    runs = plan(arguments.notebooks, arguments.set)
    if arguments.timeout <= 0:
        raise BatchError(f"--timeout must be at least 1 second, found {arguments.timeout}")
    if arguments.publish and arguments.set:
        raise BatchError("--publish keeps the runs of the notebooks' own parameters: expected no --set beside it")
    if arguments.ray_address and not arguments.ray:
        raise BatchError("--ray-address is an option of --ray, which is missing")
    _require_packages()
    from tqdm import tqdm

    out = arguments.out
    table = arguments.collect or out.parent / "metrics.parquet"
    failed, skipped = [], []
    numbers = {run.name: number for number, run in enumerate(runs, 1)}
    before = [run for run in runs if arguments.resume and is_done(out, run)]
    with (
        cluster(arguments.ray_address) if arguments.ray else contextlib.nullcontext() as ray,
        tqdm(total=sum(run.notebook.code_cells for run in runs), unit="cell", dynamic_ncols=True) as bar,
    ):

        def say(run: Run, line: str, cells: int) -> None:
            bar.update(cells)
            bar.write(f"[{numbers[run.name]}/{len(runs)}] {run.name}  {line}", file=sys.stdout)

        for run in before:
            say(run, "done before", run.notebook.code_cells)
        left = [run for run in runs if run not in before]
        for run, metrics, cells in _outcomes(left, out, arguments.timeout, ray, bar):
            collect(out, table)  # after every run, so that a later notebook of the same call can read it
            line = f"{metrics['status']}  {metrics['duration_s']:.1f} s"
            if metrics["status"] != "ok":
                (skipped if metrics["status"] == "skipped" else failed).append(run.name)
                line += f"  {metrics['ename']}: {str(metrics['evalue']).partition(chr(10))[0][:200]}"
            say(run, line, run.notebook.code_cells - cells)
    collect(out, table)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    succeeded = len(runs) - len(failed) - len(skipped)
    print(f"{succeeded} of {len(runs)} runs succeeded{left_out}; folders in {out}, table in {table}")
    if arguments.publish:
        for run in runs:
            if run.name not in (*failed, *skipped):
                publish(out / run.name, arguments.publish / run.name)
    for name in failed:
        print(f"failed: {out / name / 'executed.ipynb'}", file=sys.stderr)
    return 1 if failed else 0


def _outcomes(
    runs: list[Run], out: Path, timeout_s: int, ray: Any, bar: Any
) -> Iterator[tuple[Run, dict[str, Any], int]]:
    """Executes the runs, here where `ray` is None: each with its metrics and how many cells `bar` has counted of it."""
    if ray is not None:
        for run, metrics in execute_all(ray, runs, out, timeout_s, execute):
            yield run, metrics, 0
        return
    machine = environment()
    for run in runs:
        bar.set_description(run.name)
        cells_before = bar.n
        metrics = execute(run, out, machine, timeout_s, lambda **_: bar.update(1))
        yield run, metrics, bar.n - cells_before


def is_done(out: Path, run: Run) -> bool:
    """Whether `run` has succeeded before, with the notebook and the values as they are now."""
    try:
        metrics, parameters = (
            read_object(out / run.name / f"{name}.json", BatchError, _RESTORE) for name in ("metrics", "parameters")
        )
    except BatchError:
        return False
    same = (parameters.get("notebook_sha256"), parameters.get("set")) == (run.notebook.sha256, run.parameters)
    return metrics.get("status") == "ok" and same


def execute(run: Run, out: Path, machine: dict[str, Any], timeout_s: int, on_cell: Any = None) -> dict[str, Any]:
    """Executes one run into `out / run.name`, replacing what was there; returns its metrics. Never raises on a
    failing notebook: that is recorded."""
    final, partial = out / run.name, out / PARTIAL / run.name
    shutil.rmtree(partial, ignore_errors=True)
    _make(partial)
    write_json(partial / "environment.json", machine)
    write_json(
        partial / "parameters.json",
        {
            "notebook": run.notebook.path.stem,
            "notebook_sha256": run.notebook.sha256,
            "parameters": run.all_parameters,
            "set": run.parameters,
        },
    )
    start_s = time.perf_counter()
    outcome = _papermill(run, partial, timeout_s, on_cell)
    metrics = record(partial, duration_s=round(time.perf_counter() - start_s, 3), **outcome)
    _name_final_folder(partial / "executed.ipynb", partial, final, run.notebook.path.parent)
    previous = out / PARTIAL / f"{run.name}.previous"
    shutil.rmtree(previous, ignore_errors=True)
    if final.exists():
        os.replace(final, previous)
    os.replace(partial, final)
    shutil.rmtree(previous, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: another run is on its way
        (out / PARTIAL).rmdir()
    return metrics


def _make(folder: Path) -> None:
    """Also while a run beside this one, which has just ended, takes away the empty folder above."""
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True)


def collect(out: Path, table: Path) -> None:
    """Writes one row per run folder in `out` to `table` (Parquet, replaced atomically).

    Columns: run, notebook, every metric under its own name, `param.NAME` and `env.NAME`. A metric or parameter that
    has several types over the runs becomes text.
    """
    import pandas

    rows = []
    for folder in sorted(path.parent for path in out.glob("*/parameters.json")):
        about, metrics, machine = (
            read_object(folder / f"{name}.json", BatchError, _RESTORE)
            for name in ("parameters", "metrics", "environment")
        )
        row = {"run": folder.name, "notebook": about["notebook"], **metrics}
        row |= {f"param.{name}": value for name, value in about["parameters"].items()}
        row |= {f"env.{name}": value for name, value in machine.items()}
        rows.append(row)
    frame = pandas.DataFrame(rows)
    for column in frame.columns:
        kinds = {bool if isinstance(v, bool) else str if isinstance(v, str) else float for v in frame[column].dropna()}
        if len(kinds) > 1 or any(isinstance(value, (list, dict, tuple)) for value in frame[column]):
            frame[column] = [None if value is None or value != value else str(value) for value in frame[column]]
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_name(f".{table.name}.{os.getpid()}")
    try:
        frame.convert_dtypes().to_parquet(temporary, index=False)
        os.replace(temporary, table)
    finally:
        temporary.unlink(missing_ok=True)


def _papermill(run: Run, folder: Path, timeout_s: int, on_cell: Any) -> dict[str, Any]:
    """Executes the notebook into `folder`; returns status, and ename, evalue and cell of a failure."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)  # its warnings guess at parameters; `plan` has checked them
    cwd = run.notebook.path.parent.resolve()  # as in JupyterLab: a notebook runs in its own folder
    parameters = dict(run.parameters)
    if RUN_DIR in run.notebook.parameters:
        parameters[RUN_DIR] = os.path.relpath(folder.resolve(), cwd)  # relative: no machine path in what is kept
    try:
        papermill.execute_notebook(
            str(run.notebook.path).replace("{", "{{").replace("}", "}}"),  # papermill formats the paths it is given
            str(folder / "executed.ipynb").replace("{", "{{").replace("}", "}}"),
            parameters,
            kernel_name="python3",
            language="python",
            cwd=cwd,
            progress_bar=False,
            execution_timeout=timeout_s,
            kernel_manager_class=_this_interpreter(),
            on_cell_executed=on_cell,
        )
    except papermill.PapermillExecutionError as error:
        status = "skipped" if error.ename == PackageMissing.__name__ else "error"
        return {"status": status, "ename": error.ename, "evalue": error.evalue, "cell": error.exec_count or 0}
    except Exception as error:  # a dead kernel, a timeout, a notebook papermill cannot read: recorded like the above
        return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "cell": 0}
    return {"status": "ok"}


def _this_interpreter() -> type:
    """A kernel manager whose only kernel is ipykernel of the running interpreter, whatever kernels are installed."""
    import zmq
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from traitlets import default

    class ThisInterpreter(AsyncKernelManager):
        @default("transport_encryption")
        def _encrypt_where_possible(self) -> str:
            return "auto" if zmq.has("curve") else "disabled"

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            encrypted = {"supported_encryption": ["curve"]}  # what ipykernel's own kernelspec says
            return KernelSpec(
                argv=argv, display_name="Python 3", language="python", env=python_path(), metadata=encrypted
            )

    return ThisInterpreter


def _name_final_folder(notebook: Path, partial: Path, final: Path, cwd: Path) -> None:
    """Replaces the temporary folder's path by the final one in the executed notebook, where RUN_DIR was printed."""
    if not notebook.exists():
        return
    text = notebook.read_text(encoding="utf-8")
    for name in (lambda p: os.path.relpath(p.resolve(), cwd.resolve()), lambda p: str(p.resolve()), str):
        text = text.replace(json.dumps(name(partial))[1:-1], json.dumps(name(final))[1:-1])
    temporary = notebook.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, notebook)


def _require_packages() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise BatchError(f"running notebooks needs {', '.join(missing)}, which is not installed: make setup")
