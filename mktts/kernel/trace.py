"""Reads the marks that a build of csrc/ with -DTRACE writes, to show what happens inside a launch. Every block records
the clock of its multiprocessor when its first thread passes a point (csrc/state.cuh, `mark`); the time between two
marks is a phase."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mktts.errors import EngineError
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH, MegakernelBackend, MegakernelStream
from mktts.kernel.build import card_of
from mktts.kernel.launch import Launcher, fill_pointers
from mktts.model.backend import Frame
from mktts.spec import NUM_CODEBOOKS, ModelConfig

# The points in the order in which a block passes them: a layer of the talker, a layer of the predictor, and the points
# after a stack's layers.
TALKER_LAYER = (1, 2, 3, 11, 12, 13, 4, 5, 6, 7, 8, 9, 10)
PREDICTOR_LAYER = (1, 2, 3, 11, 4, 5, 6, 7, 8, 9, 10)
TAIL = (14, 15, 16)
_CLOCK_BITS, _STARVED_BITS = 40, 16


class Phase(NamedTuple):
    """The work between two marks; `kind` is hop (ends with words received from other blocks), product, or other."""

    name: str
    kind: str


# (point, next point) -> phase. Any phase can include a wait for weights, as a warp takes its next ones before it polls.
PHASES = {
    (1, 2): Phase("weigh by the input norm", "other"),
    (2, 3): Phase("query, key, value product", "product"),
    (3, 11): Phase("hop: queries, keys, values", "hop"),
    (11, 4): Phase("attention", "other"),
    (11, 12): Phase("attention", "other"),
    (12, 13): Phase("hop: parts of attention", "hop"),
    (13, 4): Phase("hop: attention outputs", "hop"),
    (4, 5): Phase("output projection", "product"),
    (5, 6): Phase("hop: sum after attention", "hop"),
    (6, 7): Phase("weigh by the second norm", "other"),
    (7, 8): Phase("gate and up product", "product"),
    (8, 9): Phase("hop: activations", "hop"),
    (9, 10): Phase("down projection", "product"),
    (10, 1): Phase("hop: sum after feed-forward", "hop"),
    (10, 14): Phase("hop: sum after feed-forward", "hop"),
    (14, 15): Phase("last norm and head", "product"),
    (15, 16): Phase("hop: logits, and the draw", "hop"),
    (16, 1): Phase("next input", "other"),
}


def frame_points(talker_layers: int, predictor_layers: int) -> np.ndarray:
    """The points of one frame in order, (P,) int: the talker with code 0, then the predictor's passes."""
    one_pass = PREDICTOR_LAYER * predictor_layers + TAIL
    return np.array(TALKER_LAYER * talker_layers + TAIL + one_pass * (NUM_CODEBOOKS - 1))


def talker_points(talker_layers: int) -> int:
    """The number of a frame's points that belong to the talker with code 0."""
    return len(TALKER_LAYER) * talker_layers + len(TAIL)


def phases_of(points: np.ndarray) -> list[Phase]:
    """The phase that begins at each point of a frame; the last one ends at the first point of the next frame."""
    return [PHASES[here, following] for here, following in zip(points, np.roll(points, -1), strict=True)]


class Marks(NamedTuple):
    """The marks of one launch. points: (n,), in order, the same for all blocks. cycles: each block's own clock, never
    decreasing. starved: cycles since the last mark in which the warp waited for weights. Both (blocks, n) int64."""

    points: np.ndarray
    cycles: np.ndarray
    starved: np.ndarray


def decode(words: np.ndarray) -> Marks:
    """Decodes the kernel's words (blocks, room) uint64, 0 for unused ones. Raises EngineError if blocks made different
    marks, or more than fit."""
    words = np.asarray(words, np.uint64)
    points = (words >> np.uint64(_CLOCK_BITS + _STARVED_BITS)).astype(np.int64)
    count = int((points[0] != 0).sum())
    if count in (0, words.shape[1]) or (points != points[0]).any():
        raise EngineError(f"expected the same marks of every block, fewer than {words.shape[1]}: found {count} of one")
    clock = (words[:, :count] & np.uint64((1 << _CLOCK_BITS) - 1)).astype(np.int64)
    steps = np.diff(clock, axis=1) % (1 << _CLOCK_BITS)
    cycles = np.concatenate([clock[:, :1], clock[:, :1] + np.cumsum(steps, axis=1)], axis=1)
    starved = (words[:, :count] >> np.uint64(_CLOCK_BITS)).astype(np.int64) & ((1 << _STARVED_BITS) - 1)
    return Marks(points[0, :count], cycles, starved)


def steady(marks: Marks, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cycles of each phase, and those of them spent waiting for weights, both (frames, blocks, P), for all frames of a
    launch but the first and the last. Raises EngineError unless `marks` are those of at least three complete frames of
    `points`."""
    each = len(points)
    frames, rest = divmod(len(marks.points), each)
    if rest or frames < 3 or (marks.points.reshape(frames, -1) != points).any():
        raise EngineError(f"expected marks of three whole frames or more, {each} each: {len(marks.points)} came")
    spans, starved = (
        part[:, each : (frames - 1) * each].reshape(len(part), -1, each).swapaxes(0, 1)
        for part in (np.diff(marks.cycles), marks.starved[:, 1:])
    )
    return spans, starved


class TracedBackend(MegakernelBackend):
    """The frame kernel in three builds: unchanged, with marks, and with marks but without loading weights, which gives
    meaningful times but meaningless codes. Streams never end by themselves."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], device: torch.device | str = "cuda") -> None:
        super().__init__(config, tensors, device)
        self._fixed.ends[:] = [-1] * 4
        self.points = frame_points(config.talker.num_hidden_layers, config.predictor.num_hidden_layers)
        room = MAX_FRAMES_A_LAUNCH * len(self.points) + 1  # words of a block, and one to detect an overflow
        self._room = torch.zeros(self.shape.blocks, room, dtype=torch.int64, device=self.device)
        defines = {**self.shape.defines, "TRACE": room}
        builds, card = (defines, {**defines, "STILL": 1}), card_of(self.device)
        self._marking = [Launcher("frame.cu", "mktts_frames", build, self.device, card) for build in builds]

    def traced(self, state: MegakernelStream, rows: Sequence[Tensor], still: bool = False) -> tuple[list[Frame], Marks]:
        """Frames and marks of one launch, for a stream that has made a frame. still: without loading weights."""
        usual, self._launcher = self._launcher, self._marking[still]
        self._room.zero_()
        fill_pointers(state.params, {"trace": self._room})
        try:
            frames = list(self.frames(state, rows))
        finally:
            self._launcher = usual
            fill_pointers(state.params, {"trace": None})
        return frames, decode(self._room.cpu().numpy().view(np.uint64))
