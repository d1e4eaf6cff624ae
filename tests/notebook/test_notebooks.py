"""The notebooks: how they are written, and that each one runs headless from its parameters."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import json
import re
import tokenize
from pathlib import Path

import nbformat
import pytest
from load_document import load_file
from traces import document_of

from mktts.checkpoint import DEFAULT_CHECKPOINT, SOURCES
from mktts.errors import MkttsError
from mktts.notebook import evidence, grid, runs

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TITLES = [
    "00_machine", "01_weights", "02_parity", "03_streaming", "04_metrics", "05_pipecat_live", "06_report", "07_voice",
    "08_many_voices", "09_megakernel",
]  # fmt: skip
MAX_FUNCTION_LINES, MAX_CELL_LINES = 10, 24
COMPILING = re.compile(r"mktts: (?:compiling|loading) .*? \.\.\. [\d.]+ s\n")  # once a cache, and not a warning
PAGE_CHARS = 110  # of JupyterLab's column at its usual size
STREAMS = {"stream", "astream", "open", "play"}  # calls that give audio while it is made

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def trees(path):
    return [ast.parse(cell.source, type_comments=False) for cell in code_cells(path)]


def nodes(path, kind):
    return [node for tree in trees(path) for node in ast.walk(tree) if isinstance(node, kind)]


def parameters(path):
    """Name -> annotated assignment of the parameters cell."""
    tree = ast.parse(next(c.source for c in code_cells(path) if c.metadata.get("tags") == ["parameters"]))
    return {statement.target.id: statement for statement in tree.body}


def stderr_of(path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def tables(outputs):
    """The rows of cells of every table among `outputs`."""
    found = []
    for output in outputs:
        for body in re.findall(r"<table>.*?</table>", output.get("data", {}).get("text/html", ""), re.DOTALL):
            rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
            found.append([re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows])
    return found


def width_chars(table):
    """The least width at which no cell breaks inside a word: its columns' longest words, and two for padding."""
    columns = itertools.zip_longest(*table, fillvalue="")
    return sum(2 + max((len(word) for cell in column for word in cell.split()), default=0) for column in columns)


def test_the_story_is_complete():
    assert [path.stem for path in NOTEBOOKS] == TITLES


@each
def test_notebook_holds_no_results_and_no_foreign_metadata(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@each
def test_notebook_opens_with_the_question_it_answers(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(rf"# {path.stem[:2]} · .+\?\n\n\w", first.source)


@each
def test_parameters_are_one_cell_of_typed_commented_literals(path):
    cells = code_cells(path)
    assert [index for index, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])] == [0]
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(cells[0].source).readline)
        if token.type == tokenize.COMMENT and len(token.string) > 5
    }
    for statement in ast.parse(cells[0].source).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        name, kind, value = statement.target.id, statement.annotation.id, ast.literal_eval(statement.value)
        assert name == name.upper() and type(value).__name__ == kind, name
        assert statement.lineno in comments, f"{name} has no comment that explains it"
    assert parameters(path)["RUN_DIR"].value.value == ""


@each
def test_the_checkpoint_that_is_opened_by_default_is_the_packages(path):
    found = parameters(path).get("CHECKPOINT")
    if found is not None:
        assert found.value.value == ("small" if path.stem == "07_voice" else DEFAULT_CHECKPOINT)
        assert path.stem == "07_voice" or SOURCES in code_cells(path)[0].source


