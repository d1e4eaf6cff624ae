"""The GPU tests' result file says what pytest said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
