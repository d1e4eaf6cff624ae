"""The README keeps its word: commands exist, code runs, links resolve, figures are those of the files behind them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from other_cards import CASES
from readme_figures import CARDS, SCALE, SPEED, renewed, state_of

from mktts.cli import parse

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HARDWARE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
LINK = r"\]\(((?!\w+://)[^)#\s]+)"
LINKS = [ROOT / target for target in re.findall(LINK, README)]
LINKS += [ROOT / "docs" / target for target in re.findall(LINK, HARDWARE)]
SHELL = [
    re.split(r"\s+# ", line)[0].strip()
    for block in re.findall(r"```(?:sh|bat)\n(.*?)```", README + HARDWARE, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
MKTTS = [re.split(r"[|<>]", line.partition("-m mktts ")[2])[0] for line in SHELL if "-m mktts " in line]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SNIPPETS = re.findall(r"```py\n(.*?)```", README, re.DOTALL)  # need a download, a recording or a pipeline


def test_readme_is_short_and_its_first_example_comes_early():
    assert README.count("\n") <= 160 and len(README.split()) <= 1_300
    assert README.partition("```python")[0].count("\n") <= 45


def test_every_figure_is_the_recorded_one_and_no_card_counts_as_run_but_by_the_kernel_that_is_here():
    assert renewed(README) == README and renewed(HARDWARE) == HARDWARE, "python tests/readme_figures.py"
    assert len(SPEED.findall(README)) == len(SCALE.findall(README)) == 1
    cards = [match[2] for match in CARDS.finditer(HARDWARE)]
    assert len(cards) == HARDWARE.count("<!-- cards:") and "| run as" not in CARDS.sub("", HARDWARE)
    assert set(CASES) == {card for listed in cards for card in listed.split(", ")}


def test_a_cards_state_is_that_of_its_rows():
    new, old = {"equal": True, "kernel": "now"}, {"equal": True}
    cases = [{"card": "A", **new}, {"card": "B", **new}, {"card": "B", **old, "revision": "123456789"}]
    cases += [{"card": "C", **new, "equal": False}, {"card": "D", **old}]
    document = {"revision": "abcdefghi", "cases": cases}
    assert state_of(["A"], document, "now") == "run on an H100"
    assert state_of(["A"], document, "later") == "run on an H100 at abcdefgh, before the kernel's last change"
    assert state_of(["A", "B", "D"], document, "now").startswith("run on an H100 at 12345678, abcdefgh, before")
    assert state_of(["A", "C"], document, "now") == state_of(["A", "E"], document, "now") == "compiled"


def test_every_link_resolves_and_every_notebook_stands_in_the_table():
    assert [target for target in LINKS if not target.exists()] == []
    listed = re.findall(r"\]\((notebooks/[^)]+\.ipynb)\)", README)
    assert listed == sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_the_lines_for_a_pipeline_are_those_of_the_package_which_a_test_runs():
    import mktts.pipecat

    (block,) = (snippet for snippet in SNIPPETS if "mktts.pipecat" in snippet)
    lines = [line.strip() for line in mktts.pipecat.__doc__.splitlines() if line.startswith("    ")]
    assert [line.strip() for line in block.splitlines() if line] == [line for line in lines if line]


def test_make_targets_exist_and_the_plain_test_command_selects_what_make_test_and_ci_run():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)[ `]", README, re.MULTILINE))
    assert {name for pair in named for name in pair if name} <= targets
    assert re.search(r"^timeout .* make test <", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    selection = re.search(r'-m ("[^"]+")', makefile.partition("\ntest:")[2]).group(1)
    assert any(line.endswith(f"-m {selection}") for line in SHELL)


def test_every_line_for_a_shell_is_one_that_is_checked_and_the_command_line_understands_its_own():
    known = r"make |\. .venv/bin/activate|.*-m mktts |.*-m pytest |.*-m (venv|pip) |py -m venv "
    assert [line for line in SHELL if not re.match(known, line + " ")] == []
    for words in MKTTS:
        parse(shlex.split(words))


@pytest.mark.parametrize("code", PYTHON)
def test_python_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "samples after" in done.stdout or "samples after" not in code
    assert all((tmp_path / name).stat().st_size for name in re.findall(r'write_audio\("([^"]+)"', code))


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_snippet_names_what_there_is(code):
    compile(code, "README.md", "exec")
    for package, names in re.findall(r"^from (mktts\S*) import (.+)$", code, re.MULTILINE):
        exec(f"from {package} import {names}", {})
