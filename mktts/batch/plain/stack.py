"""One Qwen3 decoder stack over rows of many streams: few operators a layer, and rows that do not feel their company.

Matrices are kept as (in, out): with at least `codec.layers.LEAST_ROWS`, a BLAS then makes a row's sums in one order
however many rows come with it, while short enough (MKL: all of 256 to 1 000 terms, up to about 200 rows of longer
ones).
In fp32 norm weights are multiplied into the matrices behind them, and the halves of a head lie interleaved, so that
rotary embedding is one complex product. Other dtypes take the oracle's own operators, and its roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import LEAST_ROWS, filled_up
from mktts.model.qwen3 import LayerWeights, Qwen3Stack, inverse_frequency, rms_norm, rotate
from mktts.spec import NUM_CODEBOOKS

Rotary = tuple[Tensor, ...]  # see `LaneStack.rotary`


@dataclass(frozen=True)
class StackLayer:
    """One layer; H hidden, I intermediate, D head_dim, K key and value heads, each with G query heads.

    Heads are ordered by key head: its G query heads, itself, its value head. So a row's keys, values and queries are
    each a view whose rows and heads are one dimension.
    """

    qkv: Tensor  # (H, K (G + 2) D)
    head_norm: Tensor  # (K, G + 1, D)
    o: Tensor  # (K G D, H)
    gate_up: Tensor  # (H, 2 I)
    down: Tensor  # (I, H)
    input_norm: Tensor | None  # (H,); None where it is in `qkv`
    post_norm: Tensor | None  # (H,); None where it is in `gate_up`


@dataclass(frozen=True)
class Room:
    """What one layer makes of rows (R, H): memory, and its views, each made once, as they cost what operators do.

    heads: (R, K, G + 2, D). unit: (R, K, G + 1, D). gated: (R, 2 I). The last two are only between two operators.
    """

    heads: Tensor
    unit: Tensor
    gated: Tensor

    def first(self, rows: int, heads: Tensor | None = None) -> Room:
        """That of so many rows, in the same memory, but for `heads` where they are given."""
        return Room((self.heads if heads is None else heads)[:rows], self.unit[:rows], self.gated[:rows])

    @cached_property
    def flat(self) -> Tensor:
        """`heads` as (R, K (G + 2) D)."""
        return self.heads.flatten(1)

    @cached_property
    def turned(self) -> Tensor:
        """Of `heads`, those that are normed and rotated: queries and keys, (R, K, G + 1, D)."""
        return self.heads[:, :, :-1]

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """`unit` and `turned` as complex numbers, (R, K, G + 1, D / 2) each."""
        return _pairs(self.unit), _pairs(self.turned)

    @cached_property
    def queries(self) -> Tensor:
        """(R K, G, D)."""
        return self.heads[:, :, :-2].flatten(0, 1)

    @cached_property
    def single(self) -> tuple[Tensor, ...]:
        """Queries of each row: (1, K, G, D)."""
        return self.heads[:, None, :, :-2].unbind()

    @cached_property
    def newest(self) -> tuple[Tensor, ...]:
        """Keys and values of each row: (2, K, D)."""
        return self.heads[:, :, -2:].transpose(1, 2).unbind()

    @cached_property
    def gate_and_up(self) -> tuple[Tensor, ...]:
        """(R, I) each."""
        return self.gated.chunk(2, -1)


class LaneStack:
    """The layers of a stack for rows (R, H) of any streams; keys and values are the caller's.

    scale: what attention multiplies scores by.
    """

    def __init__(self, stack: Qwen3Stack) -> None:
        """Takes the weights over: `stack` has no layers left, so that they are not there twice."""
        c = self.config = stack.config
        self.dtype = stack.dtype
        self.folded = self.dtype == torch.float32
        self.scale = 1.0 if self.folded else c.head_dim**-0.5  # folded, it is in the queries' norm
        self.group = c.num_attention_heads // c.num_key_value_heads
        self.norm = stack.norm * math.sqrt(c.hidden_size) if self.folded else stack.norm
        self.layers: list[StackLayer] = []
        while stack.layers:
            self.layers.append(self._packed(stack.layers.pop(0)))
        self._frequency = inverse_frequency(c.head_dim, c.rope_theta)
        widths = c.hidden_size, c.head_dim
        self._floor = {width: torch.tensor(math.sqrt(width * c.rms_norm_eps)).to(self.norm) for width in widths}

    def rotary(self, positions: Tensor) -> Rotary:
        """What `heads` rotates rows at `positions` (R,) by. Angles are fp32, as in the oracle."""
        angle = positions.float()[:, None, None, None] * self._frequency
        if self.folded:
            return (torch.complex(angle.cos(), angle.sin()),)  # (R, 1, 1, D / 2)
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)  # (R, 1, 1, D) each

    def room(self, rows: int) -> Room:
        """For so many rows."""
        c, of = self.config, self.norm
        heads, unit = (of.new_empty(rows, c.num_key_value_heads, self.group + more, c.head_dim) for more in (2, 1))
        return Room(heads, unit, of.new_empty(rows, 2 * c.intermediate_size))

    def heads(self, layer: StackLayer, x: Tensor, rotary: Rotary, room: Room) -> None:
        """Of rows `x` (R, H), makes `room.heads`: queries and keys, normed and rotated, and values."""
        torch.mm(self._normed(x, layer.input_norm), layer.qkv, out=room.flat)
        turned = room.turned
        if self.folded:
            torch.div(turned, self._length(turned), out=room.unit).mul_(layer.head_norm)
            unit, rotated = room.pairs
            torch.mul(unit, rotary[0], out=rotated)
        else:
            turned.copy_(rotate(rms_norm(turned, layer.head_norm, self.config.rms_norm_eps), *rotary))

    def finish(self, layer: StackLayer, x: Tensor, attended: Tensor, room: Room) -> Tensor:
        """The rest of the layer: rows `x` (R, H), overwritten, and their attention's output (R, K G D) -> (R, H)."""
        x = self._plus(x, attended, layer.o)
        torch.mm(self._normed(x, layer.post_norm), layer.gate_up, out=room.gated)
        gate, up = room.gate_and_up
        return self._plus(x, F.silu(gate, inplace=True).mul_(up), layer.down)

    def final(self, x: Tensor) -> Tensor:
        """The final norm of rows (R, H)."""
        return self._unit(x).mul_(self.norm) if self.folded else rms_norm(x, self.norm, self.config.rms_norm_eps)

    def attend_causally(self, heads: Tensor) -> Tensor:
        """Rows that attend to themselves and those before: (B, R, K, G + 2, D) -> (B, R, K G D)."""
        heads = heads.permute(0, 2, 3, 1, 4)  # (B, K, G + 2, R, D)
        attended = F.scaled_dot_product_attention(
            heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1],
            is_causal=True, scale=self.scale, enable_gqa=True,
        )  # fmt: skip
        return attended.transpose(1, 2).flatten(2)

    def _plus(self, x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        return x.addmm_(h, weight) if self.folded else x + h @ weight

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return self._unit(x) if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _unit(self, x: Tensor) -> Tensor:
        """RMSNorm but for a factor of 1 / sqrt(n) over the last dimension: three operators, composed it is six."""
        return x / self._length(x)

    def _length(self, x: Tensor) -> Tensor:
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor[x.shape[-1]])

    def _packed(self, w: LayerWeights) -> StackLayer:
        c = self.config
        kinds, gate_up = (c.num_key_value_heads, -1, c.head_dim), torch.cat((w.gate, w.up))
        by_head = torch.cat([part.view(*kinds, c.hidden_size) for part in (w.q, w.k, w.v)], 1)  # (K, G + 2, D, H)
        head_norm = torch.stack([*[w.q_norm] * self.group, w.k_norm])
        if self.folded:
            length = math.sqrt(c.hidden_size)
            by_head, gate_up = by_head * (w.input_norm * length), gate_up * (w.post_norm * length)
            by_head[:, :-1] = _interleaved(by_head[:, :-1], 2)
            head_norm = _interleaved(head_norm, 1)
            # the length of a head, and in queries the 1 / length that attention scales scores by
            head_norm[-1] *= math.sqrt(c.head_dim)
        return StackLayer(
            qkv=by_head.flatten(0, 2).t().contiguous(),
            head_norm=head_norm.repeat(c.num_key_value_heads, 1, 1),
            o=w.o.t().contiguous(),
            gate_up=gate_up.t().contiguous(),
            down=w.down.t().contiguous(),
            input_norm=None if self.folded else w.input_norm,
            post_norm=None if self.folded else w.post_norm,
        )


