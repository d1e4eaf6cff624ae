"""The device memory of many streams: numbers by slot, what ticks work in, and how much all of it takes; and the
codec's: rings of keys and values, histories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import Tensor

from mktts.codec.decoder import CodecState, StateLayout
from mktts.codec.packed import INPUT_SCALE, LOW_SCALE, RowsShape, moves
from mktts.engine.pages import PAGE_ROWS
from mktts.errors import CodecError
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ModelConfig, StackConfig

# The most parts of a row's positions in attention; its length decides them: see mktts.batch.cuda.kernels.attention.
ATTENTION_PARTS = 8
_BUSY_PROGRAMS = 264  # with fewer, each part has a program: two for each multiprocessor of a large card

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def slot_shapes(config: ModelConfig, count: int) -> Shapes:
    """Arrays of `count` slots, by name; the last slot is for padding: empty lanes and rows work on it.

    positions: rows in the cache. frames: how many were drawn. ended: 1 from the frame on in which end of speech was
    drawn. seen (count, talker's vocabulary): 1 for each code 0 drawn. embedding_sum (count, H): of the newest frame."""
    return {
        **dict.fromkeys(("positions", "frames", "ended"), ((count,), torch.int32)),
        "seen": ((count, config.talker.vocab_size), torch.uint8),
        "embedding_sum": ((count, config.talker.hidden_size), torch.float32),
    }


def space_shapes(config: ModelConfig, dtype: torch.dtype, lanes: int, prompt_rows: int, parts: int = 0) -> Shapes:
    """Working memory of one bucket of B lanes and P prompt rows, by name; R = B + P rows of the talker. parts: those of
    attention that have programs of their own; 0: as is best for so many lanes.

    row_slot, row_pos: slot and position of every row. x, h: the residual stream and its norm. part, bounds: see
    `kernels.attention`. hidden: of each lane's newest row. px, ph: the predictor's input and its norm. cache: its keys
    and values. made: codes (B, 16), then (B,), as `ended_out` of `kernels.draws`. codec_slots: the slot whose codec
    state advances."""
    talker, predictor, rows = config.talker, config.predictor, lanes + prompt_rows
    width, heads = talker.hidden_size, talker.num_attention_heads
    parts = parts or (ATTENTION_PARTS if lanes * talker.num_key_value_heads < _BUSY_PROGRAMS else 1)
    cache = (predictor.num_hidden_layers, lanes, predictor.num_key_value_heads, 2, NUM_CODEBOOKS, predictor.head_dim)
    return {
        "row_slot": ((rows,), torch.int32),
        "row_pos": ((rows,), torch.int32),
        "x": ((rows, width), dtype),
        "h": ((rows, width), dtype),
        "queries": ((rows, heads * talker.head_dim), dtype),
        "attended": ((rows, heads * talker.head_dim), dtype),
        "part": ((rows, heads, parts, talker.head_dim), torch.float32),
        "bounds": ((rows, heads, parts, 2), torch.float32),
        "hidden": ((lanes, width), dtype),
        "px": ((2 * lanes, width), dtype),
        "ph": ((2 * lanes, predictor.hidden_size), dtype),
        "cache": (cache, dtype),
        "made": (((NUM_CODEBOOKS + 1) * lanes,), torch.int32),
        "codec_slots": ((lanes,), torch.int32),
        "pcm": ((lanes, SAMPLES_PER_FRAME), torch.float32),
    }


def space_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def shared_spaces(of_buckets: Sequence[Shapes], device: torch.device) -> list[SimpleNamespace]:
    """The working memory of each bucket: views of one memory, as large as the largest needs, zeros at first."""
    sizes: dict[str, int] = {}
    for shapes in of_buckets:
        for name, (shape, dtype) in shapes.items():
            sizes[name] = max(sizes.get(name, 0), math.prod(shape) * dtype.itemsize)
    memory = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}

    def view(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return memory[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    return [SimpleNamespace(**{name: view(name, *of) for name, of in shapes.items()}) for shapes in of_buckets]


class LaneMemory:
    """Bytes of what lanes allocate. page: 64 positions of keys and values of all layers. slot: one stream without its
    pages: its numbers, codes seen, row of the page table and codec state. tick: the working memory of the largest tick,
    without temporaries of the codec and without the recorded graphs."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        positions: int,
        codec_state: int = 0,
        lanes: int = 1024,
        prompt_rows: int = 1024,
    ) -> None:
        """positions: of the longest stream. codec_state: its bytes. lanes, prompt_rows: of the largest tick."""
        c, rows = config.talker, lanes + prompt_rows
        space = space_bytes(space_shapes(config, dtype, lanes, prompt_rows, ATTENTION_PARTS))
        widest = max(_widest(config.talker) * rows, _widest(config.predictor) * 2 * lanes)
        self.page = PAGE_ROWS * c.num_hidden_layers * c.num_key_value_heads * 2 * c.head_dim * dtype.itemsize
        self.slot = space_bytes(slot_shapes(config, 1)) + 4 * -(-positions // PAGE_ROWS) + codec_state
        self.tick = space + widest * dtype.itemsize


def _widest(stack: StackConfig) -> int:
    """Values a row that exist at once between two products: gate, up, their product and its result."""
    return 3 * stack.intermediate_size + stack.hidden_size


# ---- of the codec


class RingStates:
    """The codec state of every slot between frames. The last slot is for padding: empty lanes work on it.

    keys, values (slots, layers, heads, window, head_dim): the frame at position p lies at p % window. histories (slots,
    words) fp16: the rows before each layer that looks back, one layer after the other, high parts before low ones.
    positions (slots,) int32: frames decoded."""

    def __init__(
        self, slots: int, layout: StateLayout, inputs: Sequence[RowsShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        """layout: of the states with which slots can begin. inputs: of each layer that looks back. dtype: of keys and
        values."""
        self._layout, self._inputs, self.device = layout, tuple(inputs), device
        layers, heads, cached, head_dim = layout.cache
        self.window = cached + 1
        ring = slots, layers, heads, self.window, head_dim
        self.keys = torch.zeros(ring, dtype=dtype, device=device)
        self.values = torch.zeros(ring, dtype=dtype, device=device)
        sizes = [shape.planes * shape.past * shape.channels for shape in self._inputs]
        *self._starts, self.words = accumulate(sizes, initial=0)  # where each history begins among a slot's words
        self.histories = torch.zeros(slots, self.words, dtype=torch.float16, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int32, device=device)
        self._source, self._high, self._low, self._split = self._places()

    @property
    def nobody(self) -> int:
        return len(self.positions) - 1

    def enter(self, slot: int, primed: CodecState | None) -> None:
        if not 0 <= slot < self.nobody:
            raise CodecError(f"slots are 0 to {self.nobody - 1}, got {slot}")
        if primed is None:
            self.silence(torch.tensor([slot], device=self.device))
            return
        if primed.layout != self._layout or primed.flat.device.type != self.device.type:
            raise CodecError("the state belongs to another decoder: use a state of the decoder whose weights these are")
        value = primed.flat.view(torch.float32).index_select(0, self._source) / INPUT_SCALE
        high, history = value.half(), self.histories[slot]
        history.index_copy_(0, self._high, high)
        low = ((value - high) * LOW_SCALE).half()
        history.index_copy_(0, self._low, low.index_select(0, self._split))
        self.positions[slot].fill_(primed.frames)
        # entry i of the state is position frames - cached + i; the ring holds it there, modulo the window
        cached, first = self.window - 1, (primed.frames + 1) % self.window
        front = min(cached, self.window - first)
        for ring, (kept,) in zip((self.keys[slot], self.values[slot]), primed.views[:2], strict=True):
            ring[:, :, first : first + front].copy_(kept[:, :, :front])
            ring[:, :, : cached - front].copy_(kept[:, :, front:])

    def silence(self, slots: Tensor) -> None:
        self.histories.index_fill_(0, slots, 0)
        self.positions.index_fill_(0, slots, 0)  # a ring is read only up to the position

    def moves(self, lanes: int) -> Tensor:
        return moves(lanes, self._inputs, self._starts, self.device)

    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For every value of the histories, its word in a CodecState, and the word of its high part in a slot; for the
        split values, the word of the low part, and their indices among all values."""
        source, high, low, split, count = [], [], [], [], 0
        for shape, start, word in zip(self._inputs, self._starts, self._layout.words()[2:], strict=True):
            values = torch.arange(shape.past * shape.channels)
            source.append(word + values)
            high.append(start + values)
            if shape.split:
                low.append(start + len(values) + values)
                split.append(count + values)
            count += len(values)
        return tuple(torch.cat(part).to(self.device) for part in (source, high, low, split))
