"""One tick, as the scheduler decides it and an engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """`rows` of the prompt in `slot` that enter together, from position `start` on; `last`: its first frame is made in
    the same tick."""

    slot: int
    start: int
    rows: int
    last: bool


@dataclass(frozen=True, eq=False)
class Tick:
    """What runs next. An `empty` one runs nothing: ask again when there is news, at `wake_s` at the latest.

    lanes (n,) int32: slots that get a frame; the first `new_lanes` of them those whose prompt ends in this tick.
    frames (n,) int64: which frame of its stream each lane makes. serials (n,) int64: see Board.
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
