"""The stack of `TorchLanes` in fp32: half as many operators, which cost by the call, and rows that never feel others.
Norm weights are multiplied into the matrices behind them; a head's halves lie interleaved: its rotation is one complex
product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import LEAST_ROWS, KVCache, LayerWeights, Linear, Place, Qwen3Stack, attended
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

    def __init__(self, heads: Tensor, unit: Tensor, gated: Tensor) -> None:
        """heads (R, K, G + 2, D); unit (R, K, G + 1, D) and gated (R, 2 I), only between two operators."""
        self.heads, self.unit, self.gated = heads, unit, gated
        self.flat, self.turned = heads.flatten(1), heads[:, :, :-1]  # the latter are normed and rotated
        self.pairs = _pairs(unit), _pairs(self.turned)
        self.gate, self.up = gated.chunk(2, -1)

    @cached_property
    def single(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values (2, 1, K, 1, D) and queries (1, K, G, D) of each row."""
        newest = self.heads[:, :, -2:].transpose(1, 2)[:, :, None, :, None]
        return tuple(zip(newest.unbind(), self.heads[:, None, :, :-2].unbind(), strict=True))


class _FrameCache(KVCache):
    """A cache of B streams whose memory is that in which a `FoldedStack` makes the heads of every position."""

    def __init__(self, stack: FoldedStack, heads: Tensor) -> None:
        """heads: (layers, 16, B, K, G + 2, D)."""
        streams = heads.shape[2]
        workspace = stack.workspace(streams)
        super().__init__(heads[..., -2:, :].permute(0, 4, 2, 3, 1, 5), NUM_CODEBOOKS)
        # of every position: what its rows are turned by; workspace, queries (B K, G, D), keys and values of every layer
        self.steps = []
        for position in range(NUM_CODEBOOKS):
            layers = []
            for of_layer in heads:
                rows = of_layer[: position + 1].flatten(1, 2).transpose(0, 1)  # (B K, positions, G + 2, D)
                keys_values = rows[:, :, -2].transpose(1, 2), rows[:, :, -1]
                memory = _LayerMemory(of_layer[position], workspace.unit, workspace.gated)
                layers.append((memory, rows[:, -1, :-2], *keys_values))
            self.steps.append((stack.turns([position] * streams), layers))


