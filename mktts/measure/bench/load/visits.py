"""Who comes when, and what for: the arrivals of mktts.batch.simulate, so that runs and simulations have the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mktts.batch.simulate import Traffic
from mktts.measure.bench.load.settings import LoadSettings
from mktts.spec import FRAME_RATE_HZ

Kind = Literal["reads", "leaves", "never reads", "feeds"]


@dataclass(frozen=True)
class Visit:
    """One arrival. at_s: from the beginning of the run. burst: it comes with many others at once.

    kind: it reads to the end; leaves at leaves_s after its arrival; takes no chunk, until it leaves; or writes its
    text while it is spoken. keeps: its codes are wanted.
    """

    index: int
    at_s: float
    frames: int
    burst: bool = False
    kind: Kind = "reads"
    leaves_s: float | None = None
    keeps: bool = False


@dataclass(frozen=True)
class Habits:
    """Parts of the listeners that behave otherwise than to read to the end; every `keep_every`th reader's codes are
    kept, none where 0, and only from `keep_from_s` on."""

    leaving: float = 0.0
    never_reading: float = 0.0
    feeding: float = 0.0
    keep_every: int = 0
    keep_from_s: float = 0.0


def visits(
    settings: LoadSettings, listeners: int, burst: int = 0, bursts: int = 5, habits: Habits | None = None
) -> list[Visit]:
    """The arrivals of one run, ascending: of the warm-up, of the held time and of the tail.

    listeners: the offered load, as in `Traffic`. bursts times `burst` at once, evenly over held time and tail.
    """
    traffic = Traffic(listeners, settings.frames, burst=burst, bursts=bursts, seed=settings.seed)
    arrivals = traffic.arrivals(settings.warm_s, settings.seconds + settings.tail_s)
    together = Counter(at_s for at_s, _ in arrivals)
    habits, rng = habits or Habits(), np.random.default_rng(settings.seed + 1)
    found: list[Visit] = []
    for index, (at_s, frames) in enumerate(arrivals):
        kind, leaves_s, draw = "reads", None, rng.random()
        if draw < habits.never_reading:
            kind, leaves_s = "never reads", frames / FRAME_RATE_HZ
        elif draw < habits.never_reading + habits.leaving:
            kind, leaves_s = "leaves", rng.uniform(0.0, frames / FRAME_RATE_HZ)
        elif draw < habits.never_reading + habits.leaving + habits.feeding:
            kind = "feeds"
        keeps = bool(habits.keep_every) and index % habits.keep_every == 0 and at_s >= habits.keep_from_s
        found.append(Visit(index, float(at_s), frames, together[at_s] > 1, kind, leaves_s, keeps and kind == "reads"))
    return found
