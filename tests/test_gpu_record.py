"""The GPU tests' result file says what pytest said; measurements of a GPU are made one by one."""

import json
from pathlib import Path

import gpu_record
import gpu_reference
import pytest

from mktts.notebook import records

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


def test_outcomes_are_counted_by_file_and_a_run_without_tests_leaves_the_record_as_it_was(tmp_path, capsys):
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
    (tmp_path / "test_none.py").write_text("")
    assert record(file, tmp_path / "test_none.py", f"--rootdir={tmp_path}") != 0
    assert json.loads(file.read_text()) == found


def test_parts_of_one_gpu_become_one_record_and_others_do_not(tmp_path):
    def part(name: str, *files: str, **facts: str) -> str:
        """A record of some files of tests, each with two that passed and one that was skipped."""
        rows = {file: {"passed": 2, "failed": 0, "skipped": 1, "seconds": 0.5} for file in files}
        sums = {"passed": 2 * len(files), "failed": 0, "skipped": len(files)}
        head = {"device": "H100", "driver": "1", "torch": "2", "revision": "abc", "date": "2026-01-02"}
        (tmp_path / name).write_text(json.dumps({**head, **sums, "files": rows, **facts}))
        return str(tmp_path / name)

    file, first = tmp_path / "all.json", part("1", "group/b.py", "group/c.py", date="2026-01-03")
    assert gpu_record.main([str(file), "--merge", first, part("2", "group/a.py")]) == 0
    found = json.loads(file.read_text())
    assert sums(file) == (6, 0, 3) and found["date"] == "2026-01-02"
    assert list(found["files"]) == ["group/a.py", "group/b.py", "group/c.py"]
    for wrong, message in (
        (part("3", "group/d.py", revision="abd"), "parts of one revision, found abc, abd"),
        (part("4", "group/b.py"), "found in several: group/b.py"),
    ):
        with pytest.raises(SystemExit, match=message):
            gpu_record.main([str(tmp_path / "none.json"), "--merge", first, wrong])
    assert not (tmp_path / "none.json").exists()


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
