"""What the user sets about the batch engine."""

from __future__ import annotations

from dataclasses import dataclass

from mktts.codec.graphs import Precision
from mktts.common import whole_number
from mktts.errors import OptionsError


@dataclass(frozen=True)
class BatchSettings:
    """max_streams: open at once; None: 2 048 on a CUDA device, 32 on a CPU. positions: of one segment's prompt and
    frames together, at most. memory_bytes: for keys and values; None: four fifths of what is free on a CUDA device, 2
    GiB on a CPU. codec: its precision on a CUDA device.
    Raises OptionsError for values out of range.
    """

    max_streams: int | None = None
    positions: int = 4_096
    memory_bytes: int | None = None
    codec: Precision = "full"

    def __post_init__(self) -> None:
        for name in ("max_streams", "positions", "memory_bytes"):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, at_least=1)
        if self.codec not in ("full", "fast"):
            raise OptionsError(f"codec must be 'full' or 'fast', got {self.codec!r}")
