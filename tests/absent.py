"""Packages that are not there: tests that need one skip by its name, and programs run as if it were not installed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection

import pytest

from mktts.common import python_path
from mktts.errors import BackendUnavailable
from mktts.kernel.build import nvrtc

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
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the package {', '.join(missing)}")


def _has_nvrtc() -> bool:
    try:
        nvrtc()
    except BackendUnavailable:
        return False
    return True


# It has no package for macOS.
needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="needs the package nvidia-cuda-nvrtc")


def python_without(packages: Collection[str], code: str) -> subprocess.CompletedProcess[str]:
    """What `code` does in a process of its own in which these packages cannot be imported."""
    command = [sys.executable, "-c", _BLOCK.format(names=tuple(packages)) + code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **python_path()}, timeout=120)
