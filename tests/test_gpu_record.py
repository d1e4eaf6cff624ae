"""The GPU tests' result file says what pytest said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def record(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tests" / "gpu_record.py", *words, "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)


def merge(*words: object) -> subprocess.CompletedProcess:
    file, *parts = map(str, words)
    command = [sys.executable, str(ROOT / "tests" / "gpu_record.py"), file, "--merge", *parts]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_what_passed_failed_and_was_skipped_is_counted_by_file(tmp_path):
    folder, file = tmp_path / "group", tmp_path / "gpu_tests.json"
    folder.mkdir()
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import no_such_module")
    words = (folder, f"--rootdir={tmp_path}", "--continue-on-collection-errors", "-o", "markers=gpu")
    ended = record(file, *words)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads(file.read_text())
    assert {name: found[name] for name in ("passed", "failed", "skipped")} == {"passed": 3, "failed": 2, "skipped": 1}
    by_file = {name: (row["passed"], row["failed"]) for name, row in found["files"].items()}
    assert by_file == {"group/test_it.py": (3, 1), "group/test_broken.py": (0, 1)}
    assert found["date"] and found["revision"] and found["environment"]["python"]
    assert json.loads(ended.stdout.splitlines()[-1])["passed"] == 3


def test_a_run_without_tests_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "test_none.py").write_text("")
    file = tmp_path / "gpu_tests.json"
    file.write_text("before")
    assert record(file, tmp_path, f"--rootdir={tmp_path}").returncode != 0
    assert file.read_text() == "before"


def part(path: Path, files: dict[str, tuple[int, int]], **facts: str) -> Path:
    """A record of some files of tests, by how many passed and failed."""
    rows = {name: {"passed": good, "failed": bad, "skipped": 1, "seconds": 0.5} for name, (good, bad) in files.items()}
    sums = {word: sum(row[word] for row in rows.values()) for word in ("passed", "failed", "skipped")}
    head = {"device": "H100", "driver": "1", "torch": "2", "revision": "abc", "date": "2026-01-02", "environment": {}}
    path.write_text(json.dumps({**head, **sums, "files": rows, **facts}))
    return path


def test_parts_become_one_record(tmp_path):
    first = part(tmp_path / "1", {"group/b.py": (3, 0), "group/c.py": (1, 0)}, date="2026-01-03")
    second = part(tmp_path / "2", {"group/a.py": (5, 0)})
    ended = merge(tmp_path / "all.json", first, second)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    assert {name: found[name] for name in ("passed", "failed", "skipped")} == {"passed": 9, "failed": 0, "skipped": 3}
    assert json.loads(ended.stdout.splitlines()[-1])["passed"] == 9
    assert list(found["files"]) == ["group/a.py", "group/b.py", "group/c.py"] and found["date"] == "2026-01-02"
    assert found["files"]["group/c.py"] == {"passed": 1, "failed": 0, "skipped": 1, "seconds": 0.5}
    failed = part(tmp_path / "3", {"group/d.py": (1, 1)})
    assert merge(tmp_path / "all.json", first, failed).returncode == 1
    assert json.loads((tmp_path / "all.json").read_text())["failed"] == 1


@pytest.mark.parametrize(
    ("second", "facts", "message"),
    [
        ("group/b.py", {"revision": "abd"}, "parts of one revision, found abc, abd"),
        ("group/b.py", {"device": "H200"}, "parts of one device, found H100, H200"),
        ("group/a.py", {}, "found in several: group/a.py"),
        (None, {}, "needs records to merge"),
    ],
)
def test_parts_that_do_not_belong_together_leave_the_file_as_it_was(tmp_path, second, facts, message):
    file = tmp_path / "all.json"
    file.write_text("before")
    parts = [part(tmp_path / "1", {"group/a.py": (1, 0)}), part(tmp_path / "2", {second: (1, 0)}, **facts)]
    ended = merge(file, *(parts if second else ()))
    assert ended.returncode == 1 and message in ended.stderr
    assert file.read_text() == "before"
