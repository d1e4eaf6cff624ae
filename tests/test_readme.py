"""The README keeps its word: commands exist, code runs, links resolve, figures are those of the reference run.

A measured figure is written as a link whose target says where it was recorded:
`[41.3 ms](outputs/reference/bench.json#figures.ttfc_ms.median)`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mktts.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = README.split("\n## ")[0]
LINKS = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", README)
FIGURES = [(text, target) for text, target in LINKS if "#" in target and not target.startswith("#")]
SHELL = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
MKTTS = [line.partition("-m mktts ")[2].split("|")[0] for line in SHELL if "-m mktts " in line]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_short():
    assert README.count("\n") <= 150 and len(README.split()) <= 900


def test_first_screen_has_a_measured_figure_two_commands_and_a_picture():
    assert any(text in FIRST_SCREEN for text, _ in FIGURES)
    assert "make run" in FIRST_SCREEN and "make test" in FIRST_SCREEN
    assert re.search(r"!\[[^\]]+\]\(outputs/reference/[^)]+\.png\)", FIRST_SCREEN)


@pytest.mark.parametrize(("text", "target"), FIGURES, ids=[target.split("/")[-1] for _, target in FIGURES])
def test_figure_equals_the_recorded_one_rounded_as_it_is_written(text, target):
    name, _, keys = target.partition("#")
    value = json.loads((ROOT / name).read_text(encoding="utf-8"))
    for key in keys.split("."):
        value = value[key]
    number, unit = re.fullmatch(r"([\d.,]+)\s*(\S*)", text).groups()
    divisor = {"GB": 1e9, "MB": 1e6, "MiB": 2**20}.get(unit, 1)  # any other unit is written as it is recorded
    decimals = len(number.partition(".")[2])
    assert f"{value / divisor:,.{decimals}f}" == f"{float(number.replace(',', '')):,.{decimals}f}"


def test_every_link_resolves():
    targets = {target.partition("#")[0] for _, target in LINKS if "://" not in target}
    assert [target for target in targets if not (ROOT / target).exists()] == []


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
    build_parser().parse_args(shlex.split(words))


@pytest.mark.parametrize("code", PYTHON)
def test_python_example_runs(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "samples after" in done.stdout
