"""What many streams on a CUDA device need of the host, tried without one: blocks of ticks, memory, tiles of products.
States of the codec by slot are in ../test_codec_lanes.py."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.batch import BatchSettings
from mktts.batch.cuda.memory import shared_spaces, space_shapes
from mktts.batch.cuda.stage import PENALTY, BlockLayout, packed
from mktts.batch.cuda.tiles import _MEASURED, MEASURED, Kind, plan_of, product_tile, step_depth
from mktts.engine.admission import Admission
from mktts.engine.scheduler import Piece, Tick
from mktts.errors import BackendUnavailable
from mktts.model.sampling import Choice, Sampling
from mktts.synth.loading import batch_runner

CPU = torch.device("cpu")
SHARED_BYTES = {"H100": 232_448, "A100": 166_912, "RTX 4090": 101_376}  # of one program, CUDA Programming Guide
ROWS = (1, 16, 17, 64, 128, 256, 512, 1_024, 2_048)


# ---- ticks


def test_a_tick_stands_in_its_block():
    layout = BlockLayout(4, 8)
    settings = np.stack([packed(Sampling(repetition_penalty=1 + slot), slot) for slot in range(9)])
    pieces = (Piece(7, 64, 2, True), Piece(3, 0, 4, False), Piece(5, 1, 1, True))
    tick = Tick((4, 8), np.array([7, 5, 2], np.int32), 2, pieces=pieces)
    prompts = [10_000 * (1 + i) + 256 * np.arange(66) for i in range(3)]
    block = layout.padded(9)
    layout.fill(block, tick, [777], settings, prompts)
    parts = layout.parts(torch.from_numpy(block))
    assert sum(part.numel() * part.element_size() for part in vars(parts).values()) == 8 * layout.words == block.nbytes
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
    spaces = shared_spaces(shapes, CPU)
    for name, (shape, dtype) in shapes[1].items():
        tensors = [getattr(space, name) for space in spaces]
        assert tensors[1].shape == shape and tensors[1].dtype == dtype
        assert len({tensor.data_ptr() for tensor in tensors}) == 1


# ---- products


SIZES = [(768, 5376, 768), (96, 672, 96), (288, 384, 192), (6144, 3072, 1536), (12, 84, 12)]


@given(
    rows=st.integers(1, 1_000_000),
    size=st.sampled_from(SIZES + [key[:3] for key in MEASURED]),
    split=st.booleans(),
    shared=st.sampled_from(sorted(SHARED_BYTES.values())),
)
def test_every_tile_fits_its_device_and_steps_alike_whatever_the_rows(rows, size, split, shared):
    tile = product_tile(rows, *size, split, shared)
    assert tile.shared_bytes(split) <= shared
    assert tile.depth == step_depth(size[2]) and tile.rows >= 64
    assert {n & (n - 1) for n in (tile.rows, tile.outs, tile.extra, tile.depth)} == {0}


@pytest.mark.parametrize("limit", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("kind", "columns", "depth"), [*_MEASURED, (Kind.JOINED, 64, 96), (Kind.JOINED, 1_024, 2_560)])
def test_a_program_fits_its_card_parts_are_whole_blocks_and_no_others_are_split(kind, columns, depth, itemsize, limit):
    plan = plan_of(kind, columns, depth, itemsize, limit)
    for rows in ROWS:
        tile = plan.tile(rows).fitted(kind, itemsize, limit)
        assert tile.shared_bytes(kind, itemsize) <= limit and tile.stages >= 2
    assert kind is Kind.JOINED or plan.parts == 1
    for _, tile in plan.tiles:
        assert plan.parts == 1 or depth % (plan.parts * tile.depth) == 0
        assert plan.parts > 1 or not tile.split


def test_where_triton_is_missing_it_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "mktts.batch.cuda.lanes", None)  # importing it then fails, as without triton
    with pytest.raises(BackendUnavailable, match="engine='batch' needs triton"):
        batch_runner(tiny, SimpleNamespace(device=torch.device("cuda"), batch=BatchSettings()), None, Admission())
