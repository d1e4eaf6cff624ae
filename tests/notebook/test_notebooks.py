"""The notebooks: how they are written, and that the cells of each run from small parameters and record.

They run in this process, which has imported what a kernel imports for seconds; test_runs executes others in kernels."""

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from load_document import load_file
from traces import document_of

from mktts.errors import MkttsError
from mktts.notebook import plots, records, runs

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COMPILING = re.compile(r"mktts: (?:compiling|loading) .*? \.\.\. [\d.]+ s\n")  # once a cache, and not a warning
PAGE_CHARS = 110  # of JupyterLab's column at its usual size
STREAMS = {"stream", "astream", "open", "play"}  # calls that give audio while it is made
MAX_COLUMNS = 6  # of a table
SMALL = {  # settings, what is recorded that others read
    "00_machine": ("", "missing"),
    "01_one_frame": ("CHECKPOINT=random:tiny MAX_FRAMES=3 LAYOUT=streaming TEXT='One two.'", "frames_equal"),
    "02_weights": ("SECTIONS=none", "bytes_per_frame"),
    "03_parity": (
        "CHECKPOINT=random:tiny FRAMES=2 CODEC_FRAMES=16 CHUNK_FRAMES=8 CONTEXT_FRAMES=4 KERNEL=torch KERNEL_FRAMES=2 "
        "PITFALL_FRAMES=8",
        "codec_error_streamed codec_error_upstream frames_compared kernel_error_ratio prompts_compared",
    ),
    "04_streaming": ("MAX_FRAMES=12 PIECE_DELAY_S=0.005 TEXT='One two three.'", "fed_equals_whole"),
    "05_metrics": (
        "MAX_FRAMES=6 REPEATS=2 TEMPERATURE=0.5",
        "ttfc_ms_median ttfc_ms_p95 rtf_median underruns repeats schedule threads talker_ms_per_frame "
        "predictor_ms_per_frame codec_ms_per_frame other_ms_per_frame",
    ),
    "06_pipecat_live": ("SEED=1 SCRIPT='tell me a story; 1.0: stop please'", "stale_frames"),
    "07_many_voices": ("LISTENERS=3 IN_TURNS=2 SECONDS=1.0 MAX_FRAMES=4 LOAD={load}", "listeners"),
    "08_megakernel": ("SIZE=tiny TRACE={trace}", "frame_us frame_alone_us"),
    "09_voice": ("MAX_FRAMES=4", "missing"),
    "10_report": ("", "missing runs_read runs_measured"),
}
EXERCISES = {  # what the reader is to change, and what the folded answer says of it
    "01_one_frame": ("EMBEDDINGS = 16", "EMBEDDINGS = 1", "the first frame that differs is 1."),
    "04_streaming": ("PIECE = 0", "PIECE = 3", "the same codes: True."),
    "05_metrics": ("MADE_MS = 60", "MADE_MS = 100", "prebuffer 380 ms, 19 underruns."),
    "07_many_voices": ("SAME_SEED = False", "SAME_SEED = True", "the same codes: True."),
    "08_megakernel": ("SILENT_BLOCKS = 0", "SILENT_BLOCKS = 1", "1 silent: they wait."),
}


def code_cells(notebook):
    """Of a notebook, or of its file."""
    notebook = nbformat.read(notebook, as_version=4) if isinstance(notebook, Path) else notebook
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters(path):
    """Name -> annotated assignment of the parameters cell."""
    return {statement.target.id: statement for statement in ast.parse(code_cells(path)[0].source).body}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_its_parameters_are_one_cell_of_typed_literals_and_streams_are_read_asynchronously(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    linked = re.findall(r"\]\((\w+\.ipynb)\)", "".join(cell.source for cell in notebook.cells))
    assert linked and all((FOLDER / name).is_file() for name in linked)
    cells = code_cells(notebook)
    assert [index for index, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])] == [0]
    # papermill's reader gives up on a line with a second equals sign
    assert all(line.count("=") == 1 for line in cells[0].source.splitlines())
    given = parameters(path)
    for name, statement in given.items():
        assert type(ast.literal_eval(statement.value)).__name__ == statement.annotation.id, name
    assert given["RUN_DIR"].value.value == "" and not {"papermill", "widgets"} & set(notebook.metadata)
    assert all(set(cell.metadata) <= {"tags", "jupyter"} for cell in notebook.cells)
    for cell in cells:
        assert cell.outputs == [] and cell.execution_count is None
        for loop in ast.walk(ast.parse(cell.source)):  # a button is not seen while a synchronous loop runs
            if isinstance(loop, (ast.For, ast.comprehension)) and not getattr(loop, "is_async", False):
                calls = [n.func for n in ast.walk(loop.iter) if isinstance(n, ast.Call)]
                assert not STREAMS & {call.attr for call in calls if isinstance(call, ast.Attribute)}


