"""Qwen3 decoder stacks in plain PyTorch, over rows of any number of streams; the caller owns keys and values.

`Qwen3Stack` rounds where transformers 4.57 rounds (sdpa attention): in bf16 every intermediate named in upstream's
modules; RMSNorm and rotary angles are computed in fp32. On a CPU the greedy codes of one stream therefore equal
upstream's. The talker's M-RoPE has equal temporal, height and width positions, so it is ordinary RoPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import CapacityError
from mktts.spec import NUM_CODEBOOKS, StackConfig

# With fewer rows MKL sums in another order: with one on all processors, with two or three on some (AMD, AVX-512).
LEAST_ROWS = 4
_LONGEST_SUM = 768  # terms
_LARGE = 1 << 20  # elements of a matrix too large for a core's cache


@dataclass(frozen=True)
class Linear:
    """x @ weight + bias. In fp32 on a CPU, a row's result does not depend on the number of rows: BLAS splits long sums
    depending on that number, so sums are split here, short enough for MKL, and rows are padded to `LEAST_ROWS`."""

    weight: Tensor  # (in, out), or packed by oneDNN
    bias: Tensor | None = None

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, bias: bool = True) -> Linear:
        """Builds it from a linear layer, or a convolution of kernel size 1, called `name` in `tensors`."""
        weight = tensors[f"{name}.weight"]
        return cls(weight.flatten(1).t().contiguous(), tensors[f"{name}.bias"] if bias else None)

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Builds it from `weight` (out, in) in fp32, of which it keeps a copy. A large matrix is packed by oneDNN: MKL
        would copy it for every product, which takes twice the time of a row."""
        known = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
        if known and weight.numel() >= _LARGE:
            return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LEAST_ROWS), bias)
        return cls(weight.t().contiguous(), bias)

    def __call__(self, x: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`x` (..., in) -> (..., out). For rows (R, in), the product without bias can be added in place to `onto`, or
        the result written to `out`; R must then be at least LEAST_ROWS unless the matrix is packed."""
        least, pieces = self._cut
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        count, y = rows.shape[0], onto
        if count < least:
            rows = torch.cat((rows, rows[:1].expand(least - count, -1)))
        if pieces:
            parts = (rows,) if len(pieces) == 1 else rows.split(_LONGEST_SUM, 1)
            for part, weight in zip(parts, pieces, strict=True):
                if y is not None:
                    y = y.addmm_(part, weight)
                elif self.bias is not None:
                    y = torch.addmm(self.bias, part, weight, out=out)
                else:
                    y = torch.mm(part, weight, out=out)
        elif onto is not None:
            y = torch.ops.mkldnn._linear_pointwise.binary(rows, onto, self.weight, None, "add")
        else:
            y = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            y = y if out is None else out.copy_(y)
        if count < least:
            y = y[:count]
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    @cached_property
    def _cut(self) -> tuple[int, tuple[Tensor, ...]]:
        """The least number of rows of a product, and the pieces of the weight to multiply in turn; () if packed."""
        if self.weight.is_mkldnn:
            return 1, ()
        if self.weight.device.type != "cpu" or self.weight.dtype == torch.bfloat16:
            return 1, (self.weight,)
        return LEAST_ROWS, self.weight.split(_LONGEST_SUM)


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer; shapes as in the checkpoint, (out, in). Only `fused` sets `qkv` and `gate_up`;
    q, k, v (gate, up) are then views of their rows."""

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
        """Reads layer `index`. get: returns a tensor by its name within the stack."""
        return cls(**{field: get(f"layers.{index}.{name}.weight") for field, name in _LAYER_NAMES.items()})

    def fused(self) -> LayerWeights:
        """Returns the same weights as fewer, larger matrices. These are copies, so the separate ones can be freed."""
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
CHUNK_POSITIONS = 64  # a growing cache grows by this many positions


class Place(NamedTuple):
    """Views of a cache's layer for `count` new rows of each of B streams, after `past` positions. new: keys and values
    of those, (2, B, kv heads, count, head_dim). keys, values: of all rows, (B, kv heads, past + count, head_dim)."""

    past: int
    count: int
    new: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class KVCache:
    """Keys (rotated) and values of B streams at the same position. length: positions filled. limit: most positions.
    memory: keys and values, (layers, 2, B, kv heads, capacity, head_dim); reallocated on demand, up to the limit."""

    memory: Tensor
    limit: int
    length: int = 0

    def places(self, count: int) -> list[Place]:
        """Reserves `count` more rows of each stream in every layer. Raises CapacityError when the cache is full."""
        past, end = self.length, self.length + count
        if end > self.limit:
            raise CapacityError(f"key-value cache holds {self.limit} positions, position {end} was asked for")
        if end > self.memory.shape[4]:
            shape = list(self.memory.shape)
            shape[4] = min(-(-end // CHUNK_POSITIONS) * CHUNK_POSITIONS, self.limit)
            longer = self.memory.new_empty(shape)
            longer[..., :past, :] = self.memory[..., :past, :]
            self.memory = longer
        self.length = end
        new = self.memory.narrow(4, past, count).unbind()
        keys, values = (part.unbind() for part in self.memory.narrow(4, 0, end).unbind(1))
        return [Place(past, count, *views) for views in zip(new, keys, values, strict=True)]


class Stack:
    """The arithmetic of one decoder stack, independent of where its weights are stored. A subclass has `layer_weights`,
    which returns a layer's fused weights on the device, valid until the next call."""

    def __init__(self, config: StackConfig, norm: Tensor) -> None:
        """norm: the weight of the final norm, (H,); its device and dtype are the stack's."""
        self.config, self.norm = config, norm
        self.device, self.dtype = norm.device, norm.dtype
        self._inverse_frequency = inverse_frequency(config.head_dim, config.rope_theta).to(norm.device)

    def rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the first positions, (positions, head_dim) each."""
        angle = torch.outer(torch.arange(positions, device=self.device).float(), self._inverse_frequency)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


class Qwen3Stack(Stack):
    """`num_hidden_layers` decoder layers and the final norm, read from `tensors` under `prefix`."""

    exact = True  # whether its rounding equals upstream's
    _read = staticmethod(LayerWeights.read)

    def __init__(
        self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        def get(name: str) -> Tensor:
            return tensors[prefix + name].to(device, dtype)

        super().__init__(config, get("norm.weight"))
        self.layers = [self._read(get, index) for index in range(config.num_hidden_layers)]
        self._table = self._turn_table(NUM_CODEBOOKS)

    def layer_weights(self, index: int) -> LayerWeights:
        """The weights of a layer, fused in place. The order of sums may then differ: in fp32 on the CPU, results stay
        within 1e-5 of those of separate products."""
        if self.layers[index].qkv is None:
            self.layers[index] = self.layers[index].fused()
        return self.layers[index]

    @staticmethod
    def linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """A linear layer outside the stack, weight (out, in): rows (R, in) -> (R, out)."""
        return lambda x: F.linear(x, weight, bias)

    def new_cache(self, positions: int, streams: int | None = None, grows: bool = False) -> KVCache:
        """Returns a cache for `positions` tokens. grows: allocate memory on demand. streams: their number in a frame of
        the code predictor, whose cache is valid until the next one is requested; None: a lasting cache of one stream.
        Raises CapacityError beyond the model's own limit."""
        c = self.config
        if positions > c.max_position_embeddings:
            asked = f"{positions} positions asked for, the model has {c.max_position_embeddings}"
            raise CapacityError(f"{asked}: shorten the text or lower max_frames")
        shape = (c.num_hidden_layers, 2, streams or 1, c.num_key_value_heads, 0 if grows else positions, c.head_dim)
        return KVCache(torch.empty(shape, dtype=self.dtype, device=self.device), positions)

    def advance(self, x: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        """Appends rows `x` (R, H) to the caches, in order, `counts[i]` to each stream of cache i -> (R, H), normed. If
        a frame's cache has more streams than were requested, the rows of the extra streams follow.
        Raises CapacityError when a cache is full."""
        by_cache = [cache.places(count) for cache, count in zip(caches, counts, strict=True)]
        positions = [
            position
            for (first, *_) in by_cache
            for _ in range(first.keys.shape[0])
            for position in range(first.past, first.past + first.count)
        ]
        turns = self.turns(positions)
        for w, *places in zip(self.layers, *by_cache, strict=True):
            x = self.layer(w, x, turns, places)
        return self.final(x)

    def layer(self, w: LayerWeights, x: Tensor, turns: tuple[Tensor, ...], places: Sequence[Place]) -> Tensor:
        """Applies one decoder layer to rows `x` (R, H). turns: as returned by `turns`."""
        c, h = self.config, rms_norm(x, w.input_norm, self.config.rms_norm_eps)
        q, k, v = (F.linear(h, weight).view(x.shape[0], -1, c.head_dim) for weight in (w.q, w.k, w.v))
        q = rotate(rms_norm(q, w.q_norm, c.rms_norm_eps), *turns)
        k = rotate(rms_norm(k, w.k_norm, c.rms_norm_eps), *turns)
        if len(places) == 1:
            rows = attended(q, k, v, places[0])
        else:
            sizes = [place.keys.shape[0] * place.count for place in places]
            pieces = zip(*(part.split_with_sizes(sizes) for part in (q, k, v)), places, strict=True)
            rows = torch.cat([attended(*piece) for piece in pieces])
        x = x + F.linear(rows, w.o)
        h = rms_norm(x, w.post_norm, c.rms_norm_eps)
        return x + F.linear(F.silu(F.linear(h, w.gate)) * F.linear(h, w.up), w.down)

    def turns(self, positions: Sequence[int]) -> tuple[Tensor, ...]:
        most = max(positions)
        if most >= len(self._table[0]):
            self._table = self._turn_table(2 * most + 2)
        at = torch.tensor(positions, device=self.device)
        return tuple(part.index_select(0, at) for part in self._table)

    def _turn_table(self, positions: int) -> tuple[Tensor, ...]:
        """Cosine and sine of positions 0 to `positions` - 1, (positions, 1, head_dim) each."""
        return tuple(part[:, None] for part in self.rotary(positions))

    def final(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm, self.config.rms_norm_eps)


def attended(q: Tensor, k: Tensor, v: Tensor, place: Place, scale: float | None = None) -> Tensor:
    """Causal attention of rows (n, heads, head_dim) to the cache and themselves -> (n, heads * head_dim). Writes keys
    and values to `place` first. scale: factor of the scores; None: 1 / sqrt(head_dim)."""
    shape = place.keys.shape[0], place.count, -1, q.shape[-1]
    q, k, v = q.reshape(shape).transpose(1, 2), k.reshape(shape).transpose(1, 2), v.reshape(shape).transpose(1, 2)
    place.new[0], place.new[1] = k, v
    mask = None  # needed for several rows after cached ones: is_causal would align the triangle at the top left
    if place.count > 1 and place.past:
        mask = torch.ones(place.count, place.past + place.count, dtype=torch.bool, device=q.device).tril(place.past)
    causal = place.count > 1 and mask is None
    found = F.scaled_dot_product_attention(
        q, place.keys, place.values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2).flatten(2).flatten(0, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: normalised in at least fp32, rounded, then weighted, as in Qwen3RMSNorm."""
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)  # F.rms_norm with a weight would skip the rounding


def inverse_frequency(head_dim: int, theta: float) -> Tensor:
    """Rotary frequencies theta^(-2 i / head_dim), (head_dim / 2,) fp32; computed on the CPU for equal bits anywhere."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding, NeoX halves (i, i + head_dim / 2), to `x` (..., head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
