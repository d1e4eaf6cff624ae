"""Grids of notebook runs, on small notebooks written here and executed for real."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from pathlib import Path

import nbformat
import pytest

from mktts.errors import BatchError
from mktts.notebook import grid, runs

PARAMETERS = """\
TEXT: str = "a=b # not a comment"  # what to say
SEED: int = 0
SCALE: float = 1.0
FLAG: bool = False
SHAPE: tuple = (1, 2)
PLAIN = 3
RUN_DIR: str = ""
"""


def notebook(path: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    nodes = [nbformat.v4.new_code_cell(source) for source in cells]
    if parameters is not None:
        nodes.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nbformat.write(nbformat.v4.new_notebook(cells=nodes), path)
    return path


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    runs.add_arguments(parser)
    return runs.main(parser.parse_args([str(word) for word in words]))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_parameters_have_the_annotated_type_and_the_literal_default(tmp_path):
    found = grid.read_notebook(notebook(tmp_path / "n.ipynb")).parameters
    assert found["TEXT"] == ("str", "a=b # not a comment")
    assert found["SHAPE"] == ("tuple", (1, 2))
    assert found["PLAIN"] == ("int", 3)


def test_grid_is_every_combination_typed_and_in_order(tmp_path):
    runs = grid.plan([notebook(tmp_path / "n.ipynb")], ["SEED=1,2", "FLAG=true,False", "SCALE=0.5"])
    assert [run.parameters for run in runs] == [
        {"SEED": seed, "FLAG": flag, "SCALE": 0.5} for seed in (1, 2) for flag in (True, False)
    ]
    assert all(isinstance(run.parameters["FLAG"], bool) for run in runs)
    assert len({run.name for run in runs}) == len(runs)


def test_quoted_values_keep_their_commas_and_quotes(tmp_path):
    runs = grid.plan([notebook(tmp_path / "n.ipynb")], ['TEXT="Yes, please.","He said ""no"".",plain'])
    assert [run.parameters["TEXT"] for run in runs] == ["Yes, please.", 'He said "no".', "plain"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "n"),
        (["SEED=1", "TEXT=small"], "n-SEED=1-TEXT=small"),
        (["TEXT=random:tiny"], "n-TEXT=random~tiny"),
        (['TEXT="1,1,2"'], "n-TEXT=1,1,2"),
        (["FLAG=true", "SCALE=0.5"], "n-FLAG=True-SCALE=0.5"),
    ],
)
def test_a_run_folders_name_tells_the_set_values(tmp_path, settings, name):
    (run,) = grid.plan([notebook(tmp_path / "n.ipynb")], settings)
    assert run.name == name


def test_every_run_has_a_name_that_any_file_system_takes(tmp_path):
    path = notebook(tmp_path / "n.ipynb")
    hard = ["a/b", "a\\b", "a:b", "a~b", "a b", "a_b", "..", "Yes.", "Yes", "x" * 300, "x" * 299 + "y", "", "ü?*<>|"]
    runs = [grid.Run(grid.read_notebook(path), {"TEXT": text, "SEED": seed}) for text in hard for seed in (1, 2)]
    runs += [grid.Run(grid.read_notebook(path), {"TEXT": text}) for text in hard]
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"n-[A-Za-z0-9._,+~=-]{1,98}", name) and not name.endswith("."), name


def test_a_pattern_that_the_shell_left_alone_is_expanded_in_order(tmp_path):
    for name in ("b.ipynb", "a.ipynb"):
        notebook(tmp_path / name)
    assert [run.name for run in grid.plan([tmp_path / "*.ipynb"], [])] == ["a", "b"]
    with pytest.raises(BatchError, match=r"x\*\.ipynb: expected notebooks of this pattern, found none"):
        grid.plan([tmp_path / "x*.ipynb"], [])
    literal = notebook(tmp_path / "a[1].ipynb")
    assert [run.notebook.path for run in grid.plan([literal], [])] == [literal]


def test_a_name_without_a_value_is_one_empty_value(tmp_path):
    (run,) = grid.plan([notebook(tmp_path / "n.ipynb")], ["TEXT="])
    assert run.parameters == {"TEXT": ""}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("SPEED=1", "SPEED.*no such parameter.*FLAG, PLAIN, SCALE, SEED"),
        ("SEED=", "SEED.*whole number.*''"),
        ("SEED=1.5", "SEED.*whole number.*1.5"),
        ("FLAG=1", "FLAG.*true or false"),
        ("SCALE=nan", "SCALE.*finite"),
        ("SHAPE=1", "SHAPE.*tuple.*only int"),
        ("SEED=1,2,1", "SEED.*twice"),
        ("SEED", "NAME=value"),
        ('TEXT="open', "quote"),
        ("RUN_DIR=x", "RUN_DIR.*runner"),
    ],
)
def test_bad_setting_is_refused_by_name_before_anything_runs(tmp_path, setting, message):
    path = notebook(tmp_path / "n.ipynb", "open('ran', 'w')")
    with pytest.raises(BatchError, match=message):
        run(path, "--set", setting, "--out", tmp_path / "runs")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()


def test_name_unknown_to_one_of_two_notebooks_is_refused(tmp_path):
    first, second = notebook(tmp_path / "a.ipynb"), notebook(tmp_path / "b.ipynb", parameters="OTHER: int = 1")
    with pytest.raises(BatchError, match=r"b\.ipynb has no such parameter; it has: OTHER"):
        grid.plan([first, second], ["SEED=1"])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cells": 3}'])
def test_file_that_is_no_notebook_is_refused(tmp_path, text):
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    with pytest.raises(BatchError, match=r"n\.ipynb: expected a notebook"):
        grid.plan([path], [])


def test_computed_parameter_is_refused(tmp_path):
    with pytest.raises(BatchError, match="literals"):
        grid.read_notebook(notebook(tmp_path / "n.ipynb", parameters="A: int = len('x')"))


RECORDS = (
    "from mktts.measure.metrics import record\nassert SEED != 2, 'two is refused'\n"
    "record(RUN_DIR, seed_squared=SEED**2)"
)


def test_grid_runs_record_continue_after_a_failure_resume_and_collect(tmp_path, monkeypatch, capsys):
    """One test, because each kernel costs seconds: three runs of which one fails, then a resumed call."""
    import pandas

    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    path = notebook(Path("books/n.ipynb"), RECORDS, "print(RUN_DIR)\nopen(f'{RUN_DIR}/note.txt', 'w').write('x')")
    out = Path("outputs/runs")
    calls = ["--set", "SEED=1,2,3", "--out", out]

    assert run(path, *calls) == 1
    runs = grid.plan([path], ["SEED=1,2,3"])
    ok, bad, last = (out / r.name for r in runs)
    assert sorted(os.listdir(out)) == sorted(r.name for r in runs)  # and no temporary folder
    for folder in (ok, bad, last):
        assert {"executed.ipynb", "parameters.json", "environment.json", "metrics.json"} <= set(os.listdir(folder))
    assert read(ok / "metrics.json")["status"] == "ok" and read(ok / "metrics.json")["seed_squared"] == 1
    assert read(last / "metrics.json")["seed_squared"] == 9  # the run after the failed one
    failure = read(bad / "metrics.json")
    assert (failure["status"], failure["ename"], failure["evalue"]) == ("error", "AssertionError", "two is refused")
    assert read(last / "parameters.json")["parameters"]["SEED"] == 3
    assert read(last / "parameters.json")["parameters"]["SCALE"] == 1.0  # defaults are recorded too
    assert (ok / "note.txt").exists() and not (bad / "note.txt").exists()
    executed = (ok / "executed.ipynb").read_text()
    assert ".partial" not in executed and str(tmp_path) not in executed and f"../outputs/runs/{ok.name}" in executed

    table = pandas.read_parquet("outputs/metrics.parquet").set_index("run")
    assert table.loc[last.name, "seed_squared"] == 9 and table.loc[last.name, "param.SEED"] == 3
    assert table.loc[bad.name, "status"] == "error" and pandas.isna(table.loc[bad.name, "seed_squared"])
    assert table["env.python"].notna().all()

    before = (ok / "metrics.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run(path, *calls, "--resume") == 1  # the failed run is tried again, the others are not
    assert (ok / "metrics.json").stat().st_mtime_ns == before
    assert capsys.readouterr().out.count("done before") == 2


def test_changed_notebook_is_not_taken_as_done(tmp_path):
    path = notebook(tmp_path / "n.ipynb")
    [planned] = grid.plan([path], [])
    folder = tmp_path / "runs" / planned.name
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text('{"status": "ok"}')
    (folder / "parameters.json").write_text(json.dumps({"notebook_sha256": planned.notebook.sha256, "set": {}}))
    assert runs.is_done(tmp_path / "runs", planned)
    (folder / "parameters.json").write_text(
        json.dumps({"notebook_sha256": planned.notebook.sha256, "set": {"SEED": 1}})
    )
    assert not runs.is_done(tmp_path / "runs", planned)  # the same name, other values
    [changed] = grid.plan([notebook(path, "1 + 1")], [])
    assert not runs.is_done(tmp_path / "runs", changed)


def test_rerun_replaces_the_folder_and_a_dead_kernel_is_recorded(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "import os; os._exit(1)", parameters=None)
    stale = tmp_path / "runs" / "n" / "stale.txt"
    stale.parent.mkdir(parents=True)
    stale.write_text("from an earlier run")
    [planned] = grid.plan([path], [])
    metrics = runs.execute(planned, tmp_path / "runs", {}, timeout_s=60)
    assert metrics["status"] == "error" and metrics["ename"] == "DeadKernelError"
    assert not stale.exists()
    assert read(stale.parent / "metrics.json") == metrics


@pytest.mark.parametrize("name", runs.PACKAGES)
def test_a_missing_package_is_named_before_anything_runs(tmp_path, monkeypatch, name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    with pytest.raises(BatchError, match=f"needs {name}"):
        run(notebook(tmp_path / "n.ipynb"), "--out", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_notebook_whose_package_has_no_wheel_here_is_skipped_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stops = "from mktts.errors import PackageMissing\nraise PackageMissing('hearing needs pocketsphinx')"
    assert run(notebook(tmp_path / "n.ipynb", stops), "--out", tmp_path / "runs") == 0
    printed = capsys.readouterr().out
    assert "PackageMissing: hearing needs pocketsphinx" in printed
    assert "0 of 1 runs succeeded, 1 skipped" in printed
    (metrics,) = tmp_path.glob("runs/*/metrics.json")
    assert json.loads(metrics.read_text())["status"] == "skipped"
