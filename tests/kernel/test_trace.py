"""Marks: read back from the kernel's words, in the order in which csrc leaves them, and laid on one clock."""

import re

import numpy as np
import pytest
import torch
from absent import needs_nvrtc
from test_megakernel import prompt_of
from traces import FRAMES, launch_of

from mktts.checkpoint import open_checkpoint
from mktts.errors import EngineError
from mktts.kernel.build import SHARED, TARGETS, compile_source, source
from mktts.kernel.grid import choose_shape
from mktts.kernel.trace import Marks, TracedBackend, decode, frame_points, steady
from mktts.measure.inspection import config_at
from mktts.model.sampling import Sampling

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


def test_words_are_read_as_they_were_written_also_where_the_clock_turns_over():
    cycles = (1 << 40) - 500 + np.cumsum(np.full((4, 9), 100), axis=1) + np.arange(4)[:, None]
    starved = np.arange(36).reshape(4, 9) * 3_000
    found = decode(encode(np.arange(1, 10), cycles, starved, 12))
    assert found.points.tolist() == list(range(1, 10))
    assert np.array_equal(np.diff(found.cycles), np.diff(cycles))
    assert np.array_equal(found.starved, np.minimum(starved, 65_535))


def test_marks_that_do_not_fit_or_differ_of_other_frames_or_of_fewer_than_three_are_refused():
    """What is made of whole ones: tests/measure/test_trace_document.py."""
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
