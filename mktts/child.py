"""Child processes (a notebook's kernel, a measured load) import the very package that started them."""

from __future__ import annotations

import os
from pathlib import Path


def python_path() -> dict[str, str]:
    """PYTHONPATH with this package's folder first: it need not be installed, nor be in the working folder."""
    package = str(Path(__file__).resolve().parents[1])
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != package]
    return {"PYTHONPATH": os.pathsep.join([package, *others])}
