"""`run --ray`: the same folders, table and resumption as without, from tasks of a real Ray cluster on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from absent import mktts_without
from test_runs import notebook, run

from mktts.errors import BatchError
from mktts.notebook import grid

CELL = (
    "import os, time\nfrom pathlib import Path\nfrom mktts.measure.metrics import record\n"
    "assert SEED != 2, 'two is refused'\nif SEED == 3: os._exit(1)\n"
    "record(RUN_DIR, seed_squared=SEED**2, process=os.getppid())"
)


def test_without_ray_it_is_one_line_that_says_what_to_install(tmp_path):
    done = mktts_without(["ray"], "run", str(notebook(tmp_path / "n.ipynb")), "--out", str(tmp_path / "runs"), "--ray")
    assert done.returncode == 2 and done.stdout == ""
    assert 'pip install -e ".[ray]" in the checkout' in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_an_address_without_ray_is_refused(tmp_path):
    with pytest.raises(BatchError, match="--ray-address is an option of --ray"):
        run(notebook(tmp_path / "n.ipynb"), "--ray-address", "localhost:1")


@pytest.mark.slow
def test_a_grid_by_ray_leaves_what_a_grid_without_it_leaves(tmp_path, monkeypatch, capsys):
    import pandas

    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    path = notebook(Path("books/n.ipynb"), CELL)
    reader = notebook(
        Path("books/reader.ipynb"), "import pandas\nassert len(pandas.read_parquet('../o/metrics.parquet')) >= 4"
    )
    calls = ["--set", "SEED=1,2,3,4", "--out", Path("o/runs")]

    assert run(path, reader, *calls, "--ray") == 1
    names = {one.parameters["SEED"]: one.name for one in grid.plan([path], ["SEED=1,2,3,4"])}
    readers = [one.name for one in grid.plan([reader], ["SEED=1,2,3,4"])]
    assert sorted(os.listdir("o/runs")) == sorted([*names.values(), *readers])
    table = pandas.read_parquet("o/metrics.parquet").set_index("run")
    assert [table.loc[names[seed], "status"] for seed in (1, 2, 3, 4)] == ["ok", "error", "error", "ok"]
    assert table.loc[names[4], "seed_squared"] == 16 and table["env.python"].notna().all()
    assert (table.loc[readers, "status"] == "ok").all()  # each began when the runs before it were in the table
    processes = {json.loads((Path("o/runs") / names[seed] / "metrics.json").read_text())["process"] for seed in (1, 4)}
    assert os.getpid() not in processes  # kernels of tasks, not of this process
    assert str(tmp_path) not in (Path("o/runs") / names[1] / "executed.ipynb").read_text()

    kept = (Path("o/runs") / names[1] / "metrics.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run(path, *calls, "--ray", "--resume") == 1
    assert capsys.readouterr().out.count("done before") == 2  # the failed ones are tried again
    assert (Path("o/runs") / names[1] / "metrics.json").stat().st_mtime_ns == kept
