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


NEEDS_IT = pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit")


@pytest.mark.parametrize("before", [[], pytest.param(WATCHED, marks=NEEDS_IT)], ids=["alone", "sanitizer"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_random_ticks_run_to_their_end_and_the_sanitizer_has_nothing_to_say(mode, before):
    path = os.pathsep.join((python_path()["PYTHONPATH"], str(SCRIPT.parents[1])))  # and what tests share
    environment = {**os.environ, "PYTHONPATH": path}
    if before and mode == "eager":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [*before, sys.executable, str(SCRIPT), mode]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)
    assert done.returncode == 0 and "made " in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
