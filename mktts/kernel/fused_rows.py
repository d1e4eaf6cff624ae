"""Prompt rows through a decoder stack with four kernels beside a layer's products and its attention, instead of some
fifteen of PyTorch's operators: in a graph every one of them takes 2 us and more, however few the rows."""

from __future__ import annotations

import logging
import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import BackendUnavailable
from mktts.model.qwen3 import Stack
from mktts.spec import StackConfig

_SILU_BLOCK = 1024
_HEADS = 4  # key-value heads of a program, at most
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels compute in fp32


def row_kernels(config: StackConfig, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """`mktts.kernel.rows` where its kernels take a stack's rows: on CUDA, in fp32 or less, with widths that are powers
    of two. None elsewhere, and, with a warning, where triton is missing or cannot build them."""
    widths = (config.hidden_size, config.head_dim)
    if device.type != "cuda" or dtype not in _DTYPES or any(width.bit_count() != 1 for width in widths):
        return None
    try:
        return _triton_kernels(device)
    except BackendUnavailable as reason:
        logging.getLogger(__name__).warning("prompt rows take plain operators: %s", reason)
        return None


class FusedRows:
    """`Stack.layer` over all layers, with the same roundings. One thread and one CUDA stream at a time."""

    def __init__(self, stack: Stack, rotary: Tensor, kernels: ModuleType) -> None:
        """rotary (positions, 2, head_dim), in the stack's dtype: of all positions of the workspace, cosines, then
        sines, whose first half is negated. kernels: as from `row_kernels`."""
        self._stack, self._kernels = stack, kernels
        self._cos, self._sin = rotary[:, 0], rotary[:, 1, stack.config.head_dim // 2 :]

    def run(self, rows: Tensor, index: Tensor, mask: Tensor, kv: Tensor) -> Tensor:
        """rows (R, H) at positions index (R,) int64 -> their hidden states (R, H), normed by the stack's last norm.

        mask (1, 1, R, extent): added to scores. kv (2, layers, kv heads, positions, head_dim), contiguous: takes the
        rows' keys and values, and gives those of the first `extent` positions. All but `index` in the stack's dtype.
        """
        stack, layers = self._stack, kv.shape[1]
        x, normed = rows.clone(), torch.empty_like(rows)
        w = stack.layer_weights(0)
        self._add_norm(x, None, w.input_norm, normed)
        for layer, (keys, values) in enumerate(kv.unbind(1), 1):
            attended = self._attend(F.linear(normed, w.qkv), w.q_norm, w.k_norm, index, mask, keys, values)
            self._add_norm(x, F.linear(attended, w.o), w.post_norm, normed)
            delta = F.linear(self._gated(F.linear(normed, w.gate_up)), w.down)
            if layer < layers:
                w = stack.layer_weights(layer)  # may overwrite the matrices: all products with them are queued by now
            self._add_norm(x, delta, w.input_norm if layer < layers else stack.norm, normed)
        return normed

    def _add_norm(self, x: Tensor, delta: Tensor | None, norm: Tensor, out: Tensor) -> None:
        """x (R, H) += delta (R, H) where there is one, then out (R, H) = RMSNorm(x) * norm (H,)."""
        adds, eps = delta is not None, self._stack.config.rms_norm_eps
        self._kernels.add_norm[(len(x),)](
            x, delta if adds else x, norm, out, eps, N=x.shape[1], ADDS=adds, num_warps=4
        )  # fmt: skip

    def _gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up (R, I) of gate_up (R, 2 I)."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        grid = len(out), -(-out.shape[1] // _SILU_BLOCK)
        self._kernels.silu_mul[grid](gate_up, out, N=out.shape[1], BLOCK=_SILU_BLOCK)
        return out

    def _attend(
        self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, index: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """qkv (R, (heads + 2 kv heads) head_dim) -> the heads' outputs (R, heads * head_dim)."""
        c, rows, extent = self._stack.config, len(qkv), mask.shape[-1]
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        tile = math.gcd(kv_heads, _HEADS)
        # Batch: key-value head; heads: the query heads that share it, so that keys and values are expanded, not copied.
        q = qkv.new_empty(kv_heads, heads // kv_heads, rows, c.head_dim)
        turns = self._cos, self._sin, self._cos.stride(0)
        self._kernels.turn_heads[rows, kv_heads // tile](
            qkv, q_norm, k_norm, *turns, index, q, keys, values, c.rms_norm_eps, len(self._cos),
            HEADS=heads, KV_HEADS=kv_heads, D=c.head_dim, TILE=tile, num_warps=1,
        )  # fmt: skip
        k, v = (t[:, None, :extent].expand(-1, q.shape[1], -1, -1) for t in (keys, values))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attended.permute(2, 0, 1, 3).reshape(rows, -1)


def _triton_kernels(device: torch.device) -> ModuleType:
    try:
        from mktts.kernel import rows
    except ImportError as error:
        raise BackendUnavailable(f"the kernels between their products need triton: {error}") from None
    try:  # triton compiles its launchers with the machine's own compiler: better found wanting here than in a capture
        some = torch.zeros(2, 16, device=device)
        with torch.cuda.device(device):
            rows.silu_mul[1, 1](some[:1], some[1:], N=8, BLOCK=16)
    except Exception as error:  # whatever triton, its compiler or its cache folder raise
        raise BackendUnavailable(
            f"triton cannot build the kernels between their products here ({type(error).__name__}: {error})"
        ) from error
    return rows
