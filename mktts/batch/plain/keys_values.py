"""Keys and values of many streams, each as long as its own, and one pass of all their newest rows through a stack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.plain.lane_stack import LaneStack, Room
from mktts.codec.layers import LEAST_ROWS, filled_up

CHUNK_POSITIONS = 64  # that a stream's memory grows by

_Place = tuple[Tensor, Tensor, Tensor]  # see `KeysValues.places`


class KeysValues:
    """Of one stream, rotated keys and values: memory is taken as the stream gets there. `length` positions are filled.

    memory: (layers, 2, K heads, capacity, D).
    """

    def __init__(self, stack: LaneStack) -> None:
        c = stack.config
        shape = c.num_hidden_layers, 2, c.num_key_value_heads, 0, c.head_dim
        self.memory = torch.empty(shape, dtype=stack.dtype, device=stack.device)
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
    rotary = stack.rotary(torch.tensor(positions, device=stack.device))
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
    return stack.final(x[torch.tensor(ends, device=stack.device) - 1])


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
