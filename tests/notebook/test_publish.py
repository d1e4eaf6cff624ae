"""What is kept of a run to be read elsewhere: whole, without embedded sound, with the sound files beside it."""

from __future__ import annotations

import io
import re

import nbformat
import numpy as np
import pytest

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import BatchError
from mktts.notebook import nb
from mktts.notebook import publish as publishing
from mktts.notebook.publish import publish
from mktts.spec import SAMPLE_RATE_HZ

soundfile = pytest.importorskip("soundfile")

CLIP = """\
import numpy as np
from pathlib import Path
from mktts.notebook import nb
nb.clip(np.full(24_000, 0.25, np.float32), "a & b", Path("."), random_weights=False)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run: two sounds, one of them shown twice, a figure, a page and a widget, executed for real."""
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("run")
    cells = [
        CLIP,
        'nb.clip(np.zeros(240, np.float32), "silence", Path("."), random_weights=True)',
        "from IPython.display import IFrame\nIFrame('http://127.0.0.1:1/?key=secret', 100, 100, extras=['a=\"b\"'])",
        "import ipywidgets\nipywidgets.Button()",
        "print('kept')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
    notebook.cells.append(nbformat.from_dict({**notebook.cells[0], "id": "again"}))
    nbformat.write(notebook, folder / "executed.ipynb")
    for name in ("metrics.json", "plot.png", "weights.bin"):
        (folder / name).write_bytes(b"{}")
    return folder


def test_sound_becomes_links_to_files_that_hold_it(run, tmp_path):
    target = publish(run, tmp_path / "reference" / "n")
    text = (target / "executed.ipynb").read_text(encoding="utf-8")
    assert "base64" not in text and "<audio" not in text
    links = set(re.findall(r'href=\\"([^"\\]+\.mp3)\\"', text))
    assert links == {"a_b.mp3", "silence.mp3"} == {path.name for path in target.glob("*.mp3")}
    samples, rate_hz = soundfile.read(io.BytesIO((target / "a_b.mp3").read_bytes()))
    assert rate_hz == SAMPLE_RATE_HZ and len(samples) >= SAMPLE_RATE_HZ
    assert np.median(samples[2_000:20_000]) == pytest.approx(0.25, abs=0.05)


def test_everything_else_stays_readable_and_a_dead_page_is_not_shown(run, tmp_path):
    target = publish(run, tmp_path / "n")
    assert {path.name for path in target.iterdir()} == {
        "executed.ipynb", "metrics.json", "a_b.mp3", "silence.mp3",
    }  # fmt: skip
    notebook = nbformat.read(target / "executed.ipynb", as_version=4)
    nbformat.validate(notebook)
    shown = str([cell.outputs for cell in notebook.cells])
    assert "kept" in shown and RANDOM_WEIGHTS in shown
    assert "secret" not in shown and "widget-view" not in shown and "widgets" not in notebook.metadata


def test_what_was_there_is_replaced_as_a_whole(run, tmp_path):
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "stale.png").touch()
    publish(run, tmp_path / "n")
    assert not (tmp_path / "n" / "stale.png").exists()


def test_a_folder_without_a_run_is_refused_and_replaces_nothing(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(BatchError, match="no executed.ipynb"):
        publish(tmp_path / "empty", tmp_path / "kept")
    assert (tmp_path / "kept").is_dir()


def test_the_readmes_pictures_are_kept_as_files(run, tmp_path, monkeypatch):
    readme = (nb.repository() / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"outputs/reference/(\d\d_\w+/[\w.]+\.png)", readme)) == set(publishing.PICTURES)
    monkeypatch.setattr(publishing, "PICTURES", (f"{run.name}/plot.png",))
    assert (publish(run, tmp_path / "n") / "plot.png").read_bytes() == b"{}"
