"""A folder imports itself and those above it in CONTRIBUTING's tree; imports in functions and for types count too."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mktts"
GROUND = ["errors", "spec", "common", "arguments"]
TREE = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\nmktts/\n")[2]
FOLDERS = re.findall(r"^  (\w+)/ ", TREE.partition("```")[0], re.MULTILINE)


NAMED = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in sorted(NAMED.items())}


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
