"""What one codec stream carries from chunk to chunk, in one buffer: the tensors are views of it, a copy is one copy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16  # the widest load of torch's elementwise kernels


@dataclass
class CodecState:
    """Everything one stream carries from chunk to chunk. Tensors are updated in place and never replaced.

    They are made when they are first asked for: captured graphs copy `flat` as a whole, and a hundred views cost their
    streams 0.16 ms of the time to first PCM.
    """

    flat: Tensor  # (bytes,) uint8: the memory that all tensors are views of
    layout: StateLayout
    frames: int = 0  # the same number as `position`, on the host

    @property
    def keys(self) -> Tensor:
        """(layers, heads, window - 1, head_dim), rotated, oldest first."""
        return self._views[0]

    @property
    def values(self) -> Tensor:
        """As `keys`."""
        return self._views[1]

    @property
    def history(self) -> tuple[Tensor, ...]:
        """(P, C) rows before each layer that looks back, in the order of the pass."""
        return self._views[2:-1]

    @property
    def position(self) -> Tensor:
        """() int64: frames decoded, on the device."""
        return self._views[-1]

    @cached_property
    def _views(self) -> tuple[Tensor, ...]:
        return self.layout.views(self.flat)

    def copy(self) -> CodecState:
        """A second stream that continues from here."""
        return CodecState(self.flat.clone(), self.layout, self.frames)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._views)


@dataclass(frozen=True)
class StateLayout:
    """Where the tensors of a decoder's states lie in their buffer; equal for decoders whose states are exchangeable."""

    cache: tuple[int, ...]  # shape of the keys, and of the values
    history: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # of all but the position

    def zeros(self, device: torch.device) -> CodecState:
        """The state before the first frame."""
        start, count, dtype = self.places[-1]
        return CodecState(torch.zeros(start + count * dtype.itemsize, dtype=torch.uint8, device=device), self)

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Keys, values, every history and the position in `flat` (bytes,) uint8."""
        shapes = (self.cache, self.cache, *self.history, ())
        return tuple(
            flat[start : start + count * dtype.itemsize].view(dtype).view(shape)
            for (start, count, dtype), shape in zip(self.places, shapes, strict=True)
        )

    def words(self) -> list[int]:
        """Where keys, values and every history start, in values of `dtype` from the start of the buffer."""
        return [start // self.dtype.itemsize for start, *_ in self.places[:-1]]

    @cached_property
    def places(self) -> list[tuple[int, int, torch.dtype]]:
        """(first byte, values, dtype) of keys, values, every history and the position."""
        places, start = [], 0
        tensors = [(math.prod(shape), self.dtype) for shape in (self.cache, self.cache, *self.history)]
        for count, dtype in (*tensors, (1, torch.int64)):
            places.append((start, count, dtype))
            start += -(-count * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return places
