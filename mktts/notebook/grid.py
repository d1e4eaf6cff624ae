"""From notebooks and `--set NAME=a,b,c` to the list of runs; nothing is executed here.

Values take the type of the notebook's parameter (int, float, bool or str, from its annotation, else from its
default). A value with a comma goes in double quotes, a double quote inside those is doubled, as in a CSV line:

    --set SEED=1,2,3    --set 'TEXT="Yes, please.","He said ""no""."'
"""

from __future__ import annotations

import ast
import csv
import glob
import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mktts.errors import BatchError

RUN_DIR = "RUN_DIR"  # the one parameter the runner fills itself
PARTIAL = ".partial"  # beside run folders: of runs that are not over
LONGEST_NAME, LONGEST_VALUE = 100, 24  # characters of a run folder's name, and of a value in a shortened one
_PLAIN = re.compile(r"[A-Za-z0-9._,+-]*")
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True)
class Notebook:
    """A notebook file and its parameters: name -> (type name, default)."""

    path: Path
    parameters: dict[str, tuple[str, Any]]
    code_cells: int
    sha256: str


@dataclass(frozen=True)
class Run:
    """One execution of a notebook; `parameters` are the ones set on the command line, `name` its folder's name."""

    notebook: Notebook
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The notebook's name and the set values, 04_metrics-SEED=1-CHECKPOINT=small: a folder's name anywhere.

        A colon is written ~. Where a value holds another character that some file system refuses, or all of it is
        long, values are cleaned and cut, and eight hexadecimal digits of a hash keep runs apart.
        """
        stem = self.notebook.path.stem
        if not self.parameters:
            return stem
        values = {name: str(value).replace(":", "~") for name, value in self.parameters.items()}
        name = "-".join([stem, *(f"{key}={value}" for key, value in values.items())])
        plain = all(_PLAIN.fullmatch(str(value).replace(":", "")) for value in self.parameters.values())
        if plain and len(name) <= LONGEST_NAME and not name.endswith("."):  # Windows drops a last dot
            return name
        cleaned = (f"{key}={re.sub(r'[^A-Za-z0-9._,+~-]+', '_', v)[:LONGEST_VALUE]}" for key, v in values.items())
        canonical = json.dumps(self.parameters, sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:8]
        return f"{'-'.join([stem, *cleaned])[: LONGEST_NAME - 9]}-{digest}"

    @property
    def all_parameters(self) -> dict[str, Any]:
        """The set parameters over the notebook's defaults, without RUN_DIR."""
        defaults = {name: default for name, (_, default) in self.notebook.parameters.items() if name != RUN_DIR}
        return {**defaults, **self.parameters}


def read_notebook(path: Path) -> Notebook:
    """Reads the cell tagged `parameters`: literal assignments, one name each. Raises BatchError."""
    try:
        text = path.read_text(encoding="utf-8")
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except FileNotFoundError:
        raise BatchError(f"{path}: expected a notebook, found no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise BatchError(f"{path}: expected a notebook, could not read it: {error!r}") from None
    parameters: dict[str, tuple[str, Any]] = {}
    for cell, source in zip(cells, sources, strict=True):
        if "parameters" in cell.get("metadata", {}).get("tags", []):
            parameters = _parameters(source, path)
            break
    code_cells = sum(bool(source.strip()) for source in sources)
    return Notebook(path, parameters, code_cells, hashlib.sha256(text.encode()).hexdigest())


def plan(paths: Sequence[Path], settings: Sequence[str]) -> list[Run]:
    """Every notebook with every combination of the settings, notebooks outermost, in the order given.

    A path with wildcards that no file bears itself stands for the files that it matches, as in a shell that expands
    it; some shells do not (Windows'). Raises BatchError where a path matches nothing, a setting is malformed, its name
    is unknown to any one of the notebooks, or a value does not have the parameter's type.
    """
    notebooks = [read_notebook(path) for given in paths for path in _expanded(given)]
    stems = [notebook.path.stem for notebook in notebooks]
    if not notebooks or len(set(stems)) != len(stems):
        raise BatchError(f"expected one or more notebooks of different names, found {[str(path) for path in paths]}")
    split = _split_settings(settings)
    runs = []
    for notebook in notebooks:
        axes = [[(name, _typed(notebook, name, text)) for text in texts] for name, texts in split.items()]
        for name, axis in zip(split, axes, strict=True):
            if len({value for _, value in axis}) != len(axis):
                raise BatchError(f"--set {name}: the same value is given twice: {split[name]}")
        runs += [Run(notebook, dict(combination)) for combination in itertools.product(*axes)]
    return runs


def _expanded(path: Path) -> list[Path]:
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    if not found:
        raise BatchError(f"{path}: expected notebooks of this pattern, found none")
    return found


def _parameters(source: str, path: Path) -> dict[str, tuple[str, Any]]:
    rule = f"{path}: the cell tagged `parameters` must hold assignments of literals, one name each"
    parameters: dict[str, tuple[str, Any]] = {}
    try:
        statements = ast.parse(source).body
        for statement in statements:
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                target, kind = statement.target, ast.unparse(statement.annotation)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, kind = statement.targets[0], None
            else:
                raise BatchError(f"{rule}; line {statement.lineno} is not one")
            value = ast.literal_eval(statement.value)
            parameters[ast.unparse(target)] = (kind or type(value).__name__, value)
    except (SyntaxError, ValueError) as error:
        raise BatchError(f"{rule}: {error}") from None
    return parameters


def _split_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    split: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals or not name.isidentifier():
            raise BatchError(f"--set {setting}: expected NAME=value or NAME=value,value")
        if name in split:
            raise BatchError(f"--set {name} is given twice: put all its values in one, separated by commas")
        try:
            rows = csv.reader([values], strict=True, skipinitialspace=True)
            split[name] = next(rows, None) or [""]  # NAME= is one empty value, not none
        except csv.Error as error:
            raise BatchError(f'--set {setting}: {error}; quote a value as NAME="a, b","c"') from None
    return split


def _typed(notebook: Notebook, name: str, text: str) -> Any:
    if name == RUN_DIR:
        raise BatchError(f"--set {RUN_DIR}: the runner sets it, one folder per run; --out says where they go")
    if name not in notebook.parameters:
        known = ", ".join(sorted(set(notebook.parameters) - {RUN_DIR})) or "none"
        raise BatchError(f"--set {name}: {notebook.path} has no such parameter; it has: {known}")
    kind = notebook.parameters[name][0]
    if kind not in TYPES:
        raise BatchError(f"--set {name}: its type in {notebook.path} is {kind}; only {', '.join(TYPES)} can be set")
    if kind == "str":
        return text
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.strip().lower()]
        value = TYPES[kind](text)
        if kind == "float" and not math.isfinite(value):
            raise ValueError
        return value
    except (KeyError, ValueError):
        expected = {"bool": "true or false", "int": "a whole number", "float": "a finite number"}[kind]
        raise BatchError(f"--set {name}: expected {expected}, found {text!r}") from None
