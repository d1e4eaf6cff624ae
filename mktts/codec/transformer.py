"""The codec decoder's transformer: rotary attention over a sliding window, with explicit keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import Linear
from mktts.model.qwen3 import inverse_frequency, rms_norm, rotate
from mktts.spec import CodecConfig

_QUERY_BLOCK = 32  # queries whose windows are copied out at a time: 19 MB at full size


class CodecTransformer:
    """Eight layers (at full size) between two projections; weights only."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor], name: str) -> None:
        self.config = config
        self.input = Linear.load(tensors, f"{name}.input_proj")
        self.output = Linear.load(tensors, f"{name}.output_proj")
        self.norm = tensors[f"{name}.norm.weight"]
        layers = range(config.num_hidden_layers)
        self.layers = [AttentionLayer.load(tensors, f"{name}.layers.{i}", config.rms_norm_eps) for i in layers]
        self.inverse_frequency = inverse_frequency(config.head_dim, config.rope_theta).to(self.norm.device)

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys, and of the values, that a stream carries: (layers, heads, window - 1, head_dim)."""
        c = self.config
        return c.num_hidden_layers, c.num_attention_heads, c.sliding_window - 1, c.head_dim

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """`x` (n, latent), the first row at `position` (). Updates keys, values and position in place."""
        steps = torch.arange(len(x), device=x.device)
        angle = torch.outer((steps + position).float(), self.inverse_frequency)  # fp32, as upstream
        angle = torch.cat((angle, angle), -1)
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        window = self.config.sliding_window
        before = window - 1 - torch.arange(window, device=x.device)  # how far back each place of the window lies
        absent = before > (steps + position)[:, None]  # (n, window): places before the first frame
        x = self.input(x)
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            x = layer(x, layer_keys, layer_values, rotary, absent)
        position += len(x)
        return self.output(rms_norm(x, self.norm, self.config.rms_norm_eps))


@dataclass(frozen=True)
class AttentionLayer:
    """One pre-norm layer with layer scale: attention, then a SwiGLU MLP."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    attention_scale: Tensor
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_scale: Tensor
    eps: float

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, eps: float) -> AttentionLayer:
        def get(part: str) -> Tensor:
            return tensors[f"{name}.{part}"]

        def linear(*parts: str) -> Linear:
            return Linear(torch.cat([get(f"{part}_proj.weight") for part in parts]).t().contiguous(), None)

        return cls(
            input_norm=get("input_layernorm.weight"),
            qkv=linear("self_attn.q", "self_attn.k", "self_attn.v"),
            out=linear("self_attn.o"),
            attention_scale=get("self_attn_layer_scale.scale"),
            post_norm=get("post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate", "mlp.up"),
            down=linear("mlp.down"),
            mlp_scale=get("mlp_layer_scale.scale"),
            eps=eps,
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, rotary: tuple[Tensor, Tensor], absent: Tensor
    ) -> Tensor:
        """`x` (n, hidden); `keys` and `values` (heads, window - 1, head_dim) move on by n places."""
        n, (heads, _, head_dim) = len(x), keys.shape
        q, k, v = self.qkv(rms_norm(x, self.input_norm, self.eps)).view(n, 3, heads, head_dim).permute(1, 2, 0, 3)
        k, v = torch.cat((keys, rotate(k, *rotary)), 1), torch.cat((values, v), 1)
        keys.copy_(k[:, n:])
        values.copy_(v[:, n:])
        attended = window_attention(rotate(q, *rotary), k, v, absent)
        x = torch.addcmul(x, self.out(attended.transpose(0, 1).reshape(n, -1)), self.attention_scale)
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, -1)
        return torch.addcmul(x, self.down(F.silu(gate) * up), self.mlp_scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, absent: Tensor) -> Tensor:
    """Attention of query t to keys t .. t + window - 1: (heads, n, head_dim).

    `q` (heads, n, head_dim); `k`, `v` (heads, window - 1 + n, head_dim); `absent` (n, window) is True before frame 0.
    Every query sees its own copy of its window, so its sums do not depend on how many queries come with it.
    """
    window = absent.shape[1]
    blocks = []
    for start in range(0, q.shape[1], _QUERY_BLOCK):
        block = slice(start, start + _QUERY_BLOCK)
        keys, values = (t.unfold(1, window, 1)[:, block].transpose(2, 3).contiguous() for t in (k, v))
        scores = (q[:, block, None] * q.shape[-1] ** -0.5) @ keys.transpose(2, 3)  # (heads, n, 1, window)
        scores = scores.masked_fill(absent[block, None], -torch.inf).softmax(-1)
        blocks.append((scores @ values)[:, :, 0])
    return torch.cat(blocks, 1)