@pytest.mark.skipif(sys.platform == "win32" or shutil.which("git") is None, reason="no make, or no git")
def test_outputs_that_jupyterlab_saves_are_no_change_to_git_after_make_setup(tmp_path):
    def done(*words: str) -> str:
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=bare)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout + ran.stderr

    bare = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    setup = ("make", "-o", f"{sys.prefix}/.installed", "setup", f"VENV={sys.prefix}")
    for name in ("Makefile", ".gitattributes", "requirements.txt", "pyproject.toml"):
        shutil.copyfile(FOLDER.parent / name, tmp_path / name)
    assert "git" not in done(*setup), "outside a checkout there is nothing to set up, and nothing fails"
    done("git", "init", "-q")
    done(*setup)
    (tmp_path / "notebooks").mkdir()
    book = shutil.copyfile(NOTEBOOKS[0], tmp_path / "notebooks" / NOTEBOOKS[0].name)
    done("git", "add", ".")
    assert done("git", "show", f":notebooks/{book.name}") == book.read_text(encoding="utf-8")
    saved = nbformat.read(book, as_version=4)
    saved.metadata.language_info |= {"version": "3.12.1", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
    saved.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    for number, cell in enumerate(code_cells(saved), 1):
        cell.execution_count, cell.outputs = number, [nbformat.v4.new_output("stream", text="seen")]
        cell.metadata |= {"execution": {"iopub.execute_input": "now"}, "collapsed": False}
    nbformat.write(saved, book)
    assert done("git", "diff") == ""


def test_the_page_that_make_lab_opens_lists_every_notebook_with_its_question():
    rows = re.findall(r"^\| (\[.+) \| .+\. \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    headings = [nbformat.read(path, as_version=4).cells[0].source.partition("\n")[0] for path in NOTEBOOKS]
    about = zip(NOTEBOOKS, headings, strict=True)
    assert rows == [f"[{path.stem}]({path.name}) | {heading.partition(' · ')[2]}" for path, heading in about]


def test_a_bare_runtime_clones_the_address_of_the_badge_and_installs_what_speaking_takes():
    (address,) = re.findall(r"`(https://github\.com/\S+)`", (FOLDER / "README.md").read_text())
    badge = address.replace("github.com", "colab.research.google.com/github") + "/blob/main/notebooks/"
    found = [path for path in NOTEBOOKS if f"]({badge}{path.name})" in path.read_text(encoding="utf-8")]
    assert [path.stem for path in found] == ["01_one_frame", "04_streaming"]
    assert {parameters(path)["REPOSITORY"].value.value for path in found} == {address}
    (cell,) = {code_cells(path)[1].source for path in found}
    dependencies = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"\w+", name)[0] for name in dependencies} <= set(re.findall(r"\w+", cell))


@pytest.fixture
def shell(monkeypatch):
    """As a notebook's kernel, in notebooks/, with coarse pictures; settings of loggers and threads are put back."""
    import loguru
    import torch

    threads, handlers = torch.get_num_threads(), set(loguru.logger._core.handlers)
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(plots, "DPI", 40)
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()
    torch.set_num_threads(threads)
    if set(loguru.logger._core.handlers) != handlers:  # of 06_pipecat_live, which writes to a stderr that is gone
        loguru.logger.remove()
        loguru.logger.add(lambda message: sys.stderr.write(message))


def run_cells(shell, stem, settings, run_dir):
    """Runs a notebook's cells, its exercise done; returns what they display and print, and their stderr."""
    (planned,) = runs.plan([FOLDER / f"{stem}.ipynb"], settings)
    run_dir.mkdir(parents=True, exist_ok=True)
    outputs, errors = [], []
    for cell in code_cells(FOLDER / f"{stem}.ipynb"):
        with capture_output() as captured:
            result = shell.run_cell(cell.source.replace(*EXERCISES.get(stem, ("", ""))[:2]))
        outputs += [output.data for output in captured.outputs] + [{"text/plain": captured.stdout}]
        errors.append(captured.stderr)
        result.raise_error()
        if "parameters" in cell.metadata.get("tags", []):
            shell.push(planned.parameters | {"RUN_DIR": str(run_dir)})
    return outputs, "".join(errors)


