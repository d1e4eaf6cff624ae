"""A GPU's measurements are made one by one; one that fails is named and does not hold the others up."""

import gpu_reference
import pytest

from mktts.notebook import records

WRITE = "python -c \"import sys; open(sys.argv[1], 'w').write('made')\" outputs/reference/h200/{}.json"
FAIL = 'python -c "raise SystemExit(3)" outputs/reference/h200/trace.json'


def test_every_document_is_made_in_the_folder_and_a_failure_is_named_at_the_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(records, "COMMANDS", {"bench": WRITE.format("bench"), "trace": FAIL})
    assert gpu_reference.main([str(tmp_path), "trace", "bench"]) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"bench.json": "made"}
    assert capfd.readouterr().out.splitlines()[-1] == "failed: trace"
    assert gpu_reference.main([str(tmp_path), "bench"]) == 0
    with pytest.raises(SystemExit, match="expected names of bench, .*, notebooks, found no_such"):
        gpu_reference.main([str(tmp_path), "bench", "no_such"])
    notebooks = [word for word in gpu_reference.commands("there")["notebooks"] if word.endswith(".ipynb")]
    assert notebooks and all((gpu_reference.ROOT / word).is_file() for word in notebooks)
