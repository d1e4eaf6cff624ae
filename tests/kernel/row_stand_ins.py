"""What mktts.kernel.rows computes, in plain PyTorch and launched alike: to test a pass without a GPU, and the kernels
against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import rms_norm, rotate


class _Launched:
    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._work, grid)


@_Launched
def add_norm(grid, x: Tensor, delta: Tensor, weight: Tensor, out: Tensor, eps, *, N, ADDS, num_warps) -> None:
    assert grid == (len(x),) and N == x.shape[1]
    if ADDS:
        x += delta
    out.copy_(rms_norm(x, weight, eps))


@_Launched
def silu_mul(grid, gate_up: Tensor, out: Tensor, *, N, BLOCK) -> None:
    assert grid[0] == len(out) and grid[1] * BLOCK >= N == out.shape[1]
    gate, up = gate_up.chunk(2, 1)
    out.copy_(F.silu(gate) * up)


@_Launched
def turn_heads(
    grid, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, turns_stride, index: Tensor,
    q_out: Tensor, keys: Tensor, values: Tensor, eps, positions, *, HEADS, KV_HEADS, D, TILE, num_warps,
) -> None:  # fmt: skip
    assert grid == (len(qkv), KV_HEADS // TILE) and KV_HEADS % TILE == 0
    assert turns_stride == cos.stride(0) == sin.stride(0) and positions == keys.shape[1] == values.shape[1]
    q, k, v = qkv.view(len(qkv), -1, D).transpose(0, 1).split((HEADS, KV_HEADS, KV_HEADS))
    half = D // 2
    cos, sin = (t[index, :half].repeat(1, 2) for t in (cos, sin))
    q_out.copy_(rotate(rms_norm(q, q_norm, eps), cos, sin).view_as(q_out))
    keys[:, index] = rotate(rms_norm(k, k_norm, eps), cos, sin)
    values[:, index] = v
