"""The megakernel backend on a GPU: against the oracle, at its borders, and for long. The chooser of codes, given a
backend's own logits, against what it drew from them. Marks: read from the kernel's words, and laid on one clock."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from absent import needs_nvrtc
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from traces import FRAMES, launch_of

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import python_path
from mktts.errors import CapacityError, EngineError, PromptError, SamplingError
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH, MegakernelBackend
from mktts.kernel.build import SHARED, TARGETS, compile_source, source
from mktts.kernel.grid import choose_shape
from mktts.kernel.trace import Marks, TracedBackend, decode, frame_points, steady
from mktts.measure.inspection import config_at
from mktts.measure.parity.kernel import forced
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Choice, Sampling, choose, gumbel, restrict
from mktts.spec import NUM_CODEBOOKS, ModelConfig

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
NUCLEUS, HOT = Choice(top_p=0.8), Choice(temperature=1.3, top_k=0)
SETTINGS = {
    "greedy": Sampling().greedy(),
    "released": Sampling(),
    "top-p": Sampling(NUCLEUS, NUCLEUS),
    "top-p of all": Sampling(replace(NUCLEUS, top_k=0), replace(NUCLEUS, top_k=0)),
    "hot, no filter": Sampling(HOT, HOT),
    "penalty": Sampling(repetition_penalty=1.2),
    "greedy with a penalty": Sampling(repetition_penalty=1.2).greedy(),
    "greedy talker": Sampling(Choice(do_sample=False), Choice(temperature=0.5, top_k=7)),
}


def prompt_of(checkpoint: Checkpoint) -> Prompt:
    return PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cuda").build(TEXT)


def kernel_of(checkpoint: Checkpoint) -> MegakernelBackend:
    return MegakernelBackend(checkpoint.config, checkpoint.tensors())


def frames_of(backend, prompt, state, count: int) -> torch.Tensor:
    codes = [backend.step(state, prompt.row(state.frames - 1) if state.frames else None).codes for _ in range(count)]
    return torch.stack(codes)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_100_000_frames_neither_hang_nor_drift(tiny):
    """The same stream over and over: every turn has the codes of the first, wherever in it tags begin anew."""
    backend, prompt = kernel_of(tiny), prompt_of(tiny)
    seed = next(s for s in range(100) if len(codes_of(backend, prompt, s, LONG_FRAMES)) == LONG_FRAMES)
    first = codes_of(backend, prompt, seed, LONG_FRAMES)
    assert first.shape == (LONG_FRAMES, NUM_CODEBOOKS) and len(first.unique(dim=0)) > LONG_FRAMES // 2
    for turn in range(LONG_TURNS):
        assert torch.equal(codes_of(backend, prompt, seed, LONG_FRAMES), first), turn


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_has_nothing_to_say(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=mktts"]
    command += [sys.executable, "-c", SANITIZED]
    environment = {**os.environ, **python_path(), "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "100000"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "made 3" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


# ---- the chooser


def chosen(logits: Tensor, history: Tensor, config: ModelConfig, sampling: Sampling, seed: int) -> list[int]:
    """The sixteen codes, on the CPU, of the raw logits (16, vocabulary) of the frame after `history` (N,)."""
    logits, frame = logits.float().cpu(), len(history)
    scores = restrict(logits[0], history, sampling.repetition_penalty, config.codec_ids.eos)
    (noise,) = torch.from_numpy(gumbel(seed, frame, range(1), len(scores)))
    codes = [int(choose(scores, sampling.talker, noise))]
    size = config.predictor.vocab_size
    noises = torch.from_numpy(gumbel(seed, frame, range(1, NUM_CODEBOOKS), size))
    rest = zip(logits[1:, :size], noises, strict=True)
    return codes + [int(choose(row, sampling.predictor, noise)) for row, noise in rest]


def compare(backend, prompt, sampling: Sampling, frames: int, step) -> None:
    """Streams of seeds 40, 41, ... until `frames` frames were compared; `step(state, text)` gives codes and logits."""
    config, compared, seed = backend.config, 0, 39
    while compared < frames:
        seed, history = seed + 1, []
        state = backend.start(prompt, sampling, seed, frames - compared)
        while compared < frames:
            codes, logits = step(state, prompt.row(len(history) - 1) if history else None)
            expected = chosen(logits, torch.tensor(history, dtype=torch.int64), config, sampling, seed)
            if codes is None:
                assert expected[0] == config.codec_ids.eos, f"seed {seed}, frame {len(history)}"
                break
            assert codes.tolist() == expected, f"seed {seed}, frame {len(history)}"
            history.append(expected[0])
            compared += 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_oracles_codes_are_the_choosers(setting, tiny):
    backend = TorchBackend(tiny.config, tiny.tensors())
    prompt = PromptBuilder(tiny.config, tiny.tensors(), tiny.tokenizer()).build(TEXT)

    def step(state, text):
        before = state.copy()
        codes = backend.step(state, text).codes
        seen = forced(backend, before, text, torch.zeros(NUM_CODEBOOKS, dtype=torch.int64) if codes is None else codes)
        return codes, pad_sequence(seen.logits, batch_first=True)

    compare(backend, prompt, SETTINGS[setting], 8, step)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny:margin", "random:tiny:margin:eos9"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_kernels_codes_are_the_choosers(setting, source):
    checkpoint = open_checkpoint(source)
    backend, prompt = kernel_of(checkpoint), prompt_of(checkpoint)
    debug = backend.new_debug()
    compare(backend, prompt, SETTINGS[setting], 200, lambda *at: (backend.step(*at, debug).codes, debug.logits))


# ---- marks

LAYERS = (3, 2)
POINTS = frame_points(*LAYERS)
# A kernel of one matrix that feeds its ring, and marks three points.
SMALL = """
DEV void feeder(Ctx& c) {
  Feeder f = {0, 0, 0, 1, true}; const u8* tape = c.p->talker_tape;
  feed_matrix<Talker::Qkv>(c, f, tape, stream_policy()); feed_end(c, f);
}
DEV void consumer(Ctx& c) {
  MARK(c, 1); Fragments<Talker::Qkv> w; preload(c, w); MARK(c, 2);
  float v[1]; gemv<Talker::Qkv>(c, w, v); MARK(c, 3);
  publish(&c.p->exchange->projected[c.tid], 1, v[0]);
}
extern "C" __global__ void __launch_bounds__(THREADS + FEED_THREADS, 1) small(const __grid_constant__ Params p) {
  run<feeder, consumer>(p);
}"""


def small(arch: str, code: str = SMALL, **more: int) -> bytes:
    """The machine code of SMALL at tiny shapes."""
    defines = {**choose_shape(config_at("tiny"), 132).defines, "RING": 2, **more}
    flags = ["--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    return compile_source(source(SHARED) + code, SHARED, arch, flags).image


@pytest.mark.parametrize(
    "arch", [name if name == "sm_90a" else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS]
)
@needs_nvrtc
def test_marks_cost_nothing_where_they_are_off_and_work_where_they_are_on(arch):
    usual, marking = small(arch), small(arch, TRACE=100)
    assert small(arch, re.sub(r"MARK\(c, \d+\);", "", SMALL)) == usual
    assert len(marking) > len(usual)
    assert small(arch, TRACE=100, STILL=1) != marking


def encode(points: np.ndarray, cycles: np.ndarray, starved: np.ndarray, room: int) -> np.ndarray:
    """Words as the kernel writes them: (blocks, room) uint64."""
    words = np.zeros((len(cycles), room), np.int64)
    words[:, : len(points)] = points << 56 | np.minimum(starved, 65_535) << 40 | cycles % (1 << 40)
    return words.view(np.uint64)


def test_words_are_read_as_written_where_the_clock_turns_over_too_and_those_of_other_frames_or_too_few_are_refused():
    """What is made of whole ones: tests/measure/test_bench.py."""
    cycles = (1 << 40) - 500 + np.cumsum(np.full((4, 9), 100), axis=1) + np.arange(4)[:, None]
    starved = np.arange(36).reshape(4, 9) * 3_000
    found = decode(encode(np.arange(1, 10), cycles, starved, 12))
    assert found.points.tolist() == list(range(1, 10))
    assert np.array_equal(np.diff(found.cycles), np.diff(cycles))
    assert np.array_equal(found.starved, np.minimum(starved, 65_535))
    cycles = np.arange(1, 19).reshape(2, 9)
    words = encode(np.arange(1, 10), cycles, cycles, 12)
    with pytest.raises(EngineError, match="fewer than 9"):
        decode(words[:, :9])
    words[1, 8] = 0
    with pytest.raises(EngineError, match="same marks"):
        decode(words)
    with pytest.raises(EngineError, match="found 0"):
        decode(np.zeros((2, 9)))
    marks = launch_of(LAYERS, 8, seed=2).marks
    for wrong in (frame_points(3, 1), frame_points(2, 2)):
        with pytest.raises(EngineError, match="whole frames"):
            steady(marks, wrong)
    with pytest.raises(EngineError, match="three"):
        steady(Marks(POINTS, marks.cycles[:, : len(POINTS)], marks.starved[:, : len(POINTS)]), POINTS)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_marks_change_no_code_and_are_those_of_whole_frames(source):
    checkpoint = open_checkpoint(source)
    backend = TracedBackend(checkpoint.config, checkpoint.tensors())
    prompt = prompt_of(checkpoint)
    states = [backend.start(prompt, Sampling(), 7, 40) for _ in range(3)]
    for state in states:
        list(backend.frames(state, [None]))
    rows = [prompt.row(t) for t in range(FRAMES)]
    expected = torch.stack([frame.codes for frame in backend.frames(states[0], rows)])
    for state, still in zip(states[1:], (False, True), strict=True):
        frames, marks = backend.traced(state, rows, still)
        spans, _ = steady(marks, backend.points)
        assert len(frames) == FRAMES and spans.min() >= 0
        assert still or torch.equal(torch.stack([frame.codes for frame in frames]), expected)
    again = torch.stack([frame.codes for frame in backend.frames(states[0], rows)])  # the usual build is back
    assert len(again) == FRAMES
