"""What one frame of many lanes works on: rows in stored form, and the memory that passes of all sizes share.

The stored form of a number is fp16 of a sixteenth of it (`single`), or that and a second fp16 number, 2048 times what
the first rounds away (`split`); high parts of a lane's rows lie together, and its low parts behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 8  # values: strides are multiples, so that rows begin where the widest load may


@dataclass(frozen=True)
class RowsShape:
    """Of one lane: `new` rows of a frame behind `past` older ones."""

    past: int
    new: int
    channels: int
    split: bool

    @property
    def plane(self) -> int:
        """Values from a number's high part to its low part."""
        return -(-(self.past + self.new) * self.channels // UNIT) * UNIT

    @property
    def lane(self) -> int:
        """Values from a lane to the next."""
        return self.plane * self.planes

    @property
    def planes(self) -> int:
        return 2 if self.split else 1


@dataclass(frozen=True)
class Rows(RowsShape):
    """Rows of every lane in stored form: (lanes, 1 or 2, past + new, channels), each plane padded to UNIT values."""

    memory: Tensor  # (lanes * lane,) fp16

    @property
    def newest(self) -> Tensor:
        """The memory from the first lane's first new row on."""
        return self.memory[self.past * self.channels :]


class Work:
    """Memory by name, for any number of lanes: a pass of fewer lanes works at the front of what a larger one took.

    Memory that was given out stays, because recorded graphs know its address. Record the largest pass first: the others
    then take none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Taken so far."""
        return sum(memory.nbytes for memory in (*self._memory.values(), *self._outgrown))

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, least: int = 0) -> Tensor:
        """Memory of `name`, as it was left. least: values that are taken at once, for later calls."""
        values, memory = math.prod(shape), self._memory.get((name, dtype))
        if memory is None or len(memory) < values:
            if memory is not None:
                self._outgrown.append(memory)
            memory = torch.zeros(max(values, least), dtype=dtype, device=self._device)
            self._memory[name, dtype] = memory
        return memory[:values].view(shape)

    def rows(self, name: str, lanes: int, shape: RowsShape, least: int = 0) -> Rows:
        memory = self.tensor(name, lanes * shape.lane, dtype=torch.float16, least=least)
        return Rows(shape.past, shape.new, shape.channels, shape.split, memory)

    def inputs(self, lanes: int, shapes: Sequence[RowsShape]) -> tuple[Tensor, list[Rows]]:
        """One tensor, and in it, one behind the other, the rows of each of `shapes`."""
        memory = self.tensor("inputs", lanes * sum(shape.lane for shape in shapes), dtype=torch.float16)
        pieces = memory.split([lanes * shape.lane for shape in shapes])
        rows = [
            Rows(shape.past, shape.new, shape.channels, shape.split, piece)
            for shape, piece in zip(shapes, pieces, strict=True)
        ]
        return memory, rows
