"""The GPU tests' result file says what pytest said."""

import json
from pathlib import Path

import gpu_record
import pytest

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


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def record(*words: object) -> int:
    return gpu_record.main([*map(str, words), "-p", "no:cacheprovider"])


def sums(file: Path) -> tuple[int, ...]:
    found = json.loads(file.read_text())
    return tuple(found[outcome] for outcome in gpu_record.OUTCOMES)


def test_what_passed_failed_and_was_skipped_is_counted_by_file(tmp_path, capsys):
    folder, file = tmp_path / "group", tmp_path / "gpu_tests.json"
    folder.mkdir()
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import no_such_module")
    assert record(file, folder, f"--rootdir={tmp_path}", "--continue-on-collection-errors", "-o", "markers=gpu") == 1
    assert sums(file) == (3, 2, 1) and json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] == 3
    found = json.loads(file.read_text())
    by_file = {name: (row["passed"], row["failed"]) for name, row in found["files"].items()}
    assert by_file == {"group/test_it.py": (3, 1), "group/test_broken.py": (0, 1)}
    assert found["date"] and found["revision"] and found["environment"]["python"]


def test_a_run_without_tests_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "test_none.py").write_text("")
    file = tmp_path / "gpu_tests.json"
    file.write_text("before")
    assert record(file, tmp_path, f"--rootdir={tmp_path}") != 0
    assert file.read_text() == "before"


def part(path: Path, files: dict[str, tuple[int, int]], **facts: str) -> str:
    """A record of some files of tests, by how many passed and failed."""
    rows = {name: {"passed": good, "failed": bad, "skipped": 1, "seconds": 0.5} for name, (good, bad) in files.items()}
    whole = {word: sum(row[word] for row in rows.values()) for word in gpu_record.OUTCOMES}
    head = {"device": "H100", "driver": "1", "torch": "2", "revision": "abc", "date": "2026-01-02", "environment": {}}
    path.write_text(json.dumps({**head, **whole, "files": rows, **facts}))
    return str(path)


def test_parts_become_one_record(tmp_path):
    file = tmp_path / "all.json"
    first = part(tmp_path / "1", {"group/b.py": (3, 0), "group/c.py": (1, 0)}, date="2026-01-03")
    assert gpu_record.main([str(file), "--merge", first, part(tmp_path / "2", {"group/a.py": (5, 0)})]) == 0
    found = json.loads(file.read_text())
    assert sums(file) == (9, 0, 3) and found["date"] == "2026-01-02"
    assert list(found["files"]) == ["group/a.py", "group/b.py", "group/c.py"]
    assert found["files"]["group/c.py"] == {"passed": 1, "failed": 0, "skipped": 1, "seconds": 0.5}
    assert gpu_record.main([str(file), "--merge", first, part(tmp_path / "3", {"group/d.py": (1, 1)})]) == 1
    assert sums(file) == (5, 1, 3)


@pytest.mark.parametrize(
    ("second", "facts", "message"),
    [
        ("group/b.py", {"revision": "abd"}, "parts of one revision, found abc, abd"),
        ("group/b.py", {"device": "H200"}, "parts of one device, found H100, H200"),
        ("group/a.py", {}, "found in several: group/a.py"),
    ],
)
def test_parts_that_do_not_belong_together_make_no_record(tmp_path, second, facts, message):
    parts = [part(tmp_path / "1", {"group/a.py": (1, 0)}), part(tmp_path / "2", {second: (1, 0)}, **facts)]
    with pytest.raises(SystemExit, match=message):
        gpu_record.main([str(tmp_path / "all.json"), "--merge", *parts])
    assert not (tmp_path / "all.json").exists()
