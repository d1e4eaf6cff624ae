"""The rules of the repository that a program can check."""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
    marker_and_reason = r"( ; [^#;]+?)?\s+# \S.{3,}"
    assert [line for line in packages if not re.fullmatch(pin + marker_and_reason, line)] == []
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
