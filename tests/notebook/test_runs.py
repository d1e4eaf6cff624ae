"""Grids of notebook runs, on small notebooks written here and executed for real."""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from absent import python_without
from commands import run

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import read_json
from mktts.errors import BatchError
from mktts.measure.metrics import record
from mktts.notebook import records, runs
from mktts.spec import SAMPLE_RATE_HZ

PARAMETERS = """\
TEXT: str = "a=b # not a comment"  # what to say
SEED: int = 0
SCALE: float = 1.0
FLAG: bool = False
SHAPE: tuple = (1, 2)
PLAIN = 3
RUN_DIR: str = ""
"""


def notebook(path: Path, *cells: str, parameters: str = PARAMETERS) -> Path:
    nodes = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    nodes += [nbformat.v4.new_code_cell(source) for source in cells]
    nodes.append(nbformat.v4.new_markdown_cell("After this: [02_weights](02_weights.ipynb), [h](03_h.ipynb)"))
    nbformat.write(nbformat.v4.new_notebook(cells=nodes), path)
    return path


@pytest.mark.parametrize(
    ("settings", "names", "values"),
    [
        ([], ["n"], [{}]),
        (["TEXT="], ["n-TEXT="], [{"TEXT": ""}]),
        (["SEED=1", "SCALE=0.5"], ["n-SEED=1-SCALE=0.5"], [{"SEED": 1, "SCALE": 0.5}]),
        (['TEXT=random:a,"1,1,2"'], ["n-TEXT=random~a", "n-TEXT=1,1,2"], [{"TEXT": "random:a"}, {"TEXT": "1,1,2"}]),
        (['TEXT="Yes, please.","He said ""no""."'], None, [{"TEXT": "Yes, please."}, {"TEXT": 'He said "no".'}]),
        (
            ["SEED=1,2", "FLAG=true,False"],
            [f"n-SEED={seed}-FLAG={flag}" for seed in (1, 2) for flag in (True, False)],
            [{"SEED": seed, "FLAG": flag} for seed in (1, 2) for flag in (True, False)],
        ),
    ],
)
def test_a_grid_is_every_combination_typed_in_order_and_named_by_its_values(tmp_path, settings, names, values):
    planned = runs.plan([notebook(tmp_path / "n.ipynb")], settings)
    assert [run.parameters for run in planned] == values
    assert all(isinstance(run.parameters.get("FLAG", True), bool) for run in planned)
    assert names is None or [run.name for run in planned] == names


def test_every_run_has_a_name_that_any_file_system_takes(tmp_path):
    hard = ["a/b", "a\\b", "a:b", "a~b", "a b", "a_b", "..", "Yes.", "Yes", "x" * 300, "x" * 299 + "y", "", "ü?*<>|"]
    values = [{"TEXT": text, **seed} for text in hard for seed in ({}, {"SEED": 1}, {"SEED": 2})]
    names = [runs.NotebookRun(tmp_path / "n.ipynb", {}, given).name for given in values]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"n-[A-Za-z0-9._,+~=-]{1,98}", name) and not name.endswith("."), name


def test_a_pattern_that_the_shell_left_alone_is_expanded_in_order(tmp_path):
    for name in ("b.ipynb", "a.ipynb"):
        notebook(tmp_path / name)
    assert [run.name for run in runs.plan([tmp_path / "*.ipynb"], [])] == ["a", "b"]
    with pytest.raises(BatchError, match=r"x\*\.ipynb: expected notebooks of this pattern, found none"):
        runs.plan([tmp_path / "x*.ipynb"], [])
    literal = notebook(tmp_path / "a[1].ipynb")
    assert [run.path for run in runs.plan([literal], [])] == [literal]


BAD_SETTINGS = (
    ("SPEED=1", r"SPEED.*n\.ipynb has no such parameter.*FLAG, PLAIN, SCALE, SEED"),
    ("SEED=", "SEED.*whole number.*''"),
    ("SEED=1.5", "SEED.*whole number.*1.5"),
    ("PLAIN=x", "PLAIN.*whole number"),
    ("FLAG=1", "FLAG.*true or false"),
    ("SCALE=nan", "SCALE.*finite"),
    ("SHAPE=1", "SHAPE.*tuple.*only int"),
    ("SEED=1,2,1", "SEED.*twice"),
    ("SEED", "NAME=value"),
    ('TEXT="open', "quote"),
    ("RUN_DIR=x", "RUN_DIR.*runner"),
)


def test_a_bad_setting_and_what_is_no_notebook_are_refused_by_name_before_anything_runs(tmp_path):
    other = notebook(tmp_path / "a.ipynb", parameters=PARAMETERS + "SPEED: int = 1")  # one of two does not know it
    path = notebook(tmp_path / "n.ipynb", "open('ran', 'w')")
    for setting, message in BAD_SETTINGS:
        with pytest.raises(BatchError, match=message):
            run("run", other, path, "--set", setting, "--out", tmp_path / "runs")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()
    for text in ("", "{}", "[1]", '{"cells": 3}'):
        path.write_text(text)
        with pytest.raises(BatchError, match=r"n\.ipynb: expected a notebook"):
            runs.plan([path], [])
    with pytest.raises(BatchError, match="literals"):
        runs.plan([notebook(path, parameters="A: int = len('x')")], [])


