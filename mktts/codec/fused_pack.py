"""What the fused codec decoder prepares once: weights for fp16 matrix units, tile shapes, and tables of copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mktts.codec.layers import CausalConv, Linear

LOW_SCALE = 2048  # 2^11: what fp16's 11 bits leave of a number, brought back to its size
MOVE_WORDS = 4096  # values that one program copies

_BUSY_PROGRAMS = 160  # enough for the processors of a large GPU (132 on an H200); fewer programs split the sum
_SPLIT_DEPTH = 512  # the shortest sum that a program is started for


@dataclass(frozen=True)
class Packed:
    """A linear layer or causal convolution: (outs, depth), depth = taps * channels, the oldest tap first.

    An overlapping transposed convolution is one of two taps, whose row of outputs is the stride's outputs in order.
    """

    high: Tensor  # (outs, depth) fp16
    low: Tensor | None  # (outs, depth) fp16: LOW_SCALE times what `high` rounds away; None for one fp16 product
    bias: Tensor | None  # (outs,) fp32
    channels: int
    dilation: int = 1


@dataclass(frozen=True)
class Tile:
    """How a product is cut: a program makes `rows` x `outs` values over `part` of the depth, `depth` at a time."""

    rows: int
    outs: int
    depth: int
    parts: int
    part: int
    even: bool  # every block of the depth lies within one tap, and the last one is whole
    warps: int
    stages: int


def tile(rows: int, outs: int, depth: int, channels: int, splittable: bool = True) -> Tile:
    """The cut of a product (rows, depth) @ (depth, outs): small tiles while they are needed to fill a GPU."""

    def programs(high: int, wide: int) -> int:
        return -(-rows // high) * -(-outs // wide)

    if rows <= 16:
        high, wide = 16, 32 if programs(16, 32) >= 64 else 16
    elif rows > 32 and outs % 64 == 0 and programs(64, 64) >= 72:
        high, wide = 64, 64
    else:
        high, wide = (64, 32) if programs(64, 32) >= 240 else (32, 32)
    block = next((size for size in ((128, 64, 32, 16) if high == 16 else (64, 32, 16)) if channels % size == 0), None)
    even, block = block is not None and depth % block == 0, block or 16
    parts = 1
    if splittable and depth >= 4 * _SPLIT_DEPTH:
        parts = max(1, min(_BUSY_PROGRAMS // programs(high, wide), depth // _SPLIT_DEPTH))
    part = -(-depth // (parts * block)) * block
    stages = 3 if high * wide == 64 * 64 else 4  # of loads in flight: within the 99 KB of shared memory of small GPUs
    return Tile(high, wide, block, -(-depth // part), part, even, 2 if wide == 16 else 4, stages)


def pack(linear: Linear, channels: int, split: bool, dilation: int = 1, norm: Tensor | None = None) -> Packed:
    """`linear` as the kernels take it; `norm` (in,): the weight of the RMSNorm before it, multiplied in."""
    weight = linear.weight if norm is None else linear.weight * norm[:, None]
    weight = weight.t().contiguous()
    high = weight.half()
    low = ((weight - high.float()) * LOW_SCALE).half() if split else None
    return Packed(high, low, linear.bias, channels, dilation)


def pack_conv(conv: CausalConv, split: bool) -> Packed:
    return pack(conv.taps, len(conv.taps.weight) // conv.kernel, split, conv.dilation)


def copies(pieces: Iterable[tuple[int, int, int]], device: torch.device) -> Tensor:
    """The table of `fused_kernels.move` for pieces (from, to, count) of any size: (programs, 3) int64."""
    table = [
        (source + start, target + start, min(MOVE_WORDS, count - start))
        for source, target, count in pieces
        for start in range(0, count, MOVE_WORDS)
    ]
    return torch.tensor(table, dtype=torch.int64).to(device)
