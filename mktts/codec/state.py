"""What one codec stream carries from chunk to chunk, in one buffer: the tensors are views of it, a copy is one copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16  # the widest load of torch's elementwise kernels


@dataclass
class CodecState:
    """Everything one stream carries from chunk to chunk. Tensors are updated in place and never replaced."""

    keys: Tensor  # (layers, heads, window - 1, head_dim), rotated, oldest first
    values: Tensor  # same shape
    history: tuple[Tensor, ...]  # (P, C) rows before each layer that looks back, in the order of the pass
    position: Tensor  # () int64: frames decoded, on the device
    flat: Tensor  # (bytes,) uint8: the memory that all of the above are views of
    layout: StateLayout
    frames: int = 0  # the same number as `position`, on the host

    def copy(self) -> CodecState:
        """A second stream that continues from here."""
        return self.layout.views(self.flat.clone(), self.frames)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.keys, self.values, self.position, *self.history))


@dataclass(frozen=True)
class StateLayout:
    """Where the tensors of a decoder's states lie in their buffer; equal for decoders whose states are exchangeable."""

    cache: tuple[int, ...]  # shape of the keys, and of the values
    history: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # of all but the position

    def zeros(self, device: torch.device) -> CodecState:
        """The state before the first frame."""
        *_, (start, count, dtype) = self.places()
        return self.views(torch.zeros(start + count * dtype.itemsize, dtype=torch.uint8, device=device))

    def views(self, flat: Tensor, frames: int = 0) -> CodecState:
        """The state whose memory is `flat` (bytes,) uint8."""
        shapes = (self.cache, self.cache, *self.history, ())
        keys, values, *history, position = (
            flat[start : start + count * dtype.itemsize].view(dtype).view(shape)
            for (start, count, dtype), shape in zip(self.places(), shapes, strict=True)
        )
        return CodecState(keys, values, tuple(history), position, flat, self, frames)

    def words(self) -> list[int]:
        """Where keys, values and every history start, in values of `dtype` from the start of the buffer."""
        return [start // self.dtype.itemsize for start, *_ in self.places()[:-1]]

    def places(self) -> list[tuple[int, int, torch.dtype]]:
        """(first byte, values, dtype) of keys, values, every history and the position."""
        places, start = [], 0
        tensors = [(math.prod(shape), self.dtype) for shape in (self.cache, self.cache, *self.history)]
        for count, dtype in (*tensors, (1, torch.int64)):
            places.append((start, count, dtype))
            start += -(-count * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return places