CELL = """\
import os
if SEED == 3: os._exit(1)
assert SEED != 2, "two is refused"
from mktts.errors import PackageMissing
if SEED == 4: raise PackageMissing("hearing needs pocketsphinx")
import ipywidgets
import numpy as np
from IPython.display import IFrame, display
from mktts.measure.metrics import record
from mktts.notebook import nb
folder = nb.run_dir(RUN_DIR, "n")
record(folder, seed_squared=SEED**2)
print(RUN_DIR)
nb.clip(np.full(24_000, 0.25, np.float32), "a & b", folder, random_weights=True)
(folder / "plot.png").write_bytes(b"{}")
display(IFrame("http://127.0.0.1:1/?key=secret", 100, 100, extras=['a="b"']), ipywidgets.Button())
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Four runs in kernels, which cost seconds each: one succeeds, one fails, one dies, one needs what is not there."""
    home = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(home)
        Path("books").mkdir()
        path = notebook(Path("books/n.ipynb"), CELL)
        planned = runs.plan([path], ["SEED=1,2,3,4"])
        stale = home / "outputs/runs" / planned[2].name / "stale.txt"
        stale.parent.mkdir(parents=True)
        stale.touch()
        (killed := home / "outputs/runs/n-SEED=9").mkdir()
        for name in ("parameters", "metrics", "environment"):
            (killed / f"{name}.json").write_text("{}")
        status = run("run", path, "--set", "SEED=1,2,3,4", "--out", Path("outputs/runs"))
    return SimpleNamespace(home=home, path=path, status=status, runs=planned, stale=stale, printed=printed.getvalue())


def test_a_grid_records_each_run_and_goes_on_after_a_failure(grid):
    out = grid.home / "outputs/runs"
    assert grid.status == 1 and "1 of 4 runs succeeded, 1 skipped" in grid.printed
    assert set(os.listdir(out)) == {"n-SEED=9", *(r.name for r in grid.runs)} and not grid.stale.exists()
    found = [read_json(out / r.name / "metrics.json") for r in grid.runs]
    assert [one["status"] for one in found] == ["ok", "error", "error", "skipped"]
    assert found[0]["seed_squared"] == 1
    assert [one["ename"] for one in found[1:]] == ["AssertionError", "DeadKernelError", "PackageMissing"]
    assert found[1]["evalue"] == "two is refused" and "hearing needs pocketsphinx" in found[3]["evalue"]
    assert "PackageMissing: hearing needs pocketsphinx" in grid.printed
    ok = out / grid.runs[0].name
    assert {"executed.ipynb", "parameters.json", "environment.json", "metrics.json", "a_b.wav"} <= set(os.listdir(ok))
    assert read_json(ok / "parameters.json")["parameters"]["TEXT"] == "a=b # not a comment"  # a default
    executed = (ok / "executed.ipynb").read_text()
    assert str(grid.home) not in executed and f"../outputs/runs/{ok.name}" in executed
    record(out / "n-manual-2", seed_squared=9)
    rows = {row.pop("run"): row for row in records.runs(out)}
    assert rows.pop("n-manual-2") == {"notebook": "n", "status": "ok", "seed_squared": 9}
    assert set(rows) == {r.name for r in grid.runs}  # none of the run that was killed
    assert rows[ok.name]["seed_squared"] == rows[ok.name]["param.SEED"] == 1
    assert rows[grid.runs[1].name]["status"] == "error" and all(row["env.python"] for row in rows.values())


def test_a_published_run_has_links_to_sound_and_no_page_of_a_dead_process(grid, tmp_path, monkeypatch):
    soundfile = pytest.importorskip("soundfile")
    done, target = grid.home / "outputs/runs" / grid.runs[0].name, tmp_path / "h200" / "n"
    target.mkdir(parents=True)
    (tmp_path / "02_weights").mkdir()
    (target / "stale.png").touch()
    monkeypatch.setattr(runs, "PICTURES", (f"{done.name}/plot.png",))
    runs.publish(done, target)
    names = {"executed.ipynb", "metrics.json", "parameters.json", "environment.json", "a_b.mp3", "plot.png"}
    assert {path.name for path in target.iterdir()} == names
    text = (target / "executed.ipynb").read_text(encoding="utf-8")
    assert "base64" not in text and "<audio" not in text and 'href=\\"a_b.mp3\\"' in text and RANDOM_WEIGHTS in text
    assert "[02_weights](../../02_weights/executed.ipynb), [h](../03_h/executed.ipynb)" in text
    published = json.loads(text)
    shown = json.dumps([cell.get("outputs") for cell in published["cells"]])
    assert "secret" not in shown and "widget-view" not in shown and "papermill" not in published["metadata"]
    nbformat.validate(nbformat.reads(text, as_version=4))
    samples, rate_hz = soundfile.read(io.BytesIO((target / "a_b.mp3").read_bytes()))
    assert rate_hz == SAMPLE_RATE_HZ and np.median(samples[2_000:20_000]) == pytest.approx(0.25, abs=0.05)
    with pytest.raises(BatchError, match="no executed.ipynb"):
        runs.publish(tmp_path / "empty", target)
    assert (target / "a_b.mp3").exists()


def test_a_missing_package_is_named_before_anything_runs(tmp_path):
    path = notebook(tmp_path / "n.ipynb")
    words = ["run", str(path), "--out", str(tmp_path / "runs")]
    done = python_without(["papermill"], f"from mktts.cli import main; raise SystemExit(main({words}))")
    assert done.returncode == 2 and "mktts: this needs the package papermill" in done.stderr
    assert not (tmp_path / "runs").exists()