def _pairs(x: Tensor) -> Tensor:
    """(..., D) -> (..., D / 2) complex, the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Places 0, 1, 2, ... of `dim` take what stood at 0, n / 2, 1, n / 2 + 1, ..."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


CHUNK_POSITIONS = 64  # that a stream's memory grows by

_Place = tuple[Tensor, Tensor, Tensor]  # see `KeysValues.places`


class KeysValues:
    """Of one stream, rotated keys and values: memory is taken as the stream gets there. `length` positions are filled.

    memory: (layers, 2, K heads, capacity, D).
    """

    def __init__(self, stack: LaneStack) -> None:
        c = stack.config
        shape = c.num_hidden_layers, 2, c.num_key_value_heads, 0, c.head_dim
        self.memory = torch.empty(shape, dtype=stack.dtype)
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` more."""
        positions = self.length + rows
        if positions > self.memory.shape[3]:
            shape = list(self.memory.shape)
            shape[3] = -(-positions // CHUNK_POSITIONS) * CHUNK_POSITIONS
            longer = self.memory.new_empty(shape)
            longer[:, :, :, : self.length] = self.memory[:, :, :, : self.length]
            self.memory = longer

    def places(self) -> list[_Place]:
        """Of every layer: where the next row's keys and values go, (2, K, D); all keys with it, and all values,
        (1, K, T, D)."""
        at = self.length
        newest = self.memory[:, :, :, at].unbind(0)
        keys, values = (self.memory[:, which, :, : at + 1].unsqueeze(1).unbind(0) for which in (0, 1))
        return list(zip(newest, keys, values, strict=True))


def advance(stack: LaneStack, x: Tensor, streams: Sequence[KeysValues], counts: Sequence[int]) -> Tensor:
    """Rows `x` (R, H) of all streams, in order, `counts[i]` of stream i -> its last row's hidden state (B, H), normed.

    Streams that have rows already come first, one row each; those that have none bring a prompt.
    """
    speaking = sum(stream.length > 0 for stream in streams)
    positions = [stream.length for stream in streams[:speaking]]
    positions += [position for count in counts[speaking:] for position in range(count)]
    for stream, count in zip(streams, counts, strict=True):
        stream.reserve(count)
    # products of few rows round in their own way: they are made with the first row again
    positions += positions[:1] * (LEAST_ROWS - len(x))
    x = filled_up(x)
    rotary = stack.rotary(torch.tensor(positions))
    places = [stream.places() for stream in streams[:speaking]]
    ends = list(accumulate(counts))
    prompts = list(zip(streams, counts, ends, strict=True))[speaking:]
    room = stack.room(len(x))
    for index, layer in enumerate(stack.layers):
        stack.heads(layer, x, rotary, room)
        attended = _newest_rows(stack, room, [place[index] for place in places])
        for stream, count, end in prompts:
            heads = room.heads[end - count : end]
            stream.memory[index][:, :, :count] = heads[:, :, -2:].permute(2, 1, 0, 3)
            attended.append(stack.attend_causally(heads[None])[0])
        x = stack.finish(layer, x, filled_up(torch.cat(attended)), room)
    for stream, count in zip(streams, counts, strict=True):
        stream.length += count
    return stack.final(x[torch.tensor(ends) - 1])


def _newest_rows(stack: LaneStack, room: Room, places: Sequence[_Place]) -> list[Tensor]:
    """Attention of one row a stream -> (1, K G D) each. Heads that share keys are rows of one head.

    One call a stream, of its own length. One call for all would copy their keys together, padded to the longest: more
    bytes than the calls cost, and a stream's sums would depend on the others' lengths.
    """
    attended = []
    for query, newest, (place, keys, values) in zip(room.single, room.newest, places, strict=False):
        place.copy_(newest)
        attended.append(F.scaled_dot_product_attention(query, keys, values, scale=stack.scale).flatten(1))
    return attended


_PredictorPlace = tuple[Room, Tensor, Tensor]  # of a position; all keys so far, transposed, and all values so far


class LanePredictor:
    """The predictor's weights, and keys and values of one frame, which begin anew with every frame."""

    def __init__(
        self,
        stack: LaneStack,
        tables: Sequence[Tensor],
        heads: Sequence[Tensor],
        projection: tuple[Tensor, Tensor] | None,
    ) -> None:
        """tables: the sixteen embedding tables (V, H). heads: fifteen of (width, V), heads[g] giving codebook g + 1.

        projection: weight (H, width) and bias of the step from the talker's width to the predictor's, where they
        differ.
        """
        self._stack, self._tables, self._heads, self._projection = stack, tables, heads, projection
        self._room = stack.room(0)  # of positions 0 and 1 together
        self._memory: list[Tensor] = []  # of each layer's heads: (16, B, K, G + 2, D)
        self._views: dict[int, list[list[_PredictorPlace]]] = {}  # by lanes: [position][layer]
        positions = torch.arange(NUM_CODEBOOKS)
        self._rotary = [stack.rotary(position) for position in positions.split(1)]

    def codes(self, hidden: Tensor, code0: Tensor, draw: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The talker's hidden states (B >= 2, H) and code 0 (B,) -> all codes (B, 16) int64.

        draw: (codebook, logits (B, V)) -> codes (B,) of that book.
        """
        places = self._places(len(hidden))
        codes = [code0]
        x = torch.stack((hidden, self._tables[0].index_select(0, code0)), 1)
        for book in range(1, NUM_CODEBOOKS):
            if book == 1:
                y = self._first(self._projected(x.flatten(0, 1)), places)
            else:
                y = self._next(self._projected(x), self._rotary[book], places[book])
            codes.append(draw(book, y @ self._heads[book - 1]))
            x = self._tables[book].index_select(0, codes[-1])
        return torch.stack(codes, 1)

    def _projected(self, x: Tensor) -> Tensor:
        return x if self._projection is None else torch.addmm(self._projection[1], x, self._projection[0])

    def _first(self, x: Tensor, places: Sequence[Sequence[_PredictorPlace]]) -> Tensor:
        """Positions 0 and 1, rows (2 B, H) in the order lane, position -> (B, H) of position 1, normed."""
        stack, lanes = self._stack, len(x) // 2
        rotary = tuple(torch.cat(parts).repeat(lanes, 1, 1, 1) for parts in zip(*self._rotary[:2], strict=True))
        room = self._room.first(2 * lanes)
        heads = room.heads.unflatten(0, (lanes, 2))
        for index, layer in enumerate(stack.layers):
            stack.heads(layer, x, rotary, room)
            for position in (0, 1):
                places[position][index][0].heads.copy_(heads[:, position])
            x = stack.finish(layer, x, stack.attend_causally(heads).flatten(0, 1), room)
        return stack.final(x.view(lanes, 2, -1)[:, 1])

    def _next(self, x: Tensor, rotary: Rotary, places: Sequence[_PredictorPlace]) -> Tensor:
        """One position, rows (B, H) -> (B, H), normed."""
        stack = self._stack
        for layer, (room, keys, values) in zip(stack.layers, places, strict=True):
            stack.heads(layer, x, rotary, room)
            # the heads that share keys are the rows of one small product
            if stack.folded:
                attended = torch.bmm(torch.bmm(room.queries, keys).softmax(-1), values)
            else:  # which keeps scores in fp32
                attended = F.scaled_dot_product_attention(room.queries, keys.transpose(1, 2), values, scale=stack.scale)
            x = stack.finish(layer, x, attended.view(len(x), -1), room)
        return stack.final(x)

    def _places(self, lanes: int) -> list[list[_PredictorPlace]]:
        """What every position and layer needs of so many lanes, which there is then room for."""
        if len(self._room.heads) < 2 * lanes:
            self._room = room = self._stack.room(2 * lanes)
            shape = NUM_CODEBOOKS, lanes, *room.heads.shape[1:]
            self._memory = [room.heads.new_empty(shape) for _ in self._stack.layers]
            self._views.clear()
        if lanes not in self._views:
            self._views[lanes] = [
                [self._place(memory[:, :lanes], position) for memory in self._memory]
                for position in range(NUM_CODEBOOKS)
            ]
        return self._views[lanes]

    def _place(self, memory: Tensor, position: int) -> _PredictorPlace:
        """memory: of a layer's heads, (16, B, K, G + 2, D)."""
        by_head = memory.flatten(1, 2).transpose(0, 1)[:, : position + 1]  # (B K, positions, G + 2, D)
        room = self._room.first(memory.shape[1], memory[position])
        return room, by_head[:, :, -2].transpose(1, 2), by_head[:, :, -1]
