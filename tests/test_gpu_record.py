"""The GPU tests' result file says what pytest said."""

import json

import gpu_record

TESTS = """
import pytest
@pytest.mark.gpu
def test_good(): pass
@pytest.mark.gpu
@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x == 1
@pytest.mark.gpu
def test_absent(): pytest.skip("no such GPU")
def test_without_a_gpu(): assert False
class TestMore:
    @pytest.mark.gpu
    def test_good(self): pass
"""


def test_outcomes_are_counted_by_file_and_other_files_stay_where_they_are_of_the_same_revision(tmp_path, monkeypatch):
    def record(*words: object) -> tuple[int, dict]:
        status = gpu_record.main([*map(str, (file, *words)), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"])
        return status, json.loads(file.read_text())

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    facts = {"device": "H100", "driver": "1", "torch": "2", "revision": "abc"}
    monkeypatch.setattr(gpu_record, "head", lambda device: facts)
    folder, file = tmp_path / "group", tmp_path / "gpu_tests.json"
    folder.mkdir()
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import no_such_module")
    status, found = record(folder, "--continue-on-collection-errors", "-o", "markers=gpu")
    assert status == 1 and [found[outcome] for outcome in gpu_record.OUTCOMES] == [3, 2, 1]
    by_file = {name: (row["passed"], row["failed"]) for name, row in found["files"].items()}
    assert by_file == {"group/test_it.py": (3, 1), "group/test_broken.py": (0, 1)} and facts.items() <= found.items()
    (tmp_path / "test_none.py").write_text("")
    assert record(tmp_path / "test_none.py") == (5, found)
    (tmp_path / "test_more.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_more(): pass")
    status, more = record(tmp_path / "test_more.py")
    assert (status, more["passed"]) == (0, 4) and set(more["files"]) == {"test_more.py", *found["files"]}
    facts["revision"] = "abd"
    assert set(record(tmp_path / "test_more.py")[1]["files"]) == {"test_more.py"}
