"""`run --ray`: runs of one notebook side by side as Ray tasks, each of them `mktts.notebook.runs.execute`.

A task works in the caller's folder, which every machine of the cluster must have under the same path. A notebook begins
when the runs of those before it are over, because it may read their table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mktts.common import python_path
from mktts.errors import BackendUnavailable, BatchError
from mktts.notebook.grid import Run
from mktts.synth.ray_cluster import connect

Metrics = dict[str, Any]


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """The module ray, connected to the cluster at `address`, or to one of this machine that ends with the context.

    Raises BackendUnavailable where Ray is not installed, BatchError where there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        import ray
    except ModuleNotFoundError:
        raise BackendUnavailable('--ray needs the package ray: pip install -e ".[ray]" in the checkout') from None
    try:
        connect(ray, address, runtime_env={"env_vars": python_path()})
    except (OSError, ValueError, RuntimeError) as error:
        where = f"no Ray cluster at {address}" if address else "Ray did not start here"
        raise BatchError(f"{where}: {str(error).strip().partition(chr(10))[0]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def execute_all(
    ray: Any, runs: Sequence[Run], out: Path, timeout_s: int, execute: Callable[..., Metrics]
) -> Iterator[tuple[Run, Metrics]]:
    """Every run with its metrics, as they end. A task whose process dies is a run that failed.

    execute: `mktts.notebook.runs.execute`. A run gets a GPU of its own where the cluster has any, otherwise one CPU.
    """
    needs = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    task = ray.remote(_in_folder).options(max_retries=0, **needs)
    for _, group in itertools.groupby(runs, key=lambda run: run.notebook.path):
        waiting = {task.remote(execute, os.getcwd(), run, out, timeout_s): run for run in group}
        while waiting:
            (done,), _ = ray.wait([*waiting])
            run = waiting.pop(done)
            try:
                metrics = ray.get(done)
            except Exception as error:  # its process was killed, or what cannot be written
                lines = str(error).strip().splitlines() or [""]
                metrics = {"status": "error", "ename": type(error).__name__, "evalue": lines[-1], "duration_s": 0.0}
            yield run, metrics


def _in_folder(execute: Callable[..., Metrics], folder: str, run: Run, out: Path, timeout_s: int) -> Metrics:
    """In a process of Ray. Paths stay relative, so that what is kept names no machine's folders."""
    from mktts.measure.environment import environment

    os.chdir(folder)
    return execute(run, out, environment(), timeout_s)
