"""How sure a figure is: 95 % intervals by the percentile bootstrap (Efron 1979) over sentences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mktts.errors import MetricsError

_DRAWS = 4_000
_TAIL_PERCENT = 2.5


def bootstrap(
    count: int, figure: Callable[[np.ndarray], float | None], seed: int = 0, draws: int = _DRAWS
) -> tuple[float, float] | None:
    """Of a figure over `count` sentences, drawn again with replacement; figure: (count,) indices -> value.

    Draws without a value are left out; None where all are. Raises MetricsError for no sentence.
    """
    if count < 1:
        raise MetricsError("expected sentences to draw from, got none: measure at least one")
    drawn = np.random.default_rng(seed).integers(count, size=(draws, count))
    found = [value for row in drawn if (value := figure(row)) is not None and np.isfinite(value)]
    if not found:
        return None
    low, high = np.percentile(found, (_TAIL_PERCENT, 100 - _TAIL_PERCENT))
    return float(low), float(high)


def of_rate(errors: np.ndarray, words: np.ndarray) -> tuple[float, float] | None:
    """Of sum(errors) / sum(words), both (sentences,)."""
    return bootstrap(len(errors), lambda at: errors[at].sum() / words[at].sum())


def of_median(values: np.ndarray) -> tuple[float, float] | None:
    """Of the median of (utterances,)."""
    return bootstrap(len(values), lambda at: float(np.median(values[at])))


def of_mean(values: np.ndarray) -> tuple[float, float] | None:
    """Of the mean of (utterances,)."""
    return bootstrap(len(values), lambda at: float(values[at].mean()))
