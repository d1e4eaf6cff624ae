"""Rows of activations as the fused codec's kernels take them, the memory that they lie in, and what is copied between
that and the states of streams.

Rows of one stream are fp32. Those of many are in stored form: fp16 of a sixteenth (so that fp16's range reaches 10^6),
alone or with a second fp16 number, LOW_SCALE times what the first rounds away: split, 22 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mktts.errors import CodecError

UNIT = 8  # values: strides are multiples, so that rows begin where the widest load may
INPUT_SCALE = 16  # a stored number is a sixteenth
PIECE_VALUES = 2048  # of a history, that one program copies


@dataclass(frozen=True)
class RowsShape:
    """The rows of one lane: `new` behind `past` older ones."""

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

    def rows(self, memory: Tensor) -> Rows:
        return Rows(self.past, self.new, self.channels, self.split, memory)


@dataclass(frozen=True)
class Rows(RowsShape):
    """Rows of every lane: (lanes, planes, past + new, channels), each plane padded to UNIT values."""

    memory: Tensor  # (lanes * lane,) fp32, or fp16 in stored form

    @property
    def lanes(self) -> int:
        return len(self.memory) // self.lane

    @property
    def newest(self) -> Tensor:
        """The memory from the first lane's first new row on."""
        return self.memory[self.past * self.channels :]


class CodecWork:
    """Memory by name: a pass of fewer rows works at the front of what a larger one took. What was given out stays,
    because recorded graphs know its address: record the largest pass first."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of rows."""
        self._device, self._dtype = device, dtype
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of `name`, as it was left."""
        values, memory = math.prod(shape), self._memory.get((name, dtype))
        if memory is None or len(memory) < values:
            if memory is not None:
                self._outgrown.append(memory)
            memory = torch.zeros(values, dtype=dtype, device=self._device)
            self._memory[name, dtype] = memory
        return memory[:values].view(shape)

    def rows(self, name: str, lanes: int, shape: RowsShape) -> Rows:
        return shape.rows(self.tensor(name, lanes * shape.lane, dtype=self._dtype))

    def inputs(self, lanes: int, shapes: Sequence[RowsShape]) -> tuple[Tensor, list[Rows]]:
        """One tensor, and in it, one behind the other, the rows of each of `shapes`."""
        memory = self.tensor("inputs", lanes * sum(shape.lane for shape in shapes), dtype=self._dtype)
        pieces = memory.split([lanes * shape.lane for shape in shapes])
        return memory, [shape.rows(piece) for shape, piece in zip(shapes, pieces, strict=True)]


def moves(lanes: int, shapes: Sequence[RowsShape], starts: Sequence[int], device: torch.device) -> Tensor:
    """The table of `row_kernels.move` for `lanes` lanes of rows as `CodecWork.inputs` lays them, in units of UNIT
    values. starts: of each of `shapes`, where a stream's state holds its older rows. Raises CodecError for rows that
    do not come in such units."""
    table, input_start = [], 0
    for shape, start in zip(shapes, starts, strict=True):
        kept, new = shape.past * shape.channels, shape.new * shape.channels
        if kept % UNIT or new % UNIT:
            raise CodecError(f"rows of {shape.channels} channels cannot be moved {UNIT} values at a time")
        for plane in range(shape.planes):
            state, work = start + plane * kept, input_start + plane * shape.plane
            for i in range(0, kept, PIECE_VALUES):
                table.append((state + i, work + i, work + new + i, shape.lane, min(PIECE_VALUES, kept - i)))
        input_start += lanes * shape.lane
    return (torch.tensor(table, dtype=torch.int64) // UNIT).to(device)
