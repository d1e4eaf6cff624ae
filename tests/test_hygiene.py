"""The rules of the repository that a program can check, those of imports among them; and the tools of its tests."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import gpu_record
import pytest
from size import RECORD, exceeded, measured

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mktts"
GROUND = ["errors", "spec", "common", "arguments"]
TREE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\nmktts/\n")[2]
FOLDERS = re.findall(r"^  (\w+)/ ", TREE.partition("```")[0], re.MULTILINE)
NAMED = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in sorted(NAMED.items())}
MAX_REFERENCE_BYTES = 4 * 2**20  # a quarter is for pairs of voices to listen to


def committed_files() -> list[str]:
    """Files under version control or about to be; without git, every file outside ignored folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return [line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    ignored = {".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "runs", "mktts.egg-info", ".git"}
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return [path.as_posix() for path in found if not ignored & set(path.parts)]


FILES = committed_files()


@cache
def text_files() -> list[tuple[str, str]]:
    """(name, text) of every committed file that is text."""
    found = []
    for name in FILES:
        try:
            found.append((name, (ROOT / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def hits(pattern: str, files: list[tuple[str, str]]) -> list[str]:
    found = ((name, text, match) for name, text in files for match in re.finditer(pattern, text))
    return [f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}" for name, text, match in found]


def test_no_machine_paths_and_no_package_hosts():
    folders = "root|home|Users|workspace|work|tmp|opt|mnt|data"
    assert hits(rf"""(?<![\w.~$)}}/:-])/(?:{folders})/\w[^\s"']*""", text_files()) == []
    hosts = "|".join((r"pypi\.", "python" + "hosted", r"download\.py" + "torch", "file:" + "///"))
    (hit,) = hits(hosts, text_files())  # `make CPU=1` names PyTorch's own index, once
    assert re.fullmatch(r"Makefile:\d+: download\.py" + "torch", hit)


def test_files_that_are_named_are_there():
    """The log and records of runs name what there was on their day."""
    where = ("mktts/", "csrc/", "notebooks/", "Makefile", "README.md", "CONTRIBUTING.md", "tests/")
    files = [file for file in text_files() if file[0].startswith(where)]
    named = hits(r"\b(?:tests|csrc)/[\w/]+\.(?:py|cu|cuh|md)\b", files)
    assert len(named) > 60
    assert [hit for hit in named if not (ROOT / hit.rsplit(" ", 1)[-1]).is_file()] == []


def test_the_top_level_is_what_it_was_and_the_reference_run_is_small_and_all_of_outputs():
    named = {name.partition("/")[0] for name in FILES if not name.startswith(".")}
    assert {name for name in named if name[0].islower()} == {
        "compose.yaml", "csrc", "docs", "mktts", "notebooks", "outputs", "pyproject.toml", "requirements.txt", "tests"
    }  # fmt: skip
    outputs = [name for name in FILES if name.startswith("outputs/")]
    assert [name for name in outputs if not name.startswith("outputs/reference/")] == []
    assert 0 < sum((ROOT / name).stat().st_size for name in outputs) <= MAX_REFERENCE_BYTES


def test_requirements_are_pinned_and_each_has_its_reason():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines[:-1] if line.strip() and not line.startswith("#")]
    pin = r"[A-Za-z0-9_.-]+(\[[a-z,]+\])?==[0-9][0-9A-Za-z.]*"
    assert [line for line in packages if not re.fullmatch(pin + r"( ; [^#;]+?)?\s+# \S.{3,}", line)] == []
    assert lines[-1] == "-e ."


def test_importing_the_package_pulls_in_nothing_heavy():
    heavy = (
        "transformers", "qwen_tts", "IPython", "ipywidgets", "anywidget", "papermill", "pipecat", "matplotlib",
        "pandas", "librosa", "soundfile", "torchaudio", "huggingface_hub", "fastapi", "uvicorn",
        "mktts.checkpoint.random.make",
    )  # fmt: skip
    modules = "sys, mktts, mktts.synth.synthesizer, mktts.cli"
    code = f"import {modules}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_facts_of_the_model_stand_in_spec_alone():
    """Sample rate, frame rate and samples per frame, as numbers, appear nowhere else in the package."""
    for path in set((ROOT / "mktts").rglob("*.py")) - {ROOT / "mktts" / "spec.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Constant) or node.value not in (24_000, 1_920, 12.5), path


def test_ruff_has_nothing_to_say_and_kernel_lines_fit_the_line_length_of_python():
    assert hits(r"(?m)^.{121,}$", [(name, text) for name, text in text_files() if name.startswith("csrc/")]) == []
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_total_and_no_folder_is_larger_than_recorded():
    """`make size` lowers the ceilings."""
    now, ceilings = measured(), json.loads(RECORD.read_text(encoding="utf-8"))
    assert exceeded(now) == []
    for kind in ("folders", "folder_tokens"):
        over = {name: count for name, count in now[kind].items() if count > ceilings[kind].get(name, 0)}
        assert over == {}, f"{kind}: delete or merge as much as came, then `make size`"


# ---- a folder imports itself and those above it in the tree of CONTRIBUTING.md


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that `path` names in an import: in functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mktts")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module and node.module.split(".")[0] == "mktts":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                yield from (name if name in MODULES else node.module for name in names)


def folder(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_the_tree_has_the_packages_folders():
    assert sorted(FOLDERS) == sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("name", [*GROUND, *FOLDERS])
def test_a_folder_imports_itself_and_those_above_it(name):
    allowed = {name, *GROUND, *FOLDERS[: FOLDERS.index(name) if name in FOLDERS else 0]}
    for module_of in (of for of in MODULES if folder(of) == name):
        assert [found for found in imports(MODULES[module_of]) if folder(found) not in allowed] == [], module_of


def test_only_the_command_line_names_training_and_that_by_its_modules_names():
    named = {name for name, path in MODULES.items() if "mktts.training" in path.read_text(encoding="utf-8")}
    assert {name for name in named if folder(name) != "training"} == {"mktts.cli"}


def test_no_two_files_import_each_other():
    try:
        TopologicalSorter({name: set(imports(path)) - {name} for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# ---- tools of the tests


def hang(folder: Path, command: list[str], test: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` in `folder`, whose `make test` is `test` on a file of three tests, one of which hangs."""
    hangs = "import time\ndef test_first(): pass\ndef test_that_hangs(): time.sleep(300)\ndef test_last(): pass\n"
    (folder / "test_hangs.py").write_text(hangs)
    (folder / "Makefile").write_text(f"setup:\ntest:\n\t{sys.executable} {test}\n")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env = outer | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | env
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU timeout, and signals")
def test_a_run_of_ci_that_does_not_end_prints_where_it_stands_and_fails(tmp_path):
    done = hang(tmp_path, [".ci/run"], "-c 'import test_hangs; test_hangs.test_that_hangs()'", CI_LIMIT_S="3")
    assert done.returncode == 124, done.stderr
    assert re.search(r'test_hangs\.py", line 3 in test_that_hangs', done.stderr), done.stderr
    assert done.stderr.endswith("the stacks above are where it stood\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no make")
def test_a_test_that_hangs_fails_by_its_name_and_prints_where_it_stands(tmp_path):
    plugins = "-p xdist.plugin -p pytest_timeout -p time_limits -n 1 --timeout=2 --timeout-method=thread"
    done = hang(tmp_path, ["make", "test"], f"-m pytest -q {plugins} test_hangs.py")
    assert re.search(r'test_hangs\.py", line 3 in test_that_hangs', done.stderr), done.stderr
    assert "crashed while running 'test_hangs.py::test_that_hangs'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout


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
