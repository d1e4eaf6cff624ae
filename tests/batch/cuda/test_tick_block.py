"""The block of numbers of a tick, and the memory that ticks share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mktts.batch.cuda.block import PENALTY, BlockLayout, Entering, packed
from mktts.batch.cuda.memory import LaneMemory, Workspace, space_bytes, space_shapes
from mktts.batch.tick import Piece, Tick
from mktts.errors import EngineError
from mktts.model.sampling import Choice, Sampling


def test_a_tick_stands_in_its_block():
    layout = BlockLayout(4, 8)
    settings = np.stack([packed(Sampling(repetition_penalty=1 + slot), slot) for slot in range(9)])
    pieces = (Piece(7, 64, 2, True), Piece(3, 0, 4, False), Piece(5, 1, 1, True))
    tick = Tick((4, 8), np.array([7, 5, 2], np.int32), 2, pieces=pieces)
    entering = [Entering(piece, 10_000 * (1 + i) + 256 * np.arange(66)) for i, piece in enumerate(pieces)]
    block = layout.padded(9)
    layout.fill(block, tick, [777], settings, entering)
    parts = layout.parts(torch.from_numpy(block))
    assert sum(part.numel() * part.element_size() for part in parts) == 8 * layout.words == block.nbytes
    assert parts.slots.tolist() == [7, 5, 2, 9] and parts.fresh.tolist() == [1, 1, 0, 1]
    assert parts.ends.tolist() == [66, 2, 0, 0] and parts.text.tolist() == [0, 0, 777, 0]
    assert parts.selected.tolist() == [4 + 1, 4 + 6, 2, 3]
    assert parts.row_slots.tolist() == [7, 7, 3, 3, 3, 3, 5, 9]
    assert parts.row_positions.tolist() == [64, 65, 0, 1, 2, 3, 1, 0]
    assert parts.row_addresses.tolist() == [
        10_000 + 64 * 256, 10_000 + 65 * 256, 20_000, 20_256, 20_512, 20_768, 30_256, 0,
    ]  # fmt: skip
    assert parts.settings[:, PENALTY].view(torch.float32).tolist() == [8.0, 6.0, 3.0, np.float32(1.05)]
    assert parts.settings[:, 0].tolist() == [7, 5, 2, 0]


def test_settings_are_packed_by_their_bits():
    talker, predictor = Choice(temperature=0.3, top_k=7, top_p=0.9), Choice(do_sample=False, top_k=2**40)
    row = packed(Sampling(talker, predictor, repetition_penalty=1.5), (3 << 32) | 0xFFFFFFFE)
    floats = row.view(np.float32)
    assert row[:2].tolist() == [-2, 3]
    assert (row[2], row[4], row[6], row[8]) == (1, 7, 0, 2**31 - 1)
    assert floats[[3, 5, 7, 9, 10]] == pytest.approx([0.3, 0.9, 0.9, 1.0, 1.5])


def test_buckets_share_one_memory_as_large_as_the_largest_needs(tiny):
    shapes = [space_shapes(tiny.config, torch.float32, *size) for size in ((2, 16, 8), (8, 0, 1), (4, 4, 2))]
    workspace = Workspace(torch.device("cpu"))
    for one in shapes:
        workspace.reserve(one)
    spaces = [workspace.views(one) for one in shapes]
    for name, (shape, dtype) in shapes[1].items():
        tensors = [getattr(space, name) for space in spaces]
        assert tensors[1].shape == shape and tensors[1].dtype == dtype
        assert len({tensor.data_ptr() for tensor in tensors}) == 1
    with pytest.raises(EngineError, match="laid out already"):
        workspace.reserve(shapes[0])


def test_what_a_page_and_a_slot_take(tiny):
    talker = tiny.config.talker
    memory = LaneMemory.of(tiny.config, torch.bfloat16, 100, codec_state=1_000, lanes=8, prompt_rows=16)
    assert memory.page == 64 * talker.kv_bytes_per_position
    numbers, table = 3 * 4, 2 * 4
    assert memory.slot == numbers + talker.vocab_size + 4 * talker.hidden_size + table + 1_000
    assert memory.tick > space_bytes(space_shapes(tiny.config, torch.bfloat16, 8, 16, 8))
    assert memory.bytes(5, 7) == 6 * memory.slot + 7 * memory.page + memory.tick
