"""Packages that are not there: tests that need one skip by its name, and programs run as if it were not installed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection

import pytest

from mktts.common import python_path

_BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark that skips where one of the packages (by the names that are imported) is not installed."""
    missing = [package for package in packages if not _is_there(package)]
    return pytest.mark.skipif(bool(missing), reason=f"needs the package {', '.join(missing)}")


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def python_without(packages: Collection[str], code: str) -> subprocess.CompletedProcess[str]:
    """What `code` does in a process of its own in which these packages cannot be imported."""
    command = [sys.executable, "-c", _BLOCK.format(names=tuple(packages)) + code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **python_path()}, timeout=120)
