"""When listeners come: Poisson, and in bursts besides."""

from __future__ import annotations

import numpy as np

from mktts.batch.board import FRAME_S


def arrivals(
    listeners: int,
    warm_s: float,
    seconds: float,
    frames: tuple[int, int] = (25, 150),
    burst: int = 0,
    bursts: int = 5,
    seed: int = 0,
) -> list[tuple[float, int]]:
    """(arrival in s, frames), ascending. Over the first half of the warm-up come `listeners` streams that are already
    under way, so that the load is there when the run begins at `warm_s`. bursts times `burst` streams of 50 frames come
    at once, evenly over the run."""
    rng = np.random.default_rng(seed)
    low, high = frames
    found = [
        (at, max(2, int(rng.uniform(0.15, 1.0) * rng.integers(low, high + 1))))
        for at in rng.uniform(0.0, warm_s / 2, listeners)
    ]
    at, mean_s = warm_s / 4, FRAME_S * (low + high) / 2
    while listeners and (at := at + rng.exponential(mean_s / listeners)) < warm_s + seconds:
        found.append((at, int(rng.integers(low, high + 1))))
    for index in range(bursts if burst else 0):
        found += [(warm_s + (index + 0.5) * seconds / bursts, 50)] * burst
    return sorted(found)
