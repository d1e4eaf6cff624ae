"""Codes 1 to 15 of one frame of many streams: fifteen passes of the code predictor, a row a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.plain.lane_stack import LaneStack, Rotary
from mktts.spec import NUM_CODEBOOKS

_Place = tuple[Tensor, Tensor, Tensor]  # where a position's keys and values go, all keys so far, all values so far


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
        c = stack.config
        self._shape = c.num_key_value_heads, NUM_CODEBOOKS, c.head_dim
        self._cache = torch.empty(c.num_hidden_layers, 2, 0, *self._shape, dtype=stack.dtype, device=stack.device)
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
                y = self._first(self._projected(x.flatten(0, 1)))
            else:
                y = self._next(self._projected(x), self._rotary[book], places[book])
            codes.append(draw(book, y @ self._heads[book - 1]))
            x = self._tables[book].index_select(0, codes[-1])
        return torch.stack(codes, 1)

    def _projected(self, x: Tensor) -> Tensor:
        return x if self._projection is None else torch.addmm(self._projection[1], x, self._projection[0])

    def _first(self, x: Tensor) -> Tensor:
        """Positions 0 and 1, rows (2 B, H) in the order lane, position -> (B, H) of position 1, normed."""
        stack, lanes = self._stack, len(x) // 2
        rotary = tuple(torch.cat(parts).repeat(lanes, 1, 1) for parts in zip(*self._rotary[:2], strict=True))
        for index, layer in enumerate(stack.layers):
            queries, rest = stack.split(stack.heads(layer, x, rotary))
            keys_values = rest.unflatten(0, (lanes, 2)).permute(2, 0, 3, 1, 4)  # (2, B, K, 2 positions, D)
            self._cache[index][:, :lanes, :, :2] = keys_values
            attended = stack.attend_causally(queries.unflatten(0, (lanes, 2)), *keys_values)
            x = stack.finish(layer, x, attended.flatten(0, 1))
        return stack.final(x.view(lanes, 2, -1)[:, 1])

    def _next(self, x: Tensor, rotary: Rotary, places: Sequence[_Place]) -> Tensor:
        """One position, rows (B, H) -> (B, H), normed."""
        stack = self._stack
        for layer, (place, keys, values) in zip(stack.layers, places, strict=True):
            queries, rest = stack.split(stack.heads(layer, x, rotary))
            place.copy_(rest.transpose(0, 1))
            # the heads that share keys are the rows of one small product
            queries = queries.reshape(len(keys), stack.group, -1)
            if stack.folded:
                attended = torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(-1), values)
            else:  # which keeps scores in fp32
                attended = F.scaled_dot_product_attention(queries, keys, values, scale=stack.scale)
            x = stack.finish(layer, x, attended.view(len(x), -1))
        return stack.final(x)

    def _places(self, lanes: int) -> list[list[_Place]]:
        """The views that every position and layer needs of so many lanes, which there is then room for."""
        if self._cache.shape[2] < lanes:
            self._cache = self._cache.new_empty(*self._cache.shape[:2], lanes, *self._shape)
            self._views.clear()
        if lanes not in self._views:
            self._views[lanes] = [
                [
                    (both[:, :, :, position], *(part.flatten(0, 1)[:, : position + 1] for part in both))
                    for both in self._cache[:, :, :lanes]
                ]
                for position in range(NUM_CODEBOOKS)
            ]
        return self._views[lanes]
