"""Ticks: one as the scheduler decides it and an engine runs it, what one takes, and those that were run last."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import numpy as np

from mktts.errors import OptionsError


class Piece(NamedTuple):
    """`rows` of the prompt in `slot` that enter together, from position `start` on; `last`: its first frame is made in
    the same tick."""

    slot: int
    start: int
    rows: int
    last: bool


@dataclass(frozen=True, eq=False)
class Tick:
    """What runs next. An `empty` one runs nothing: ask again when there is an update, at `wake_s` at the latest.

    lanes (n,) int32: slots that get a frame; the first `new_lanes` of them those whose prompt ends in this tick.
    frames (n,) int64: which frame of its stream each lane makes. serials (n,) int64: see StreamTable.
    pieces: of prompts, in the order of their rows. bucket: (lanes, prompt rows) to run. context_rows: that all of it
    attends to. lead_s: of those who have listened for a while, a quarter is less ahead than this.
    """

    bucket: tuple[int, int] = (0, 0)
    lanes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    new_lanes: int = 0
    frames: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    serials: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pieces: tuple[Piece, ...] = ()
    context_rows: int = 0
    predicted_s: float = 0.0
    wake_s: float = np.inf
    lead_s: float = np.inf

    @property
    def empty(self) -> bool:
        return not len(self.lanes) and not self.pieces

    @property
    def rows(self) -> int:
        """Prompt rows that enter."""
        return sum(piece.rows for piece in self.pieces)


_CONTEXT_UNIT_ROWS = 100


@dataclass(frozen=True)
class TickModel:
    """Seconds: `constant_s` + `lane_s` a lane + `row_s` a prompt row + `attention_s` a hundred rows attended to.

    Lanes and prompt rows are those of the bucket that runs, padding included; what is attended to is the sum over the
    lanes that are filled. Raises OptionsError for parts that are negative or not finite, and for no time at all.
    """

    constant_s: float
    lane_s: float
    row_s: float
    attention_s: float

    def __post_init__(self) -> None:
        parts = np.array(astuple(self), float)
        if not np.isfinite(parts).all() or (parts < 0).any() or not parts[:2].sum() > 0:
            raise OptionsError(
                f"the parts of a tick must be finite, at least 0, and not all 0, got {astuple(self)} seconds"
            )

    @classmethod
    def h200(cls) -> TickModel:
        """0.6B shapes in bfloat16 and the codec in fp16 on one H200, everything in one CUDA graph.

        Least squares of relative errors over 25 measured buckets of 8 to 512 lanes and 0 to 1 024 prompt rows, all
        lanes at 400 rows (5.2 to 26 ms), with attention from the frame alone at 500 rows (13.7 us a lane: 4.2 TB/s of
        keys and values). Every bucket lies within 5 % of the model.
        """
        return cls(constant_s=4.97e-3, lane_s=23.2e-6, row_s=2.86e-6, attention_s=2.74e-6)

    @classmethod
    def cpu(cls) -> TickModel:
        """The voice in the box by batched PyTorch operators in fp32: CPU time of one thread at 2.3 GHz.

        Whole ticks of 1 to 16 lanes, and products of 32 to 256 rows by themselves, on a machine that had other work:
        good for the first ticks only, then `TickFit` knows better.
        """
        return cls(constant_s=11.5e-3, lane_s=2.0e-3, row_s=85e-6, attention_s=55e-6)

    def predict(self, lanes: int, rows: int = 0, context_rows: float = 0.0) -> float:
        """Seconds of a tick of so many lanes and prompt rows, whose lanes attend to `context_rows` rows together."""
        attended = context_rows / _CONTEXT_UNIT_ROWS
        return self.constant_s + self.lane_s * lanes + self.row_s * rows + self.attention_s * attended


_KEEP = math.exp(-1 / 500)  # after 500 ticks an observation weighs 1/e


class TickFit:
    """The model of a machine, learnt from its ticks: exponentially weighted least squares of relative errors.

    Each part of `prior` is scaled by its own factor. The prior stays in the sum with the weight of one tick, so that a
    part which the ticks say nothing about (no prompt came for a while) keeps its value.
    """

    def __init__(self, prior: TickModel) -> None:
        self.model = prior
        self._parts = np.array(astuple(prior))
        # A part of 0 has no factor to learn; the equations stay solvable because the prior is in all of them.
        self._prior_weight = 1 / len(self._parts) ** 2
        self._prior_squares = self._prior_weight * np.eye(len(self._parts))
        self._squares = np.zeros((len(self._parts), len(self._parts)))
        self._right = np.zeros(len(self._parts))

    def observe(self, lanes: int, rows: int, context_rows: float, took_s: float) -> TickModel:
        """Takes a tick that was run (as `TickModel.predict`) and its measured seconds; returns the model from now on.

        A tick far from what is expected (the machine did something else) counts as three times, or a third of, that.
        """
        if not took_s > 0:
            return self.model
        expected_s = self.model.predict(lanes, rows, context_rows)
        took_s = min(max(took_s, expected_s / 3), expected_s * 3)
        shares = self._parts * (1.0, lanes, rows, context_rows / _CONTEXT_UNIT_ROWS)
        total_s = shares.sum()
        shares /= total_s
        self._squares = _KEEP * self._squares + shares[:, None] * shares
        self._right = _KEEP * self._right + shares * (took_s / total_s)
        factors = np.linalg.solve(self._squares + self._prior_squares, self._right + self._prior_weight)
        self.model = TickModel(*(self._parts * np.clip(factors, 0.02, 50.0)).tolist())
        return self.model


_EVERY = 8  # ticks of one lane, which take a millisecond on a GPU, the mean is made anew


class MeanTick:
    """As `TickFit`, of ticks that have one lane: their mean, exponentially weighted."""

    def __init__(self, prior: TickModel) -> None:
        self.model = prior
        self._sum_s, self._ticks, self._seen = prior.constant_s, 1.0, 0

    def observe(self, lanes: int, rows: int, context_rows: float, took_s: float) -> TickModel:
        """Takes a tick that was run; returns the model from now on."""
        self._sum_s = _KEEP * self._sum_s + took_s
        self._ticks = _KEEP * self._ticks + 1
        self._seen += 1
        if self._seen % _EVERY:
            return self.model
        self.model = TickModel(constant_s=self._sum_s / self._ticks, lane_s=0.0, row_s=0.0, attention_s=0.0)
        return self.model


_COUNTS = ("lanes", "new", "rows", "open", "bucket_lanes", "bucket_rows")
TICKS = np.dtype([("ended_s", float), ("took_s", float), *((name, int) for name in _COUNTS), ("late_s", float)])


class TickLog:
    """Keeps the newest ticks. Written by the worker, read from any thread."""

    def __init__(self, ticks: int = 100_000) -> None:
        self._ticks: deque[tuple] = deque(maxlen=ticks)

    def add(self, tick: Tick, took_s: float, ended_s: float, open_streams: int, late_s: float) -> None:
        """took_s: on the device; ended_s: when its PCM was on the host (perf_counter); late_s: of its latest frame."""
        self._ticks.append(
            (ended_s, took_s, len(tick.lanes), tick.new_lanes, tick.rows, open_streams, *tick.bucket, late_s)
        )

    def table(self) -> np.ndarray:
        """One record a tick, of dtype TICKS, oldest first."""
        return np.array(list(self._ticks), TICKS)
