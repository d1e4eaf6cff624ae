"""Prompt rows through a decoder stack with four kernels beside a layer's products and its attention, instead of some
fifteen of PyTorch's operators: in a graph every one of them takes 2 us and more, however few the rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import Stack
from mktts.spec import StackConfig

_SILU_BLOCK = 1024
_HEADS = 4  # key-value heads of a program, at most


def fits(config: StackConfig, device: torch.device) -> bool:
    """Whether the kernels take such rows: widths that are powers of two, Triton, and a GPU."""
    widths = (config.hidden_size, config.head_dim)
    if device.type != "cuda" or any(width.bit_count() != 1 for width in widths):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


class FusedRows:
    """`Stack.layer` over all layers, with the same roundings. One thread and one CUDA stream at a time."""

    def __init__(self, stack: Stack, rotary: Tensor) -> None:
        """rotary (positions, 2, head_dim): of all positions of the workspace, cosines, then sines, whose first half is
        negated."""
        self._stack = stack
        self._cos, self._sin = rotary[:, 0], rotary[:, 1, stack.config.head_dim // 2 :]

    def run(self, rows: Tensor, index: Tensor, mask: Tensor, kv: Tensor) -> Tensor:
        """rows (R, H) at positions index (R,) -> their hidden states (R, H), normed by the stack's last norm.

        mask (1, 1, R, extent): added to scores. kv (2, layers, kv heads, positions, head_dim): takes the rows' keys and
        values, and gives those of the first `extent` positions.
        """
        stack, eps = self._stack, self._stack.config.rms_norm_eps
        x, normed = rows.clone(), torch.empty_like(rows)
        w = stack.layer_weights(0)
        self._add_norm(x, None, w.input_norm, normed, eps)
        for layer, (keys, values) in enumerate(kv.unbind(1)):
            attended = self._attend(F.linear(normed, w.qkv), w.q_norm, w.k_norm, index, mask, keys, values)
            self._add_norm(x, F.linear(attended, w.o), w.post_norm, normed, eps)
            delta = F.linear(self._gated(F.linear(normed, w.gate_up)), w.down)
            last = layer + 1 == len(kv[0])
            w = w if last else stack.layer_weights(layer + 1)  # may overwrite the matrices, once they are multiplied by
            self._add_norm(x, delta, stack.norm if last else w.input_norm, normed, eps)
        return normed

    @staticmethod
    def _add_norm(x: Tensor, delta: Tensor | None, norm: Tensor, out: Tensor, eps: float) -> None:
        from mktts.kernel.rows import add_norm

        adds = delta is not None
        add_norm[(len(x),)](x, delta if adds else x, norm, out, eps, N=x.shape[1], ADDS=adds, num_warps=4)

    @staticmethod
    def _gated(gate_up: Tensor) -> Tensor:
        from mktts.kernel.rows import silu_mul

        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        silu_mul[(len(out), -(-out.shape[1] // _SILU_BLOCK))](gate_up, out, N=out.shape[1], BLOCK=_SILU_BLOCK)
        return out

    def _attend(
        self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, index: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        from mktts.kernel.rows import turn_heads

        c, rows, extent = self._stack.config, len(qkv), mask.shape[-1]
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        tile = math.gcd(kv_heads, _HEADS)
        q = qkv.new_empty(kv_heads, heads // kv_heads, rows, c.head_dim)
        turns = self._cos, self._sin, self._cos.stride(0)
        turn_heads[(rows, kv_heads // tile)](
            qkv, q_norm, k_norm, *turns, index, q, keys, values, c.rms_norm_eps, len(self._cos),
            HEADS=heads, KV_HEADS=kv_heads, D=c.head_dim, TILE=tile, num_warps=1,
        )  # fmt: skip
        k, v = (t[:, None, :extent].expand(-1, q.shape[1], -1, -1) for t in (keys, values))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attended.permute(2, 0, 1, 3).reshape(rows, -1)
