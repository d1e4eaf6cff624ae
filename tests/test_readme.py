"""The README keeps its word: commands exist, code runs, links resolve, figures are those of the reference run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme_figures import FIGURE, renew

from mktts.cli import parse

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.split("\n## ")[0]
LINKS = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", README)
FIGURES = list(FIGURE.finditer(README))
SHELL = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
MKTTS = [line.partition("-m mktts ")[2].split("|")[0] for line in SHELL if "-m mktts " in line]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_short():
    assert README.count("\n") <= 150 and len(README.split()) <= 1_000


def test_first_screen_has_a_measured_figure_two_commands_and_a_picture():
    assert FIGURE.search(FIRST_SCREEN)
    assert "make run" in FIRST_SCREEN and "make test" in FIRST_SCREEN
    assert re.search(r"!\[[^\]]+\]\(outputs/reference/[^)]+\.png\)", FIRST_SCREEN)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.group(3).split("/")[-1] + "#" + figure.group(4))
def test_figure_is_the_recorded_one_rounded_as_it_is_written(figure):
    assert figure.group() == renew(figure), "make reference, or python tests/readme_figures.py"


def test_every_link_resolves():
    targets = {target.partition("#")[0] for _, target in LINKS if "://" not in target}
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_lines_for_a_pipeline_are_those_of_the_package_which_a_test_runs():
    import mktts.pipecat

    (block,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    lines = [line.strip() for line in mktts.pipecat.__doc__.splitlines() if line.startswith("    ")]
    assert [line.strip() for line in block.splitlines() if line] == [line for line in lines if line]


def test_every_notebook_stands_in_the_table():
    listed = re.findall(r"\]\((notebooks/[^)]+\.ipynb)\)", README)
    assert listed == sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)[ `]", README, re.MULTILINE))
    assert {name for pair in named for name in pair if name} <= targets


def test_continuous_integration_runs_the_readmes_test_command():
    assert re.search(r"^exec make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "make test" in {line.strip() for line in SHELL}


def test_plain_test_command_selects_what_make_test_selects():
    makefile = (ROOT / "Makefile").read_text()
    selection = re.search(r'-m ("[^"]+")', makefile.partition("\ntest:")[2]).group(1)
    assert any(line.endswith(f"-m {selection}") for line in SHELL)


@pytest.mark.parametrize("words", MKTTS)
def test_command_line_is_understood(words):
    parse(shlex.split(words))


@pytest.mark.parametrize("code", PYTHON)
def test_python_example_runs(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "samples after" in done.stdout
