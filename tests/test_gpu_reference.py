"""A GPU's measurements are made one by one; one that fails is named and does not hold the others up."""

import sys

import gpu_reference
import pytest

from mktts.notebook import records

WRITE = "python -c \"import sys; open(sys.argv[1], 'w').write('made')\" outputs/reference/h200/{}.json"
FAIL = 'python -c "raise SystemExit(3)" outputs/reference/h200/trace.json'


def test_every_document_is_made_in_the_folder_and_a_failure_is_named_at_the_end(tmp_path, monkeypatch, capfd):
    made = {"bench": WRITE.format("bench"), "trace": FAIL, "load": WRITE.format("load")}
    monkeypatch.setattr(records, "COMMANDS", made)
    assert gpu_reference.main([str(tmp_path), "bench", "trace", "load"]) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"bench.json": "made", "load.json": "made"}
    assert capfd.readouterr().out.splitlines()[-1] == "failed: trace"
    assert gpu_reference.main([str(tmp_path), "load"]) == 0


def test_a_name_that_nothing_makes_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(SystemExit, match="expected names of bench, .*, notebooks, found no_such"):
        gpu_reference.main([str(tmp_path), "bench", "no_such"])


def test_every_committed_command_and_notebook_is_there(tmp_path):
    found = gpu_reference.commands(tmp_path)
    assert set(found) == {*records.COMMANDS, "notebooks"}
    assert all(words[0] == sys.executable and str(tmp_path) in " ".join(words) for words in found.values())
    notebooks = [word for word in found["notebooks"] if word.endswith(".ipynb")]
    assert notebooks and all((gpu_reference.ROOT / word).is_file() for word in notebooks)
