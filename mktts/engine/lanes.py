"""The one interface between the engine, which decides ticks, and what runs them: lanes in, codes and PCM out.

The engine owns the slots: it takes one for a stream, begins the stream's segments in it one after the other, and gives
it back. One thread owns the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from mktts.codec.packed import Precision
from mktts.engine.pages import Copy, Pages
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment
from mktts.model.voice import Voice


class Made(NamedTuple):
    """What a tick made, for its lanes in their order. The arrays may be written again after the next but one `launch`.

    codes (n, 16) int64; code 0 is -1 where the model gave no number. ended (n,) bool: end of speech; codes and PCM of
    such a lane mean nothing. pcm (n, 1920) float32 in [-1, 1]; None where chunks are decoded by `Lanes.submit`.
    took_s: the time of the tick on the device; predictor_s: of it, where that is known. idle_s: how long the device had
    done nothing before it.
    """

    codes: np.ndarray
    ended: np.ndarray
    pcm: np.ndarray | None
    took_s: float
    idle_s: float = 0.0
    predictor_s: float = 0.0


class Lanes(Protocol):
    """Talker, predictor, draws and codec of many streams, by slot."""

    name: str
    deterministic: bool  # whether a stream's codes depend neither on its neighbours nor on their number
    precision: Precision  # of the codec
    overlaps: bool  # whether the newest tick runs beside what the host does next; otherwise it is waited for at once
    slots: int  # 0 to slots - 1 are the engine's
    positions: int  # of one segment, prompt and frames together, at most
    pages: Pages | None  # the engine's book of them, whose changes the lanes bring to the device; None: no limit
    settings: TickSettings  # the ticks that it can run
    model: TickModel  # what a tick takes, before any was seen
    alone: bool  # set before every launch: no other stream is open, so that more may be done ahead
    decodes_beside: bool  # whether a chunk may be decoded while the next frames are made
    submit: Callable[[int, list[Any]], Any] | None  # begins to decode a slot's next frames; None: `Made.pcm` has them

    def enter(self, slot: int, reference: Tensor | None) -> None:
        """A stream takes `slot`: its codec state is silence, or has heard the codes `reference` (R, 16)."""

    def forget(self, voice: Voice) -> None:
        """Nothing of the voice is kept for streams to come."""

    def begin(self, slot: int, segment: Segment, copies: Sequence[Copy] = ()) -> None:
        """A segment of the stream in `slot`: the talker starts anew behind its prompt's rows, which enter by the pieces
        of the ticks that follow; the codec goes on. copies: of pages, to be made before the next tick. Raises
        PromptError, SamplingError."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies rows of pages behind what was launched and before what will be."""

    def leave(self, slot: int) -> None:
        """The stream is over, or `enter` has raised; a tick that still runs may have a lane of it."""

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Any:
        """Queues one tick; two at most may wait to be collected. rows: for each of `tick.lanes` the text row (H,), None
        exactly for the `new_lanes`."""

    def collect(self, launched: Any) -> Made:
        """Waits for the oldest launched tick. A lane of a slot that had ended before it is `ended` again."""