class FoldedStack(Qwen3Stack):
    """A `Qwen3Stack` up to rounding, on a CPU. Rows that a pass is given may be overwritten by it."""

    exact = False
    linear = staticmethod(Linear.packed)

    def __init__(
        self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, prefix, device, dtype)
        self.norm = self.norm * math.sqrt(config.hidden_size)
        widths = config.hidden_size, config.head_dim
        self._floor = {width: torch.tensor(math.sqrt(width * config.rms_norm_eps)) for width in widths}
        w = self.layers[0]
        packed = all(linear.weight.is_mkldnn for linear in (w.qkv, w.o, w.gate_up, w.down))
        self._least = 1 if packed else LEAST_ROWS  # rows of a pass
        self._frames: dict[int, _FrameCache] = {}  # by streams
        self._memory = self._frame_memory(0)  # of all of them

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

    def workspace(self, rows: int) -> _LayerMemory:
        c, group = self.config, self.config.num_attention_heads // self.config.num_key_value_heads
        heads, unit = (self.norm.new_empty(rows, c.num_key_value_heads, group + n, c.head_dim) for n in (2, 1))
        return _LayerMemory(heads, unit, self.norm.new_empty(rows, 2 * c.intermediate_size))

    def new_cache(self, positions: int, streams: int | None = None, grows: bool = False) -> KVCache:
        if streams is None:
            return super().new_cache(positions, grows=grows)
        streams = max(streams, self._least)
        if streams > self._memory.shape[2]:
            self._memory = self._frame_memory(streams)
            self._frames.clear()
        if streams not in self._frames:
            self._frames[streams] = _FrameCache(self, self._memory[:, :, :streams])
        self._frames[streams].length = 0
        return self._frames[streams]

    def _frame_memory(self, streams: int) -> Tensor:
        heads = self.workspace(streams).heads
        return heads.new_empty(self.config.num_hidden_layers, NUM_CODEBOOKS, *heads.shape)

    def advance(self, x: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        frame, count = caches[0], x.shape[0]
        if not isinstance(frame, _FrameCache):
            x = self._filled(x)
        else:
            x = self._filled(x.view(-1, counts[0], x.shape[1])).flatten(0, 1)
            count = x.shape[0]
            if counts[0] == 1:
                turns, layers = frame.steps[frame.length]
                frame.length += 1
                for w, (workspace, queries, keys, values) in zip(self.layers, layers, strict=True):
                    self._heads(w, x, turns, workspace)
                    # the heads that share keys are the rows of one small product
                    rows = torch.bmm(torch.bmm(queries, keys).softmax(-1), values).view(count, -1)
                    x = self._rest(w, x, rows, workspace)
                return self.final(x)
        self._room = self.workspace(x.shape[0])
        return super().advance(x, caches, counts)[:count]

    def layer(self, w: FoldedWeights, x: Tensor, turns: tuple[Tensor, ...], places: Sequence[Place]) -> Tensor:
        workspace = self._room
        self._heads(w, x, turns, workspace)
        rows, at = [], 0
        for place in places:
            count = place.keys.shape[0] * place.count
            if count == 1:  # heads that share keys are rows of one head
                newest, query = workspace.single[at]
                place.new.copy_(newest)
                rows.append(F.scaled_dot_product_attention(query, place.keys, place.values, scale=1.0).flatten(1))
            else:
                heads = workspace.heads[at : at + count]
                rows.append(attended(heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1], place, 1.0))
            at += count
        return self._rest(w, x, self._filled(torch.cat(rows)), workspace)

    def turns(self, positions: Sequence[int]) -> tuple[Tensor, ...]:
        return super().turns([*positions, *positions[:1] * (self._least - len(positions))])

    def _turn_table(self, positions: int) -> tuple[Tensor, ...]:
        """(positions, 1, 1, D / 2) complex."""
        angle = torch.outer(torch.arange(positions).float(), self._inverse_frequency)
        return (torch.complex(angle.cos(), angle.sin())[:, None, None],)

    def _filled(self, x: Tensor) -> Tensor:
        """Rows (R, ...), and the first one again up to those of a pass, so that a BLAS makes the same of each."""
        missing = self._least - x.shape[0]
        return x if missing <= 0 else torch.cat((x, x[:1].expand(missing, *x.shape[1:])))

    def _heads(self, w: FoldedWeights, x: Tensor, turns: tuple[Tensor, ...], workspace: _LayerMemory) -> None:
        """Makes `workspace.heads` of rows `x` (R, H): queries and keys, normed and rotated, and values."""
        w.qkv(self._unit(x), out=workspace.flat)
        torch.div(workspace.turned, self._length(workspace.turned), out=workspace.unit).mul_(w.head_norm)
        torch.mul(workspace.pairs[0], turns[0], out=workspace.pairs[1])

    def _rest(self, w: FoldedWeights, x: Tensor, rows: Tensor, workspace: _LayerMemory) -> Tensor:
        """The rest of the layer: `x` (R, H), overwritten, and what attention gave of its rows."""
        x = w.o(rows, onto=x)
        w.gate_up(self._unit(x), out=workspace.gated)
        return w.down(F.silu(workspace.gate, inplace=True).mul_(workspace.up), onto=x)

    def final(self, x: Tensor) -> Tensor:
        return self._unit(x).mul_(self.norm)

    def _unit(self, x: Tensor) -> Tensor:
        """RMSNorm but for a factor of 1 / sqrt(n) over the last dimension: three operators, composed it is six."""
        return x / self._length(x)

    def _length(self, x: Tensor) -> Tensor:
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor[x.shape[-1]])


def _pairs(x: Tensor) -> Tensor:
    """(..., D) -> (..., D / 2) complex, the same memory."""
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Places 0, 1, 2, ... of `dim` take what stood at 0, n / 2, 1, n / 2 + 1, ..."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
