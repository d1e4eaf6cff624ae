"""What many streams take of the device: numbers by slot, what ticks work in, and how much memory all of it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from mktts.engine.pages import PAGE_ROWS
from mktts.errors import EngineError
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ModelConfig, StackConfig


@dataclass(frozen=True)
class Slots:
    """Tensors of `count` slots; the last slot is nobody's: padded lanes and rows work on it."""

    count: int
    positions: Tensor  # (slots,) int32: rows in the cache
    frames: Tensor  # (slots,) int32: frames drawn
    ended: Tensor  # (slots,) int32: 1 from the frame on in which end of speech was drawn
    seen: Tensor  # (slots, talker's vocabulary) uint8: code 0 was drawn
    embedding_sum: Tensor  # (slots, H) fp32: of the newest frame

    @classmethod
    def make(cls, config: ModelConfig, count: int, device: torch.device) -> Slots:

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            count=count,
            positions=zeros(count),
            frames=zeros(count),
            ended=zeros(count),
            seen=zeros(count, config.talker.vocab_size, dtype=torch.uint8),
            embedding_sum=zeros(count, config.talker.hidden_size, dtype=torch.float32),
        )

    @staticmethod
    def bytes_each(config: ModelConfig) -> int:
        return 3 * 4 + config.talker.vocab_size + 4 * config.talker.hidden_size

    @property
    def nobody(self) -> int:
        return self.count - 1


# Of a row's positions at most, in attention; its length alone decides them, see mktts.batch.cuda.kernels.attention.
ATTENTION_PARTS = 8

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def space_shapes(config: ModelConfig, dtype: torch.dtype, lanes: int, prompt_rows: int, parts: int) -> Shapes:
    """What one bucket of B lanes and P prompt rows works in, by name; R = B + P rows of the talker.

    row_slot, row_pos: slot and position of every row. x, h: the residual stream and its norm. part, bounds: see
    `kernels.attention`. hidden: of each lane's newest row. px, ph: the predictor's input and its norm. cache: its keys
    and values. made: codes (B, 16), then 1 for lanes that have ended. codec_slots: the slot whose codec state goes on.
    """
    talker, predictor, rows = config.talker, config.predictor, lanes + prompt_rows
    width, heads = talker.hidden_size, talker.num_attention_heads
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


class Workspace:
    """Memory by name. Every bucket names its shapes first; then all get views of the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}

    def reserve(self, shapes: Shapes) -> None:
        """A bucket will need this. Raises EngineError once memory was taken."""
        if self._memory:
            raise EngineError("the memory of ticks is laid out already: make every bucket before the first one runs")
        for name, (shape, dtype) in shapes.items():
            self._sizes[name] = max(self._sizes.get(name, 0), math.prod(shape) * dtype.itemsize)

    def views(self, shapes: Shapes) -> SimpleNamespace:
        """The memory in a bucket's shapes, which were reserved; it is zeros at first."""
        if not self._memory:
            self._memory = {
                name: torch.zeros(size, dtype=torch.uint8, device=self._device) for name, size in self._sizes.items()
            }

        def view(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return self._memory[name][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return SimpleNamespace(**{name: view(name, *of) for name, of in shapes.items()})


@dataclass(frozen=True)
class LaneMemory:
    """Bytes. page: 64 positions of keys and values of all layers. slot: one stream without its pages: settled numbers,
    codes seen, its row of the page table, its codec state. tick: what the largest tick works in, without the codec's
    own temporaries and without the recorded graphs.
    """

    page: int
    slot: int
    tick: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        positions: int,
        codec_state: int = 0,
        lanes: int = 1024,
        prompt_rows: int = 1024,
    ) -> LaneMemory:
        """positions: of the longest stream. codec_state: bytes of one stream's. lanes, prompt_rows: of the largest
        tick."""
        c, rows = config.talker, lanes + prompt_rows
        space = space_bytes(space_shapes(config, dtype, lanes, prompt_rows, ATTENTION_PARTS))
        widest = max(_widest(config.talker) * rows, _widest(config.predictor) * 2 * lanes)
        return cls(
            page=PAGE_ROWS * c.num_hidden_layers * c.num_key_value_heads * 2 * c.head_dim * dtype.itemsize,
            slot=Slots.bytes_each(config) + 4 * -(-positions // PAGE_ROWS) + codec_state,
            tick=space + widest * dtype.itemsize,
        )

    def bytes(self, slots: int, pages: int) -> int:
        """Of so many streams, nobody's slot with them, and pages."""
        return self.slot * (slots + 1) + self.page * pages + self.tick


def _widest(stack: StackConfig) -> int:
    """Values a row that lie between two products at once: gate and up, and what becomes of them."""
    return 3 * stack.intermediate_size + stack.hidden_size