@each
def test_cells_are_short_and_functions_at_most_ten_lines(path):
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, cell.source
    for function in nodes(path, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, ast.unparse(function)
    assert not nodes(path, ast.ClassDef)


@each
def test_streams_are_read_with_async_for_so_that_buttons_work(path):
    for loop in nodes(path, (ast.For, ast.comprehension)):
        if isinstance(loop, ast.comprehension) and loop.is_async:
            continue
        calls = [
            n.func.attr for n in ast.walk(loop.iter) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        ]
        assert not STREAMS & set(calls), ast.unparse(loop.iter)
    if path.stem in ("03_streaming", "04_metrics"):
        read = [node for node in nodes(path, ast.comprehension) if node.is_async]
        assert nodes(path, ast.AsyncFor) or read


@each
def test_widgets_change_only_what_a_parameter_defines(path):
    for call in nodes(path, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("controls", "filled_in"):
            keywords = [keyword for keyword in call.keywords if keyword.arg]  # `controls` gets those of `filled_in`
            assert call.func.attr == "controls" or len(keywords) >= 3
            for keyword in keywords:
                assert keyword.arg in parameters(path) and keyword.value.id == keyword.arg
        assert "interact" not in ast.unparse(call.func)


@each
def test_a_parameters_line_is_read_by_papermill_without_complaint(path):
    """Its reader gives up on a line with a second equals sign, which a comment may hold by accident."""
    for line in code_cells(path)[0].source.splitlines():
        assert line.count("=") == 1, line


@each
def test_no_machine_paths_hosts_or_path_tricks(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"[\"'(\s](/[a-z]+/|~/|[A-Z]:\\)", text)
    assert not re.search(r"https?://|sys\.path|!pip|%pip", text)


@each
def test_the_last_cell_records_metrics(path):
    assert "metrics.record(\n    run_dir," in code_cells(path)[-1].source


@pytest.mark.parametrize("stem", ["02_parity", "03_streaming", "04_metrics", "05_pipecat_live", "08_many_voices"])
def test_a_notebook_that_may_run_on_random_weights_says_what_its_audio_is(stem):
    prose = "\n".join(cell.source for cell in read(FOLDER / f"{stem}.ipynb").cells if cell.cell_type == "markdown")
    assert re.search(r"Random weights: this is noise; timing and (parity|turn-taking) are real\.", prose)


# ---- execution, small

SMALL = {
    "00_machine": ([], ["cpu_read_bandwidth_gb_s", "has_gpu", "has_megakernel", "missing"], []),
    "01_weights": (
        ["SECTIONS=none"],
        ["bytes_per_frame", "kernel_times", "params"],
        ["bytes_per_frame.png", "kernel_roofline.png", "roofline.png"],
    ),
    "02_parity": (
        ["FRAMES=3", "CODEC_FRAMES=40", "CHUNK_FRAMES=8", "CONTEXT_FRAMES=4", "KERNEL_FRAMES=3", "PITFALL_FRAMES=4"],
        ["codec_error_streamed", "codes_equal", "kernel", "prompts_equal"],
        ["codec_error.png"],
    ),
    "03_streaming": (
        ["MAX_FRAMES=12", "PIECE_DELAY_S=0.005", "TEXT=One two three."],
        ["backend", "fed_equals_whole", "frames_after_cancel", "ttfc_ms"],
        ["chunk_timeline.png", "chunk_timeline_fed.png", "kernel_first_pcm.png", "stage_timeline.png", "streamed.wav"],
    ),
    "04_metrics": (
        ["MAX_FRAMES=10", "REPEATS=2", "TEMPERATURE=0.5"],
        ["rtf_median", "talker_ms_per_frame", "texts", "threads", "ttfc_ms_p95", "underruns", "wall_ms_per_frame"],
        ["chunk_timeline.png", "frame_time.png", "ladder.png", "peers.png", "stages.png", "ttfc.png"],
    ),
    "05_pipecat_live": (
        ["SEED=1", "SCRIPT=tell me a story; 1.0: stop please"],
        ["barge_in_ms", "first_audio_ms_median", "interruptions", "silence_ms", "stale_frames", "turns"],
        ["conversation.png", "conversation.wav", "latency.json"],
    ),
    "06_report": ([], ["missing", "runs_read"], []),
    "07_voice": (["MAX_FRAMES=8"], ["missing", "params", "rtf_median", "ttfc_ms_median"], []),
    "08_many_voices": (
        ["LISTENERS=3", "IN_TURNS=2", "SECONDS=1.5", "MAX_FRAMES=8"],
        ["carries", "codes_equal", "listeners", "listeners_in_turns", "load_committed", "underruns_max"],
        ["cost.png", "listeners.png", "one_after_another.wav", "ticks.png"],
    ),
    "09_megakernel": (
        ["SIZE=tiny"],
        ["blocks", "has_trace", "tape_by_hand"],
        ["places.png"],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def repository_is_imported():
    """By the kernels too, which start in notebooks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDER.parent))
        yield


def run_notebook(out, stem, settings):
    """Executes a notebook as `mktts run` does, into the folder `out`; returns its metrics and its run folder."""
    (planned,) = grid.plan([FOLDER / f"{stem}.ipynb"], settings)
    found = runs.execute(planned, out, {"cpu": "a test's"}, timeout_s=120)
    assert found["status"] == "ok", found
    runs.collect(out, out.parent / "metrics.parquet")
    return found, out / planned.name


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """Runs a notebook by SMALL, in an `out` of its own: once, for all tests that look at what it gives. The report
    runs beside what it reports on."""

    @functools.cache
    def run(stem):
        out = run("04_metrics")[1].parent if stem == "06_report" else tmp_path_factory.mktemp(stem) / "runs"
        return run_notebook(out, stem, SMALL[stem][0])

    return run


@pytest.mark.parametrize("stem", TITLES)
def test_notebook_runs_headless_and_records(stem, small_run):
    _, recorded, files = SMALL[stem]
    found, folder = small_run(stem)
    assert set(recorded) <= set(found)
    assert {path.name for path in folder.iterdir()} >= {"executed.ipynb", "metrics.json", *files}
    executed = folder / "executed.ipynb"
    assert executed.stat().st_size < (4_000_000 if stem == "07_voice" else 2_000_000)  # the voice is there to be heard
    shown = [output for cell in code_cells(executed) for output in cell.outputs]
    outputs = json.dumps(shown)
    assert [table for table in tables(shown) if width_chars(table) > PAGE_CHARS] == [], "a table wider than the page"
    assert "Figure(" not in outputs, "a figure was shown as text"
    assert COMPILING.sub("", stderr_of(executed)) == "", "the notebook writes warnings"


def test_what_was_measured_elsewhere_is_shown_with_its_machine(small_run):
    _, folder = small_run("01_weights")
    shown = "\n".join(str(cell.get("outputs", "")) for cell in read(folder / "executed.ipynb").cells)
    assert evidence.provenance(evidence.reference("bench")) in shown


def test_the_report_shows_what_the_metrics_notebook_measured(small_run):
    _, measured = small_run("04_metrics")
    found, folder = small_run("06_report")
    assert folder.parent == measured.parent
    assert found["runs_read"] == found["runs_measured"] == 1
    assert {"ttfc.png", "rtf.png", "stages.png"} <= {path.name for path in folder.iterdir()}
    assert "04_metrics" not in found["missing"] and "02_parity" in found["missing"]


def cells_here(stem, settings, run_dir, monkeypatch, wanted=lambda source: True):
    """Runs those cells of a notebook whose source is `wanted` in this process, which has imported what a kernel imports
    for seconds; returns what they display."""
    (planned,) = grid.plan([FOLDER / f"{stem}.ipynb"], settings)
    monkeypatch.chdir(FOLDER)
    shown = []
    names = {"display": shown.append}
    for cell in code_cells(FOLDER / f"{stem}.ipynb"):
        if wanted(cell.source):
            exec(compile(cell.source, stem, "exec", dont_inherit=True), names)
        if cell.metadata.get("tags") == ["parameters"]:
            names |= planned.parameters | {"RUN_DIR": str(run_dir)}
    return shown


def test_what_many_listeners_met_on_a_gpu_is_shown_from_the_file_that_is_named(tmp_path, monkeypatch):
    def wanted(source):
        return source.startswith(("CHECKPOINT:", "import time", "load = evidence"))

    (drawn,) = cells_here("08_many_voices", [f"LOAD={load_file(tmp_path)}"], tmp_path, monkeypatch, wanted)
    assert any(
        "measured on NVIDIA H200, 2026-11-22, at revision abc" in text.get_text() for text in drawn.axes[0].texts
    )
    assert (tmp_path / "listeners_h200.png").is_file()


@pytest.mark.slow
def test_a_trace_is_drawn_from_the_file_that_is_named(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps(document_of((2, 1), 16)))
    found, folder = run_notebook(tmp_path / "runs", "09_megakernel", ["SIZE=tiny", f"TRACE={tmp_path / 'trace.json'}"])
    assert found["has_trace"] and found["frame_alone_us"] < found["frame_us"]
    drawn = {"where.png", "hops.png", "layers.png", "blocks_talker.png", "blocks_predictor.png"}
    assert drawn <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("stem", "settings", "error"),
    [
        ("07_voice", ["CHECKPOINT=random:foo"], "CheckpointError: .*foo"),
        ("04_metrics", ["REPEATS=0"], "OptionsError: REPEATS must be a whole number of at least 1"),
        ("02_parity", ["SCHEDULE=0"], "OptionsError: SCHEDULE must be frames per chunk"),
        pytest.param(
            *("09_megakernel", ["SIZE=tiny", "BLOCK=16"], "OptionsError: BLOCK must be in 0..15"),
            marks=pytest.mark.slow,
        ),
        ("08_many_voices", ['LISTENERS="4,0"'], "OptionsError: LISTENERS must be numbers of listeners"),
    ],
)
def test_a_wrong_parameter_is_named(stem, settings, error, monkeypatch, tmp_path):
    with pytest.raises(MkttsError) as raised:
        cells_here(stem, settings, tmp_path, monkeypatch)
    assert re.match(error, f"{raised.type.__name__}: {raised.value}")
