"""Looks inside a frame: logits of all sixteen heads and the talker's residual stream.

The one place that knows where the megakernel, the oracle and the lanes of many streams hold them. Methods of lanes are
wrapped from outside, so that serving does nothing for it; their ticks must not be recorded as graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.kernel.backend import MegakernelBackend
from mktts.model.backend import Backend, PromptRows, StreamState
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, ModelConfig

if TYPE_CHECKING:
    from mktts.batch.cuda.lanes import CudaLanes
    from mktts.batch.plain.lanes import TorchLanes

_ROWS_A_LAUNCH = 32  # at 28 layers 4 480 exchanges; their tags start again at 65 536


@dataclass(frozen=True)
class Observed:
    """One frame.

    codes: (16,) int64 on the host. logits: 16 of (vocabulary,) fp32, as the heads gave them. hidden: (layers, H) fp32,
    the residual stream after every talker layer; None for a stream's first, whose talker state comes from the prompt.
    """

    codes: Tensor
    logits: list[Tensor]
    hidden: Tensor | None


class KernelProbe:
    """The megakernel. rows_at_once: of a prompt, at most; further ones go through the kernel one by one."""

    def __init__(self, backend: MegakernelBackend) -> None:
        self.backend = backend
        self.rows_at_once: int | None = backend._prefill.capacity
        self._debug = backend.new_debug()

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> StreamState:
        """A prompt of any length: what prefill does not take goes the way of the few rows after a kept prefix."""
        first, rest = prompt.embeds[: self.rows_at_once], prompt.embeds[self.rows_at_once :]
        room = len(rest) + max_frames  # in the stream's cache
        state = self.backend.start(PromptRows(first), sampling, seed, room)
        if len(rest):
            for rows in rest.to(self.backend.device, self.backend.dtype).contiguous().split(_ROWS_A_LAUNCH):
                self.backend.put_rows(state, rows, state.prompt_rows).synchronize()
                state.prompt_rows += len(rows)
        state.max_frames = max_frames
        return state

    def step(self, state: StreamState, row: Tensor | None) -> Observed | None:
        """The next frame; None at end-of-speech."""
        frame = self.backend.step(state, row, self._debug)
        if frame.codes is None:
            return None
        sizes = vocabularies(self.backend.config)
        logits = [head[:size].float() for head, size in zip(self._debug.logits, sizes, strict=True)]
        return Observed(frame.codes, logits, None if row is None else self._debug.hidden.float())


class TorchProbe:
    """The torch backend in the kernel's place: what runs where there is no GPU."""

    rows_at_once: int | None = None

    def __init__(self, backend: TorchBackend) -> None:
        self.backend, self.start = backend, backend.start

    def step(self, state: TorchStream, row: Tensor | None) -> Observed | None:
        """The next frame; None at end-of-speech."""
        codes = self.backend.step(state.copy(), row).codes
        return None if codes is None else forced(self.backend, state, row, codes)


def probe_of(backend: Backend) -> KernelProbe | TorchProbe:
    return KernelProbe(backend) if isinstance(backend, MegakernelBackend) else TorchProbe(backend)


@torch.inference_mode()
def forced(backend: TorchBackend, state: TorchStream, row: Tensor | None, codes: Tensor) -> Observed:
    """The oracle's frame with `codes` (16,) for its choices: as `TorchBackend.step`, with nothing drawn."""
    with _layers(backend.talker) as layers:
        if row is not None:
            backend._advance(state, row)
        hidden = torch.cat(layers)[:, -1].float() if layers else None
    logits = [backend.code0_logits(state)]
    ids = codes.to(backend.device)
    cache = backend.predictor.new_cache(NUM_CODEBOOKS)
    x = torch.cat((state.hidden, backend.code_tables[0][ids[0]][None, None]), 1)
    for group, head in enumerate(backend.heads, start=1):
        if backend.projection is not None:
            x = F.linear(x, *backend.projection)
        logits.append(F.linear(backend.predictor.forward(x, cache), head)[0, -1].float())
        x = backend.code_tables[group][ids[group]][None, None]
    state.history[state.frames] = ids[0]
    state.codes = ids
    state.frames += 1
    return Observed(codes, logits, hidden)


@contextmanager
def _layers(stack: Qwen3Stack) -> Iterator[list[Tensor]]:
    """Collects what every layer of a pass returns, (1, T, H) each."""
    seen: list[Tensor] = []
    compute = stack.layer

    def watched(*arguments) -> Tensor:
        seen.append(compute(*arguments))
        return seen[-1]

    stack.layer = watched
    try:
        yield seen
    finally:
        del stack.layer


def vocabularies(config: ModelConfig) -> list[int]:
    """Ids of each of the sixteen heads."""
    return [config.talker.vocab_size] + [config.predictor.vocab_size] * (NUM_CODEBOOKS - 1)


class LanesProbe:
    """Lanes that show what their newest tick did, once it was collected and before the next is launched.

    A subclass wraps the lanes so that they fill `_logits` (16 of (lanes, vocabulary)) and `_hidden` (a layer's
    (lanes, H) each), and says which row of these a lane has.
    """

    def __init__(self, lanes: Any) -> None:
        self.lanes = lanes
        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS
        self._hidden: list[Tensor] = []
        self._rows: list[int] | None = None  # of the lanes, where their order is another

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """Of one lane of the tick. first: its frame came from the prompt, so it has no hidden states of its own."""
        row = lane if self._rows is None else self._rows[lane]
        inside = None if first else torch.stack([of_layer[row] for of_layer in self._hidden])
        return Observed(codes, [of_head[row].clone() for of_head in self._logits], inside)


class CudaProbe(LanesProbe):
    """The batched frame of a CUDA device, made with graphs=False. Kernels of the buckets are compiled first."""

    def __init__(self, lanes: CudaLanes) -> None:
        super().__init__(lanes)
        self._hidden = [torch.empty(0)] * lanes.config.talker.num_hidden_layers
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


class PlainProbe(LanesProbe):
    """Lanes of PyTorch operators: what runs where there is no GPU."""

    def __init__(self, lanes: TorchLanes) -> None:
        super().__init__(lanes)
        talker = lanes._talker
        tick, finish = talker.tick, talker._talker.finish
        restrict, codes = talker._limits.restrict, talker._predictor.codes

        def watched_tick(slots: list[int], rows: list[Tensor | None]) -> Any:
            order = sorted(range(len(slots)), key=lambda i: rows[i] is None)  # those that speak already come first
            self._rows = [order.index(i) for i in range(len(order))]
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
