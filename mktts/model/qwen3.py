"""One Qwen3 decoder stack in plain PyTorch, rounding where transformers 4.57 rounds (sdpa attention).

The talker and the code predictor are both this stack. Batch 1; the key-value cache is static and belongs
to the caller. In bf16 every intermediate named in upstream's modules is rounded to bf16, RMSNorm computes in
fp32, and rotary angles are fp32: that makes greedy codes equal to upstream's on CPU.
Talker M-RoPE has equal temporal, height and width positions, so it is ordinary RoPE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import CapacityError
from mktts.spec import StackConfig


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer; shapes as in the checkpoint, (out, in).

    `qkv` and `gate_up` are set by `fused` only: q, k, v (gate, up) are then row ranges of them.
    """

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    qkv: Tensor | None = None
    gate_up: Tensor | None = None

    @classmethod
    def read(cls, get: Callable[[str], Tensor], index: int) -> LayerWeights:
        """`get`: a stack's tensor by its name in the stack."""
        return cls(**{field: get(f"layers.{index}.{name}.weight") for field, name in _LAYER_NAMES.items()})

    def fused(self) -> LayerWeights:
        """The same weights as fewer, larger matrices. Copies: the separate ones are free once nobody holds them."""
        qkv, gate_up = torch.cat((self.q, self.k, self.v)), torch.cat((self.gate, self.up))
        q, k, v = qkv.split([len(self.q), len(self.k), len(self.v)])
        gate, up = gate_up.split([len(self.gate), len(self.up)])
        return replace(self, q=q, k=k, v=v, gate=gate, up=up, qkv=qkv, gate_up=gate_up)


_LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass
class KVCache:
    """Keys (rotated) and values of one stream: (layers, 1, kv heads, capacity, head_dim); `length` are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def copy(self) -> KVCache:
        return KVCache(self.keys.clone(), self.values.clone(), self.length)


class Stack(ABC):
    """The arithmetic of one decoder stack, wherever its weights are."""

    def __init__(self, config: StackConfig, norm: Tensor) -> None:
        """`norm` (H,): the weight of the final norm; its device and dtype are the stack's."""
        self.config = config
        self.norm = norm
        self.device, self.dtype = norm.device, norm.dtype
        self._inverse_frequency = inverse_frequency(config.head_dim, config.rope_theta).to(norm.device)

    @abstractmethod
    def layer_weights(self, index: int) -> LayerWeights:
        """Fused weights of a layer, on the device. Their matrices may be overwritten by the next call."""

    def rotary(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions start..end - 1, (T, head_dim) each."""
        positions = torch.arange(start, end, device=self.device).float()
        angle = torch.outer(positions, self._inverse_frequency)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


class Qwen3Stack(Stack):
    """`num_hidden_layers` decoder layers and the final norm, read from `tensors` under `prefix`."""

    def __init__(
        self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        def get(name: str) -> Tensor:
            return tensors[prefix + name].to(device, dtype)

        super().__init__(config, get("norm.weight"))
        self.layers = [LayerWeights.read(get, index) for index in range(config.num_hidden_layers)]

    def layer_weights(self, index: int) -> LayerWeights:
        """As `Stack.layer_weights`; the layer is fused in place, with one more layer in memory while that is done.

        Sums may then be ordered otherwise: in fp32 on the CPU results stay within 1e-5 of the separate products'.
        """
        if self.layers[index].qkv is None:
            self.layers[index] = self.layers[index].fused()
        return self.layers[index]

    def new_cache(self, positions: int) -> KVCache:
        """A cache for `positions` tokens. Raises CapacityError beyond the model's own limit."""
        c = self.config
        if positions > c.max_position_embeddings:
            raise CapacityError(
                f"{positions} positions asked for, the model has {c.max_position_embeddings}: "
                "shorten the text or lower max_frames"
            )
        shape = (c.num_hidden_layers, 1, c.num_key_value_heads, positions, c.head_dim)
        empty = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return KVCache(*empty)

    def forward(self, x: Tensor, cache: KVCache) -> Tensor:
        """Appends `x` (1, T, H) to the cache; returns the normed hidden states (1, T, H).

        Raises CapacityError when the cache is full.
        """
        end, capacity = cache.length + x.shape[1], cache.keys.shape[3]
        if end > capacity:
            raise CapacityError(f"key-value cache holds {capacity} positions, position {end} was asked for")
        turns = self.rotary(cache.length, end)
        for w, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = self.layer(w, x, turns, keys, values, end)
        cache.length = end
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def layer(
        self, w: LayerWeights, x: Tensor, turns: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, end: int
    ) -> Tensor:
        """One decoder layer over `x` (1, T, H) at positions end - T to end - 1; `turns`: their cosine and sine."""
        eps = self.config.rms_norm_eps
        x = x + F.linear(self._attend(w, rms_norm(x, w.input_norm, eps), turns, keys, values, end), w.o)
        h = rms_norm(x, w.post_norm, eps)
        return x + F.linear(F.silu(F.linear(h, w.gate)) * F.linear(h, w.up), w.down)

    def _attend(
        self, w: LayerWeights, h: Tensor, turns: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, end: int
    ) -> Tensor:
        c, rows = self.config, h.shape[1]

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(h, weight).view(1, rows, count, c.head_dim)

        q = rms_norm(heads(w.q, c.num_attention_heads), w.q_norm, c.rms_norm_eps).transpose(1, 2)
        k = rms_norm(heads(w.k, c.num_key_value_heads), w.k_norm, c.rms_norm_eps).transpose(1, 2)
        keys[:, :, end - rows : end] = rotate(k, *turns)
        values[:, :, end - rows : end] = heads(w.v, c.num_key_value_heads).transpose(1, 2)
        past = end - rows
        mask = None  # several rows behind others: each sees those and itself, which is_causal does not mean
        if rows > 1 and past:
            mask = torch.ones(rows, end, dtype=torch.bool, device=h.device).tril(past)
        attended = F.scaled_dot_product_attention(
            rotate(q, *turns),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            is_causal=rows > 1 and mask is None,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).reshape(1, rows, -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, normalised in at least fp32 and rounded before the weight, as Qwen3RMSNorm."""
    return weight * unit_rms(x, eps)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, rounded to x's dtype: one kernel on CUDA. No weight, as that would skip
    the rounding before it."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def inverse_frequency(head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies theta^(-2 i / head_dim), (head_dim / 2,) fp32; computed on the CPU: the same bits anywhere."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, NeoX halves (i, i + head_dim / 2). `x` (..., heads, T, head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
