"""The megakernel backend on a GPU: against the oracle, at its borders, and for long."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import python_path
from mktts.errors import CapacityError, EngineError, PromptError, SamplingError
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH, MegakernelBackend
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

pytestmark = pytest.mark.gpu
TEXT = Request("Some words, spoken in the streaming layout, and a few more.", speaker="ryan", layout="streaming")
SAMPLED, GREEDY = Sampling(), Sampling().greedy()


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


def prompt_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> Prompt:
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cuda", dtype)
    return builder.build(TEXT)


def kernel_of(checkpoint: Checkpoint) -> MegakernelBackend:
    return MegakernelBackend(checkpoint.config, checkpoint.tensors())


def frames_of(backend, prompt, state, count: int) -> torch.Tensor:
    codes = [backend.step(state, prompt.row(state.frames - 1) if state.frames else None).codes for _ in range(count)]
    return torch.stack(codes)


def test_row_by_row_at_once_and_after_a_prefix_prompts_give_the_same_codes(tiny_margin, monkeypatch):
    backend, prompt = kernel_of(tiny_margin), prompt_of(tiny_margin)
    assert 0 < prompt.prefix_rows < len(prompt.embeds)

    def codes(kernel_rows: int, start: PromptRows) -> torch.Tensor:
        monkeypatch.setattr("mktts.kernel.backend._KERNEL_ROWS", kernel_rows)
        state = backend.start(start, GREEDY, 0, 30)
        return frames_of(backend, prompt, state, 30)

    without = PromptRows(prompt.embeds)
    expected = codes(10**6, without)
    for kernel_rows in (0, 10**6):
        assert torch.equal(codes(kernel_rows, without), expected)
        for _ in range(2):  # the prefix is made, then found
            assert torch.equal(codes(kernel_rows, prompt), expected)


def test_sampled_codes_repeat_with_their_seed_and_interleave(tiny):
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    alone = [our_codes(backend, prompt, Sampling(), seed, 20) for seed in (1, 1, 2)]
    assert torch.equal(alone[0], alone[1]) and not torch.equal(alone[0], alone[2])
    states = [backend.start(prompt, Sampling(), seed, 20) for seed in (1, 2)]
    turns = [[], []]
    for _ in range(20):
        for state, codes in zip(states, turns, strict=True):
            codes.append(frames_of(backend, prompt, state, 1))
    assert torch.equal(torch.cat(turns[0]), alone[0]) and torch.equal(torch.cat(turns[1]), alone[2])


@pytest.mark.parametrize(
    ("source", "sampling", "frames"), [("random:tiny", Sampling(), 30), ("random:tiny:margin:eos9", GREEDY, 9)]
)
def test_several_frames_a_launch_are_those_of_single_launches_and_end_with_the_speech(source, sampling, frames):
    checkpoint = open_checkpoint(source)
    backend, prompt = kernel_of(checkpoint), prompt_of(checkpoint)
    expected = our_codes(backend, prompt, sampling, 1, 30)
    assert len(expected) == frames
    for most in (2, 6, MAX_FRAMES_A_LAUNCH):
        assert torch.equal(codes_of(backend, prompt, 1, 30, sampling, most), expected)


def test_a_frame_that_times_out_is_named_and_the_next_stream_is_well(tiny, monkeypatch):
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    expected = our_codes(backend, prompt, Sampling(), 1, 8)
    state = backend.start(prompt, Sampling(), 1, 8)
    with monkeypatch.context() as patch:
        patch.setattr("mktts.kernel.launch._TIMEOUT_NS", 50_000_000)
        launcher = backend._launcher
        patch.setattr(launcher, "blocks", launcher.blocks - 1)  # the others wait for it in vain
        with pytest.raises(EngineError, match=r"block \d+, thread \d+ waited"):
            frames_of(backend, prompt, state, 8)
    with pytest.raises(CapacityError):
        backend.step(state, prompt.row(0))
    assert torch.equal(our_codes(backend, prompt, Sampling(), 1, 8), expected)


def test_borders(tiny):
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    with pytest.raises(SamplingError, match="rng"):
        backend.start(prompt, Sampling(rng="torch"), 0, 4)
    with pytest.raises(CapacityError):
        backend.start(prompt, GREEDY, 0, 10**6)
    state = backend.start(prompt, GREEDY, 0, 1)
    with pytest.raises(PromptError, match="None exactly on the first"):
        backend.step(state, prompt.row(0))
    frames_of(backend, prompt, state, 1)
    with pytest.raises(CapacityError, match="at most 1"):
        backend.step(state, prompt.row(0))


def codes_of(backend, prompt, seed: int, frames: int, sampling=SAMPLED, most=MAX_FRAMES_A_LAUNCH) -> torch.Tensor:
    """(T, 16), up to `most` frames a launch."""
    state, codes = backend.start(prompt, sampling, seed, frames), []
    while len(codes) < frames and not state.ended:
        last = min(frames, len(codes) + most)
        rows = [prompt.row(t - 1) if t else None for t in range(len(codes), last)]
        codes += [frame.codes for frame in backend.frames(state, rows) if frame.codes is not None]
    return torch.stack(codes)


def test_100_000_frames_neither_hang_nor_drift(tiny):
    """The same stream over and over: every turn has the codes of the first, wherever in it tags begin anew."""
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
