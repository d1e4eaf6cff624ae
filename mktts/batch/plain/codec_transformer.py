"""The codec decoder's transformer over one row of many streams, each at a position of its own.

The weights are those of `mktts.codec.transformer`. A lane's keys and values move on by a place with every row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import AttentionLayer, CodecTransformer
from mktts.model.qwen3 import rms_norm, rotate


class LaneTransformer:
    """One row of every lane: `x` (B, latent) at `position` (B, 1) int64 -> (B, latent)."""

    def __init__(self, transformer: CodecTransformer) -> None:
        self._transformer = transformer
        norm, config = transformer.norm, transformer.config
        window = config.sliding_window
        self._before = window - 1 - torch.arange(window, device=norm.device)  # how far back each place lies
        self._root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(self._root * math.sqrt(config.rms_norm_eps)).to(norm)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """`keys` and `values` (B, layers, heads, window - 1, head_dim) move on by one place, `position` by one, in
        place."""
        t = self._transformer
        angle = position.float() * t.inverse_frequency
        angle = torch.cat((angle, angle), -1)[:, None, None]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # (B, 1, 1, head_dim) each
        absent = (self._before > position)[:, None, None]  # (B, 1, 1, window): places before the first frame
        x = t.input(x)
        for layer, layer_keys, layer_values in zip(t.layers, keys.unbind(1), values.unbind(1), strict=True):
            x = self._layer(layer, x, layer_keys, layer_values, rotary, absent)
        position += 1
        return t.output(self._normed(x, t.norm))

    def _layer(
        self,
        layer: AttentionLayer,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor],
        absent: Tensor,
    ) -> Tensor:
        """`x` (B, hidden); `keys` and `values` (B, heads, window - 1, head_dim)."""
        lanes, heads, _, head_dim = keys.shape
        qkv = layer.qkv(self._normed(x, layer.input_norm)).view(lanes, 3, heads, head_dim)
        q, k = rotate(qkv[:, :2], *rotary).unbind(1)
        k = torch.cat((keys, k[:, :, None]), 2)
        v = torch.cat((values, qkv[:, 2, :, None]), 2)
        keys.copy_(k[:, :, 1:])
        values.copy_(v[:, :, 1:])
        scores = (q[:, :, None] * head_dim**-0.5) @ k.transpose(2, 3)  # (B, heads, 1, window)
        attended = scores.masked_fill_(absent, -torch.inf).softmax(-1) @ v
        x = torch.addcmul(x, layer.out(attended.reshape(lanes, -1)), layer.attention_scale)
        gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, -1)
        return torch.addcmul(x, layer.down(F.silu(gate) * up), layer.mlp_scale)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm; in fp32 of half as many operators, the root of the width apart."""
        if x.dtype != torch.float32:
            return rms_norm(x, weight, self._transformer.config.rms_norm_eps)
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return (x / length).mul_(weight * self._root)
