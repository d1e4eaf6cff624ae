"""Measurements on record: where a document comes from, and verdicts."""

import json
from contextlib import nullcontext

import pytest
from load_document import load_file

from mktts.errors import MetricsError
from mktts.notebook import records


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
