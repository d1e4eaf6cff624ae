"""The frame kernel for long, often interrupted, and under NVIDIA's compute-sanitizer. On a GPU, tiny shapes."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_megakernel import kernel_of, prompt_of

from mktts.common import python_path
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH, MegakernelBackend
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

pytestmark = pytest.mark.gpu
LONG_FRAMES, LONG_TURNS = 2_000, 50
# No matrix product of cuBLAS in it: racecheck takes some of those for faulty (illegal accesses, CUDA 13.0).
SANITIZED = """
import torch
from mktts.checkpoint import open_checkpoint
from mktts.kernel import backend as megakernel, build as kernel_build, launch as kernel_launch, prefill
from mktts.model.backend import PromptRows
from mktts.model.sampling import Choice, Sampling
kernel_launch._TIMEOUT_NS = 300_000_000_000  # instrumented code takes its time
build_for = kernel_build.build_for  # csrc/ring.cuh says why
kernel_launch.build_for = lambda defines, *more: build_for(defines | {"EVERY_LANE_ARRIVES": 1}, *more)
prefill.Prefill.warm_up = lambda self: None
megakernel._KERNEL_ROWS = 100
checkpoint = open_checkpoint("random:tiny")
backend = megakernel.MegakernelBackend(checkpoint.config, checkpoint.tensors())
rows = torch.randn(40, checkpoint.config.talker.hidden_size, generator=torch.Generator().manual_seed(0))
for choice in (Choice(), Choice(top_p=0.8)):
    state = backend.start(PromptRows(rows), Sampling(choice, choice), 1, 8)
    list(backend.frames(state, [None, *rows[:2].cuda()]))
print("made", state.frames)
"""


def codes_of(backend: MegakernelBackend, prompt: Prompt, seed: int, frames: int) -> torch.Tensor:
    """(T, 16), as many frames a launch as it takes."""
    state, codes = backend.start(prompt, Sampling(), seed, frames), []
    while len(codes) < frames and not state.ended:
        last = min(frames, len(codes) + MAX_FRAMES_A_LAUNCH)
        rows = [prompt.row(t - 1) if t else None for t in range(len(codes), last)]
        codes += [frame.codes for frame in backend.frames(state, rows) if frame.codes is not None]
    return torch.stack(codes)


def test_100_000_frames_neither_hang_nor_drift(tiny):
    """The same stream over and over: every turn has the codes of the first, whatever the exchange area went through."""
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    seed = next(s for s in range(100) if len(codes_of(backend, prompt, s, LONG_FRAMES)) == LONG_FRAMES)
    first = codes_of(backend, prompt, seed, LONG_FRAMES)
    assert first.shape == (LONG_FRAMES, NUM_CODEBOOKS) and len(first.unique(dim=0)) > LONG_FRAMES // 2
    for turn in range(LONG_TURNS):
        assert torch.equal(codes_of(backend, prompt, seed, LONG_FRAMES), first), turn


def test_1_000_launches_cut_short_leave_the_next_stream_alone(tiny):
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    expected = codes_of(backend, prompt, 1, 12)
    for turn in range(1_000):
        state = backend.start(prompt, Sampling(), turn, 20)
        frames = backend.frames(state, [None, *(prompt.row(t) for t in range(MAX_FRAMES_A_LAUNCH - 1))])
        next(frames)
        frames.close()
        assert 1 <= state.frames <= MAX_FRAMES_A_LAUNCH
        if turn % 100 == 99:
            assert torch.equal(codes_of(backend, prompt, 1, 12), expected), turn


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_has_nothing_to_say(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=mktts"]
    command += [sys.executable, "-c", SANITIZED]
    environment = {**os.environ, **python_path(), "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "100000"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "made 3" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