def sizes(shown):
    """The least width of every table at which no cell breaks inside a word, and its columns."""
    for body in re.findall(r"<table>.*?</table>", shown.get("text/html", ""), re.DOTALL):
        rows = [re.findall(r"<t[hd] [^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("<tr>")[1:]]
        columns = [" ".join(column).split() for column in itertools.zip_longest(*rows, fillvalue="")]
        yield sum(2 + max(map(len, words), default=0) for words in columns), len(columns)


@pytest.mark.parametrize("stem", [path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_from_its_parameters_and_records(stem, shell, tmp_path, tiny, tiny_margin):
    (tmp_path / "trace.json").write_text(json.dumps(document_of((2, 1), 16)))
    files = {"load": os.fspath(load_file(tmp_path)), "trace": os.fspath(tmp_path / "trace.json")}
    settings, recorded = SMALL[stem]
    if stem == "10_report":
        measured = tmp_path / "runs" / "05_metrics-manual"
        run_cells(shell, "05_metrics", SMALL["05_metrics"][0].split(), measured)
        shutil.copytree(measured, f"{measured}-2")
        shell.reset(new_session=True)
    run_dir = tmp_path / "runs" / stem
    shown, stderr = run_cells(shell, stem, shlex.split(settings.format(**files)), run_dir)
    found = json.loads((run_dir / "metrics.json").read_text())
    assert set(recorded.split()) <= set(found)
    for name in re.findall(r'run_dir, "(\w+)"', (FOLDER / f"{stem}.ipynb").read_text().replace('\\"', '"')):
        assert (run_dir / f"{name}.png").is_file(), name
    assert all((run_dir.parent / name).is_file() for name in runs.PICTURES if name.startswith(stem))
    for width, columns in (size for data in shown for size in sizes(data)):
        assert width <= PAGE_CHARS and columns <= MAX_COLUMNS, f"a table of {columns} columns, {width} characters wide"
    assert not any("Figure(" in data.get("text/plain", "") and len(data) == 1 for data in shown), "a figure as text"
    assert COMPILING.sub("", stderr) == "", "the notebook writes warnings"
    text = json.dumps(shown, default=str)
    if stem in EXERCISES:
        assert EXERCISES[stem][2] in text
    stated = json.loads((run_dir / records.VERDICT).read_text())
    assert f"# {stem[:2]} · {stated['question']}\\n" in (FOLDER / f"{stem}.ipynb").read_text(encoding="utf-8")
    assert stated["answer"] and stated["limit"] and stated["figures"]
    for one in stated["figures"]:
        assert one["name"] and one["machine"] and one["checked"] and one["n"] >= 1, one
    assert stem != "02_weights" or records.provenance(records.reference("bench")) in text
    if stem == "10_report":
        assert found["runs_read"] == found["runs_measured"] == 2
        assert "05_metrics" not in found["missing"] and "03_parity" in found["missing"]
    assert stem != "07_many_voices" or "measured on NVIDIA H200, 2026-11-22, at revision abc" in text


@pytest.mark.parametrize(
    ("stem", "setting", "error"),
    [
        ("09_voice", "CHECKPOINT=random:foo", "CheckpointError: .*foo"),
        ("05_metrics", "REPEATS=0", "OptionsError: REPEATS must be a whole number of at least 1, got 0"),
        ("03_parity", "SCHEDULE=0", "OptionsError: SCHEDULE takes whole numbers of at least 1"),
        ("08_megakernel", "BLOCK=200", "OptionsError: BLOCK must be in 0..127"),
        ("07_many_voices", 'LISTENERS="4,0"', "OptionsError: LISTENERS takes whole numbers of at least 1"),
    ],
)
def test_a_wrong_parameter_is_named(stem, setting, error, shell, tmp_path):
    with pytest.raises(MkttsError) as raised:
        run_cells(shell, stem, [setting], tmp_path / "run")
    assert re.match(error, f"{raised.type.__name__}: {raised.value}")
