"""Which folder may import which: the table in CONTRIBUTING.md. Imports inside functions and for types count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mktts"
GROUND = {"errors", "spec", "common", "arguments", "audio"}
CONTRIBUTING = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
ALLOWED = dict(re.findall(r"^\| `(\w+)` \|([\w ]*)\|$", CONTRIBUTING, re.MULTILINE))  # room -> what it may import
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
    assert rooms <= set(ALLOWED) | GROUND and len(ALLOWED) > 12


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
    named = {name for name, path in MODULES.items() if "mktts.training" in path.read_text(encoding="utf-8")}
    assert {name for name in named if room(name) != "training"} == {"mktts.cli"}


def test_no_circle_between_files():
    try:
        TopologicalSorter({name: set(imports(path)) - {name} for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
