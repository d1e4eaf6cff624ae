"""How much device memory many streams take, so that an engine can size itself before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mktts.batch.cuda.slots import Slots
from mktts.batch.cuda.workspace import ATTENTION_PARTS, space_bytes, space_shapes
from mktts.batch.pages import PAGE_ROWS
from mktts.spec import ModelConfig, StackConfig


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
