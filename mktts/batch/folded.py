"""The stack of `TorchLanes` in fp32: half as many operators, which cost by the call, and rows that never feel others.
Norm weights are multiplied into the matrices behind them; a head's halves lie interleaved: its rotation is one complex
product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import LEAST_ROWS, KVCache, LayerWeights, Linear, Place, Qwen3Stack, attended, filled_up
from mktts.spec import NUM_CODEBOOKS, StackConfig


@dataclass(frozen=True)
class FoldedWeights:
    """One layer of a `FoldedStack`; D head_dim, K key and value heads, each with G query heads. Heads are ordered by
    key head: its G query heads, itself, its value head."""

    qkv: Linear  # H -> K (G + 2) D
    head_norm: Tensor  # (K, G + 1, D)
    o: Linear
    gate_up: Linear
    down: Linear


class _LayerMemory:
    """What a layer of a `FoldedStack` makes of rows: memory, and its views, each made once, as they cost what operators
    do."""

    def __init__(self, stack: FoldedStack, heads: Tensor, count: int, like: _LayerMemory | None = None) -> None:
        """heads (R, K, G + 2, D), of which attention reads the first `count` rows. like: of as many rows, whose memory
        that is in use only between two operators is used here too."""
        self.heads, self.flat = heads, heads.flatten(1)
        self.turned = heads[:count, :, :-1]  # normed and rotated
        self.unit = self.turned.new_empty(self.turned.shape) if like is None else like.unit
        self.gated = heads.new_empty(len(heads), 2 * stack.config.intermediate_size) if like is None else like.gated
        self.gate, self.up = self.gated.chunk(2, -1)
        # (count, K, G + 1, D / 2) complex, the same memory
        self.pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (self.unit, self.turned)]
        # of a frame's position: queries (B K, G, D), keys (B K, D, positions) and values (B K, positions, D)
        self.attends: tuple[Tensor, Tensor, Tensor] | None = None
        # of rows without others of their stream: keys and values (2, 1, K, 1, D) and queries (1, K, G, D) of each
        self.single: list[tuple[Tensor, Tensor]] = []


class _FrameCache(KVCache):
    """A cache of B streams whose memory is that in which a `FoldedStack` makes the heads of every position."""

    def __init__(self, stack: FoldedStack, heads: Tensor) -> None:
        """heads: (layers, 16, B, K, G + 2, D)."""
        streams, memory = heads.shape[2], None
        super().__init__(heads[..., -2:, :].permute(0, 4, 2, 3, 1, 5), NUM_CODEBOOKS)
        self.steps = []  # of every position: what its rows are turned by, and the memory of every layer
        for position in range(NUM_CODEBOOKS):
            layers = []
            for of_layer in heads:
                rows = of_layer[: position + 1].flatten(1, 2).transpose(0, 1)  # (B K, positions, G + 2, D)
                memory = _LayerMemory(stack, of_layer[position], streams, memory)
                memory.attends = rows[:, -1, :-2], rows[:, :, -2].transpose(1, 2), rows[:, :, -1]
                layers.append(memory)
            self.steps.append((stack.turns([position] * streams), layers))


class FoldedStack(Qwen3Stack):
    """A `Qwen3Stack` up to rounding, on a CPU. Rows that a pass is given may be overwritten by it."""

    exact = False
    linear = staticmethod(Linear.packed)

    def __init__(
        self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, prefix, device, dtype)
        c = config
        self.norm = self.norm * math.sqrt(c.hidden_size)
        self._floor = {n: torch.tensor(math.sqrt(n * c.rms_norm_eps)) for n in (c.hidden_size, c.head_dim)}
        w = self.layers[0]
        packed = all(linear.weight.is_mkldnn for linear in (w.qkv, w.o, w.gate_up, w.down))
        self._least = 1 if packed else LEAST_ROWS  # rows of a pass
        heads = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads + 2, c.head_dim
        self._memory = self.norm.new_empty(c.num_hidden_layers, NUM_CODEBOOKS, 0, *heads)  # of every frame
        self._frames: dict[int, _FrameCache] = {}  # by streams

    def _read(self, get: Callable[[str], Tensor], index: int) -> FoldedWeights:
        c, w = self.config, LayerWeights.read(get, index)
        kinds, group = (c.num_key_value_heads, -1, c.head_dim), c.num_attention_heads // c.num_key_value_heads
        by_head = torch.cat([part.view(*kinds, c.hidden_size) for part in (w.q, w.k, w.v)], 1)  # (K, G + 2, D, H)
        by_head[:, :-1] = _interleaved(by_head[:, :-1], 2)
        head_norm = _interleaved(torch.stack([*[w.q_norm] * group, w.k_norm]), 1)
        # the length of a head, and in queries the 1 / length that attention scales scores by
        head_norm[-1] *= math.sqrt(c.head_dim)
        length = math.sqrt(c.hidden_size)
        return FoldedWeights(
            qkv=Linear.packed(by_head.flatten(0, 2) * (w.input_norm * length)),
            head_norm=head_norm.repeat(c.num_key_value_heads, 1, 1),
            o=Linear.packed(w.o),
            gate_up=Linear.packed(torch.cat((w.gate, w.up)) * (w.post_norm * length)),
            down=Linear.packed(w.down),
        )

    def new_frame(self, streams: int) -> KVCache:
        streams = max(streams, self._least)
        layers, positions, most, *heads = self._memory.shape
        if streams > most:
            self._memory = self._memory.new_empty(layers, positions, streams, *heads)
            self._frames.clear()
        if streams not in self._frames:
            self._frames[streams] = _FrameCache(self, self._memory[:, :, :streams])
        self._frames[streams].length = 0
        return self._frames[streams]

    def forward(self, x: Tensor, frame: _FrameCache) -> Tensor:
        """As `Qwen3Stack.forward`, of a `new_frame`, whose streams may be more than are asked for."""
        x = filled_up(x, self._least)
        if x.dim() > 2:
            return self.advance(x.flatten(0, 1), [frame], [x.shape[1]]).view(x.shape)
        turns, layers = frame.steps[frame.length]
        frame.length += 1
        for w, memory in zip(self.layers, layers, strict=True):
            x = self.layer(w, x, turns, (), memory)
        return self.final(x)

    def advance(self, x: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        count, x = x.shape[0], filled_up(x, self._least)
        self._pass = memory = _LayerMemory(self, x.new_empty(x.shape[0], *self._memory.shape[3:]), count)
        if 1 in counts:
            newest = memory.heads[:, :, -2:].transpose(1, 2)[:, :, None, :, None]
            memory.single = list(zip(newest.unbind(), memory.heads[:, None, :, :-2].unbind(), strict=True))
        return super().advance(x, caches, counts)[:count]

    def layer(
        self,
        w: FoldedWeights,
        x: Tensor,
        turns: tuple[Tensor, ...],
        places: Sequence[Place],
        memory: _LayerMemory | None = None,
    ) -> Tensor:
        """One layer over rows `x` (R, H), overwritten. memory: of a frame's position, which has no `places`."""
        memory = memory or self._pass
        w.qkv.of_rows(self._unit(x), out=memory.flat)
        self._unit(memory.turned, out=memory.unit).mul_(w.head_norm)
        torch.mul(memory.pairs[0], turns[0], out=memory.pairs[1])
        if memory.attends is not None:  # the heads that share keys are the rows of one small product
            queries, keys, values = memory.attends
            rows = torch.bmm(torch.bmm(queries, keys).softmax(-1), values).view(x.shape[0], -1)
        else:
            parts, at = [], 0
            for place in places:
                count = place.keys.shape[0] * place.count
                if count == 1:  # heads that share keys are rows of one head
                    newest, query = memory.single[at]
                    place.new.copy_(newest)
                    parts.append(F.scaled_dot_product_attention(query, place.keys, place.values, scale=1.0).flatten(1))
                else:
                    heads = memory.heads[at : at + count]
                    parts.append(attended(heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1], place, 1.0))
                at += count
            rows = filled_up(torch.cat(parts), self._least)
        x = w.o.of_rows(rows, onto=x)
        w.gate_up.of_rows(self._unit(x), out=memory.gated)
        return w.down.of_rows(F.silu(memory.gate, inplace=True).mul_(memory.up), onto=x)

    def _turn_table(self, positions: int) -> tuple[Tensor, ...]:
        """(positions, 1, 1, D / 2) complex."""
        angle = torch.outer(torch.arange(positions).float(), self._inverse_frequency)
        return (torch.complex(angle.cos(), angle.sin())[:, None, None],)

    def final(self, x: Tensor) -> Tensor:
        return self._unit(x).mul_(self.norm)

    def _unit(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """RMSNorm but for a factor of 1 / sqrt(n) over the last dimension: three operators, composed it is six."""
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor[x.shape[-1]])
        return torch.div(x, length, out=out)


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Places 0, 1, 2, ... of `dim` take what stood at 0, n / 2, 1, n / 2 + 1, ..."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
