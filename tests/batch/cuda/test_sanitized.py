"""The batch engine under NVIDIA's compute-sanitizer: no kernel reads or writes what is not its own. `make sanitize`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mktts.common import python_path

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[1] / "strain.py"
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
# Calls that PyTorch and Triton make to ask for something, and that may fail, are no errors of a kernel.
WATCHED = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]


def strained(mode: str, before: list[str], **environment: str) -> None:
    path = os.pathsep.join((python_path()["PYTHONPATH"], str(SCRIPT.parents[1])))  # and what tests share
    done = subprocess.run(
        [*before, sys.executable, str(SCRIPT), mode],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        timeout=580,
    )
    assert done.returncode == 0 and "made " in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_random_ticks_run_to_their_end(mode):
    strained(mode, [])


@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_the_sanitizer_has_nothing_to_say_of_the_batch_engine(mode):
    strained(mode, WATCHED, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if mode == "eager" else {}))
