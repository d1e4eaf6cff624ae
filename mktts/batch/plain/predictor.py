"""Codes 1 to 15 of one frame of many streams: fifteen passes of the code predictor, a row a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.plain.lane_stack import LaneStack, Room, Rotary
from mktts.spec import NUM_CODEBOOKS

_Place = tuple[Room, Tensor, Tensor]  # of a position; all keys so far, transposed, and all values so far


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
        self._views: dict[int, list[list[_Place]]] = {}  # by lanes: [position][layer]
        positions = torch.arange(NUM_CODEBOOKS, device=stack.device)
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

    def _first(self, x: Tensor, places: Sequence[Sequence[_Place]]) -> Tensor:
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

    def _next(self, x: Tensor, rotary: Rotary, places: Sequence[_Place]) -> Tensor:
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

    def _places(self, lanes: int) -> list[list[_Place]]:
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

    def _place(self, memory: Tensor, position: int) -> _Place:
        """memory: of a layer's heads, (16, B, K, G + 2, D)."""
        by_head = memory.flatten(1, 2).transpose(0, 1)[:, : position + 1]  # (B K, positions, G + 2, D)
        room = self._room.first(memory.shape[1], memory[position])
        return room, by_head[:, :, -2].transpose(1, 2), by_head[:, :, -1]
