"""Which folder may import which. Imports inside functions and for types count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mktts"
GROUND = {"errors", "spec", "common", "arguments", "audio"}
ALLOWED = {
    "model": "",
    "checkpoint": "model",
    "kernel": "model",
    "codec": "model",
    "speech": "model",
    "batch": "model checkpoint kernel codec speech",
    "synth": "model checkpoint kernel codec speech batch",
    "llm": "model checkpoint kernel",
    "measure": "model checkpoint kernel codec speech batch synth llm server pipecat",
    "notebook": "model checkpoint kernel speech synth measure",
    "server": "model checkpoint speech synth",
    "pipecat": "model checkpoint speech synth",
    "agent": "model checkpoint speech synth llm measure server pipecat",
    "training": "model checkpoint kernel codec speech synth llm measure notebook agent",
}
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    """mktts/codec/decoder.py -> mktts.codec.decoder; a folder's __init__.py -> the folder."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path): path for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that `path` names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mktts")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module and node.module.split(".")[0] == "mktts":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                yield from (name if name in MODULES else node.module for name in names)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_room_has_its_line_in_the_table():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(ALLOWED) | GROUND


@pytest.mark.parametrize("name", ALLOWED)
def test_a_room_imports_only_from_below(name):
    allowed = {name, *GROUND, *ALLOWED[name].split()}
    wrong = [
        f"{module(path)} imports {found}"
        for path in FILES
        if room(module(path)) == name
        for found in imports(path)
        if room(found) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_imports_nothing_but_the_ground(name):
    files = [PACKAGE / f"{name}.py", *(PACKAGE / name).glob("*.py")]
    assert {room(found) for path in files if path.exists() for found in imports(path)} <= GROUND


def test_only_the_command_line_names_training_and_that_by_its_modules_names():
    outside = [path for path in FILES if room(module(path)) != "training"]
    named = {module(path) for path in outside if "mktts.training." in _strings(path)}
    assert named == {"mktts.cli"}


def _strings(path: Path) -> str:
    """What a program could import by: every string in `path` but docstrings, and every module that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said]
    return "\n".join([*(value for value in strings if isinstance(value, str)), *imports(path)])


def test_no_circle_between_files():
    try:
        TopologicalSorter({name: set(imports(path)) - {name} for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
