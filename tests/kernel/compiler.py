"""NVRTC, which compiles csrc/, has no package for macOS: tests that compile are skipped there by its name."""

from __future__ import annotations

import pytest

from mktts.errors import BackendUnavailable
from mktts.kernel.build import nvrtc


def _is_there() -> bool:
    try:
        nvrtc()
    except BackendUnavailable:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _is_there(), reason="needs the package nvidia-cuda-nvrtc")
