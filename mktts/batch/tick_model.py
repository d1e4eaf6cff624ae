"""How long a tick takes: a linear model of its size, and the fit of that model to the ticks that were observed.

A tick makes one frame (talker, sixteen codes, codec, PCM on the host) for each of its lanes and takes rows of waiting
prompts along. Its time is a constant (launches, the bytes of the weights), a part for each lane (products and codec),
a part for each prompt row, and attention, which reads the keys and values of every lane.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from mktts.errors import OptionsError

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


class TickFit:
    """The model of a machine, learnt from its ticks: exponentially weighted least squares of relative errors.

    Each part of `prior` is scaled by its own factor. The prior stays in the sum with the weight of `prior_ticks`, so
    that a part which the ticks say nothing about (no prompt came for a while) keeps its value.
    """

    def __init__(self, prior: TickModel, memory_ticks: float = 500.0, prior_ticks: float = 1.0) -> None:
        """`memory_ticks`: after so many ticks an observation weighs 1/e. Raises OptionsError for less than one tick,
        and for a weight of the prior that is not above 0."""
        if not memory_ticks >= 1 or not prior_ticks > 0:
            raise OptionsError(
                f"memory_ticks must be at least 1 and prior_ticks above 0, got {memory_ticks} and {prior_ticks}"
            )
        self.model = prior
        self._prior = prior
        self._parts = np.array(astuple(prior))
        self._keep = float(np.exp(-1.0 / memory_ticks))
        # A part of 0 has no factor to learn; the equations stay solvable because the prior is in all of them.
        self._prior_weight = prior_ticks / len(self._parts) ** 2
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
        self._squares = self._keep * self._squares + shares[:, None] * shares
        self._right = self._keep * self._right + shares * (took_s / total_s)
        factors = np.linalg.solve(self._squares + self._prior_squares, self._right + self._prior_weight)
        self.model = TickModel(*(self._parts * np.clip(factors, 0.02, 50.0)).tolist())
        return self.model
