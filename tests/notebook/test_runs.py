"""Grids of notebook runs, executed for real; what is on record of runs, and the site of executed notebooks."""

import base64
import io
import json
import os
import re
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from absent import needs, python_without
from commands import run
from load_document import load_file
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from mktts.audio import write_audio
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.cli import main
from mktts.common import read_json, write_json
from mktts.errors import BatchError, MetricsError
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


def notebook(path: Path, *cells: str, parameters: str = PARAMETERS) -> Path:
    nodes = [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    nodes += [new_code_cell(source) for source in cells]
    nodes.append(new_markdown_cell("After this: [02_weights](02_weights.ipynb), [h](03_h.ipynb)"))
    nbformat.write(new_notebook(cells=nodes), path)
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


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Four runs in kernels, which cost seconds each: one succeeds, one fails, one dies, one needs what is not there."""
    home = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
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
    assert [one["status"] for one in found] == ["ok", "error", "error", "skipped"] and found[0]["seed_squared"] == 1
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
    words = ["run", str(notebook(tmp_path / "n.ipynb")), "--out", str(tmp_path / "runs")]
    done = python_without(["papermill"], f"from mktts.cli import main; raise SystemExit(main({words}))")
    assert done.returncode == 2 and "mktts: this needs the package papermill" in done.stderr
    assert not (tmp_path / "runs").exists()


# ---- measurements on record: where a document comes from, and verdicts


def test_provenance_names_machine_day_revision_and_random_weights_whichever_way_a_document_keeps_them(tmp_path):
    about = {"device": "Some GPU", "date": "2026-01-02T03:04:05+00:00", "revision": "0123456789abcdef+changes"}
    line = "measured on Some GPU, 2026-01-02, at revision 01234567+changes, random weights"
    assert records.provenance({**about, "settings": {"random_weights": True}}) == line
    environment = {"gpu": "G", "date_utc": "2026-05-06T00", "git_revision": "f" * 40}
    assert records.provenance(environment) == "measured on G, 2026-05-06, at revision ffffffff"
    assert records.provenance(None) == ""
    merged = json.loads(load_file(tmp_path).read_text())  # of several runs
    assert records.provenance(merged) == "measured on NVIDIA H200, 2026-11-22, at revision abc"
    merged["points"][0] |= {"revision": "def+changes", "date": "2026-11-20T10", "random_weights": True}
    line = "measured on NVIDIA H200, 2026-11-20 to 2026-11-22, at revisions def, abc+changes, random weights"
    assert records.provenance(merged) == line
    assert records.provenance({"points": [], "figures": {}}) == "nothing measured yet"


def test_every_recorded_document_says_where_it_comes_from():
    paths = list(records.FOLDER.glob("*.json"))
    assert {"bench", "ladder"} <= {path.stem for path in paths}
    for path in paths:
        line = records.provenance(records.stored(path.stem))
        assert "measured on NVIDIA H200, 20" in line and "at revision" in line, path


def test_a_document_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
    assert records.stored("parity", tmp_path) is None
    with pytest.raises(MetricsError, match=r"parity\.json.*python -m mktts parity .* --output"):
        records.reference("parity", tmp_path)
    (tmp_path / "bench.json").write_text("{torn")
    with pytest.raises(MetricsError, match="could not read"):
        records.reference("bench", tmp_path)
    for name, command in records.COMMANDS.items():
        assert command.split()[-1] == "/".join([*records.FOLDER.parts[-3:], f"{name}.json"])


@pytest.mark.parametrize(("bound", "checked"), [({"equal": 2}, "= 2"), ({"at_most": 1}, None), ({"at_least": 3}, None)])
def test_a_figure_states_what_was_checked_of_it_or_is_none(bound, checked):
    with nullcontext() if checked else pytest.raises(MetricsError, match="wait: expected [≤≥] . ms, found 2"):
        assert records.figure("wait", 2, "ms", 1, "here", **bound)["checked"] == checked


def test_verdicts_of_many_runs_are_one_record_in_the_notebooks_order(tmp_path):
    figure = records.figure("frames", 3, "", 1, records.here(), equal=3)
    for stem in ("10_report", "01_one_frame", "01_one_frame-SEED=1", "02_weights-SEED=1", "h200"):
        (tmp_path / stem).mkdir()
        records.verdict(tmp_path / stem, "Why?", stem, [figure], "Once.")
    found = {"01_one_frame": "01_one_frame", "02_weights": "02_weights-SEED=1", "10_report": "10_report"}
    expected = {"question": "Why?", "figures": [figure], "limit": "Once."}
    assert records.verdicts(tmp_path) == [{"notebook": n, **expected, "answer": run} for n, run in found.items()]


# ---- the site: links, sound, figures, and nothing from elsewhere

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


def write_run(folder, question, html, prose, status="ok"):
    """A run's folder as `mktts run` leaves it: a notebook with a picture and `html` as outputs, and its verdict."""
    folder.mkdir(parents=True)
    outputs = [new_output("display_data", data=data) for data in ({"image/png": PNG}, {"text/html": html})]
    code = new_code_cell("print('not <prose>')", outputs=outputs)
    cells = [new_markdown_cell(f"# {folder.name[:2]} · {question}\n\n{prose}"), new_markdown_cell("## Listen"), code]
    nbformat.write(new_notebook(cells=cells), folder / "executed.ipynb")
    figure = {"name": "frames <made>", "value": 2 / 3, "unit": "ms", "n": 5, "machine": "2 cores", "checked": "≤ 1"}
    verdict = {"question": question, "answer": "Yes & no.", "figures": [figure], "limit": "none"}
    write_json(folder / "verdict.json", verdict)
    write_json(folder / "metrics.json", {"status": status})


@needs("nbconvert", "latex2mathml")
def test_two_executed_notebooks_become_a_site_that_needs_nothing_from_elsewhere(tmp_path, capsys):
    made, reference, out = tmp_path / "runs", tmp_path / "reference", tmp_path / "site"
    data = base64.b64encode(b"RIFF").decode()
    heard = f'<audio controls title="said.wav" src="data:audio/wav;base64,{data}"></audio>'
    heard += '<iframe src="http://127.0.0.1:1/?key=k"></iframe>'
    prose = r"After it: [05_next](05_next.ipynb), [file](../README.md). $\arg x_1$. ![A badge](https://elsewhere/b.svg)"
    write_run(made / "04_first", "Can it be heard?", heard, prose)
    write_audio(made / "04_first" / "said.wav", np.zeros(2_400, np.float32))
    (made / "04_first-SEED=1").mkdir()
    (made / "04_first-SEED=1" / "executed.ipynb").write_text("not read")
    write_run(made / "05_next", "How did it fail?", "", "", "error")
    link = '<a href="spoken.mp3">spoken.mp3</a>'
    write_run(reference / "05_next", "How fast?", link, "See [first](../04_first/executed.ipynb).\n\n$$y = x^2$$")
    (reference / "05_next" / "spoken.mp3").write_bytes(b"sound")
    write_run(reference / "04_first", "An older one?", "", "")
    write_run(reference / "h200" / "04_first", "Elsewhere?", "", "See [next](05_next.ipynb).")
    assert run("lab site", made, reference, "--out", out) == 0
    assert capsys.readouterr().out == f"3 notebooks: {out / 'index.html'}\n"
    texts = {path.name: path.read_text(encoding="utf-8") for path in out.glob("*.*")}
    pages = {name: text for name, text in texts.items() if name.endswith(".html")}
    assert set(pages) == {"index.html", "04_first.html", "04_first_h200.html", "05_next.html"}
    assert not re.search("https?:|//[a-z]+[.]|@import|url\\(", "".join(texts.values()))
    for name, text in pages.items():
        for address, anchor in re.findall(r'(?:href|src)="(?!data:)([^"#]*)(#[^"]*)?"', text):
            assert not address or (out / address).is_file(), (name, address)
            assert not anchor or f'id="{anchor[1:]}"' in pages[address or name], (name, anchor)

    first, following = pages["04_first.html"], pages["05_next.html"]
    assert "An older one?" not in first and PNG in first and "<math" in first and "arg</mo>" in first
    assert '<a href="05_next.html">05_next</a>, file.' in first and "A badge" in first
    assert '<a href="04_first.html">first</a>' in following
    assert '<a href="#listen">Listen</a>' in first and '<h2 id="listen">' in first
    along = [re.findall(r'rel="(\w+)"[^>]*>[← ]*(.+?)[→ ]*</a>', text) for text in (first, following)]
    assert along == [[("next", "04_first on H200")], [("prev", "04_first on H200")]]
    sounds = [re.search(r'<audio controls[^>]* src="([^"]*)"', text)[1] for text in (first, following)]
    assert sounds == ["files/04_first/said.mp3", "files/05_next/spoken.mp3"]
    assert (out / sounds[1]).read_bytes() == b"sound" and (out / sounds[0]).stat().st_size > 100

    rows = re.findall(r"<tr>(.*?)</tr>", pages["index.html"], re.DOTALL)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert [row for row in cells if row] == 3 * [["frames &lt;made&gt;", "0.667", "ms", "5", "≤ 1", "2 cores"]]
    index = pages["index.html"]
    assert index.count("Yes &amp; no.") == 6 and index.index("Can it be heard?") < index.index("How fast?")

    assert run("lab site", reference, "--out", out) == 0  # an older site is replaced
    assert "An older one?" in (out / "04_first.html").read_text(encoding="utf-8")


@needs("nbconvert", "latex2mathml")
def test_a_site_of_nothing_and_a_folder_of_something_else_are_refused(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    for expected in ("expected executed notebooks", "expected a folder that is empty"):
        assert main(["lab", "site", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
        assert expected in capsys.readouterr().err
        write_run(tmp_path / "runs" / f"04_{expected[9]}", "Can it be heard?", "", "")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
