"""Looks inside a tick of many lanes: logits of all sixteen heads and the talker's residual stream, a row a lane.

The one place that knows where `CudaLanes` and `TorchLanes` hold them. Methods of the objects that serve are wrapped
from outside, so that serving does nothing for it; ticks must not be recorded as graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mktts.batch.lanes import Lanes
from mktts.measure.parity.probe import Observed
from mktts.spec import NUM_CODEBOOKS

if TYPE_CHECKING:
    from mktts.batch.cuda.lanes import CudaLanes
    from mktts.batch.plain.lanes import TorchLanes


class LanesProbe(Protocol):
    """Lanes that show what their newest tick did, once it was collected and before the next is launched."""

    lanes: Lanes

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """Of one lane of the tick. first: its frame came from the prompt, so it has no hidden states of its own."""


class CudaProbe:
    """The batched frame of a CUDA device. Kernels that the buckets need are compiled first, many at a time."""

    def __init__(self, lanes: CudaLanes) -> None:
        """lanes: made with graphs=False."""
        self.lanes = lanes
        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS
        self._hidden: list[Tensor] = [torch.empty(0)] * lanes.config.talker.num_hidden_layers
        frames = [lanes._buckets[size].frame for size in sorted(lanes._buckets, reverse=True)]
        if lanes.device.type == "cuda":
            from mktts.batch.cuda.kernels.launching import compiling
            from mktts.batch.cuda.lanes import _THREADS

            with torch.cuda.stream(lanes._stream), compiling(_THREADS):
                for frame in frames:
                    frame.run()
        for frame in frames:
            self._watch(frame)

    def _watch(self, frame: Any) -> None:
        draw, layer = frame._draw, frame._layer

        def watched_draw(logits: Tensor, book: int) -> None:
            self._logits[book] = logits.to(torch.float32, copy=True)
            draw(logits, book)

        def watched_layer(stack: Any, index: int, x: Tensor, *more: Any) -> None:
            layer(stack, index, x, *more)
            if stack is frame._weights.talker:
                self._hidden[index] = x[: frame.lane_count].to(torch.float32, copy=True)

        frame._draw, frame._layer = watched_draw, watched_layer

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """See `LanesProbe`."""
        return _observed(self._logits, self._hidden, lane, codes, first)


class PlainProbe:
    """Lanes of PyTorch operators: what runs where there is no GPU."""

    def __init__(self, lanes: TorchLanes) -> None:
        self.lanes = lanes
        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS
        self._hidden: list[Tensor] = []
        self._order: list[int] = []  # the talker's row of each lane: those that speak already come first there
        talker = lanes._talker
        tick, finish = talker.tick, talker._talker.finish
        restrict, codes = talker._limits.restrict, talker._predictor.codes

        def watched_tick(slots: list[int], rows: list[Tensor | None]) -> Any:
            order = sorted(range(len(slots)), key=lambda i: rows[i] is None)
            self._order = [order.index(i) for i in range(len(order))]
            self._hidden = []
            return tick(slots, rows)

        def watched_restrict(logits: Tensor, *more: Any) -> Tensor:
            self._logits[0] = logits.to(torch.float32, copy=True)
            return restrict(logits, *more)

        def watched_codes(hidden: Tensor, code0: Tensor, draw: Any) -> Tensor:
            def watched_draw(book: int, logits: Tensor) -> Tensor:
                self._logits[book] = logits.to(torch.float32, copy=True)
                return draw(book, logits)

            return codes(hidden, code0, watched_draw)

        def watched_finish(*arguments: Any) -> Tensor:
            x = finish(*arguments)
            self._hidden.append(x.to(torch.float32, copy=True))
            return x

        talker.tick, talker._predictor.codes = watched_tick, watched_codes
        talker._limits.restrict, talker._talker.finish = watched_restrict, watched_finish

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """See `LanesProbe`."""
        return _observed(self._logits, self._hidden, self._order[lane], codes, first)


def _observed(logits: list[Tensor], hidden: list[Tensor], row: int, codes: Tensor, first: bool) -> Observed:
    inside = None if first else torch.stack([of_layer[row] for of_layer in hidden])
    return Observed(codes, [of_head[row].clone() for of_head in logits], inside)
