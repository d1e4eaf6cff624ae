"""How far two computations of the same thing are from a third: relative rms errors, pooled by name."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from torch import Tensor

LIMIT = 1.1  # of the kernel's error over the bf16 oracle's


class Errors:
    """Relative rms errors to a reference, pooled by name: sqrt(sum (found - reference)^2 / sum reference^2)."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, found: Tensor, reference: Tensor, *names: str) -> None:
        error, size = (found - reference).double().pow(2).sum(), reference.double().pow(2).sum()
        for name in names:
            self._sums[name][0] += error
            self._sums[name][1] += size

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(float(error) / float(size)) for name, (error, size) in self._sums.items()}


def compare(kernel: Errors, bf16: Errors) -> dict[str, dict[str, float]]:
    """name -> kernel, bf16, ratio."""
    theirs = bf16.relative()
    return {
        name: {"kernel": ours, "bf16": theirs[name], "ratio": ours / theirs[name] if theirs[name] else float(ours > 0)}
        for name, ours in kernel.relative().items()
    }
