"""What many streams on a CUDA device need of the host, tried without one: blocks of ticks, memory, states of the codec
by slot, and tiles of products."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.batch import BatchSettings
from mktts.batch.cuda.memory import (
    INPUT_SCALE,
    LaneMemory,
    RingStates,
    RowsShape,
    shared_spaces,
    space_bytes,
    space_shapes,
)
from mktts.batch.cuda.stage import PENALTY, BlockLayout, packed
from mktts.batch.cuda.tiles import _MEASURED, MEASURED, Kind, plan_of, product_tile, step_depth
from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.packed import LOW_SCALE, rows_per_frame
from mktts.engine.admission import Admission
from mktts.engine.scheduler import Piece, Tick
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes
from mktts.model.sampling import Choice, Sampling
from mktts.synth.loading import batch_runner

CPU = torch.device("cpu")
SHARED_BYTES = {"H100": 232_448, "A100": 166_912, "RTX 4090": 101_376}  # of one program, CUDA Programming Guide
ROWS = (1, 16, 17, 64, 128, 256, 512, 1_024, 2_048)
LIMITS = [pytest.param(SHARED_BYTES[card], id=card) for card in ("RTX 4090", "H100")]


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
    spaces = shared_spaces(shapes, CPU)
    for name, (shape, dtype) in shapes[1].items():
        tensors = [getattr(space, name) for space in spaces]
        assert tensors[1].shape == shape and tensors[1].dtype == dtype
        assert len({tensor.data_ptr() for tensor in tensors}) == 1


def test_what_a_page_and_a_slot_take(tiny):
    talker = tiny.config.talker
    memory = LaneMemory.of(tiny.config, torch.bfloat16, 100, codec_state=1_000, lanes=8, prompt_rows=16)
    assert memory.page == 64 * talker.kv_bytes_per_position
    numbers, table = 3 * 4, 2 * 4
    assert memory.slot == numbers + talker.vocab_size + 4 * talker.hidden_size + table + 1_000
    assert memory.tick > space_bytes(space_shapes(tiny.config, torch.bfloat16, 8, 16, 8))
    assert memory.bytes(5, 7) == 6 * memory.slot + 7 * memory.page + memory.tick


# ---- the codec


@pytest.fixture(scope="module")
def decoder(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


def states_of(decoder: CodecDecoder, slots: int = 4, split_from: int = 0) -> RingStates:
    inputs = [
        RowsShape(past, new, channels, split=index >= split_from)
        for index, ((past, channels), new) in enumerate(
            zip(decoder.layout.history, rows_per_frame(decoder), strict=True)
        )
    ]
    return RingStates(slots, decoder.layout, inputs, torch.float32, CPU)


@pytest.mark.parametrize("frames", [1, 5, 11, 12, 13, 30])
def test_a_primed_state_lies_in_the_ring_where_its_frames_would_have_put_it(decoder, frames):
    states, state = states_of(decoder), decoder.start()
    decoder.decode(random_codes(frames, seed=0), state)
    states.enter(2, state)
    assert states.positions.tolist() == [0, 0, frames, 0]
    cached = states.window - 1
    for position in range(max(0, frames - cached), frames):
        place, age = position % states.window, frames - position
        for ring, (kept, *_) in zip((states.keys, states.values), state.views, strict=False):
            assert torch.equal(ring[2, :, :, place], kept[:, :, cached - age])


@pytest.mark.parametrize("split_from", [0, 5])
def test_histories_are_held_to_22_bits_where_they_are_split_and_to_11_elsewhere(decoder, split_from):
    states, state = states_of(decoder, split_from=split_from), decoder.start()
    decoder.decode(random_codes(20, seed=0), state)
    states.enter(1, state)
    assert not states.histories[[0, 2, 3]].any()
    at = 0
    for index, history in enumerate(state.views[2:-1]):
        count = history.numel()
        value = states.histories[1, at : at + count].float()
        at += count
        if index >= split_from:
            value += states.histories[1, at : at + count].float() / LOW_SCALE
            at += count
        bits = 2.0**-21 if index >= split_from else 2.0**-11
        torch.testing.assert_close(value.view_as(history) * INPUT_SCALE, history, rtol=bits, atol=1e-6)
    assert at == states.words


def test_many_slots_begin_with_silence_at_once_and_no_other_is_touched(decoder):
    states, state = states_of(decoder, slots=6), decoder.start()
    decoder.decode(random_codes(3, seed=0), state)
    for slot in range(5):
        states.enter(slot, state)
    before = states.histories[2].clone()
    states.silence(torch.tensor([0, 1, 3]))
    assert not states.histories[[0, 1, 3]].any() and states.positions.tolist() == [0, 0, 3, 0, 3, 0]
    assert bool(before.any()) and torch.equal(states.histories[2], before) and torch.equal(states.histories[4], before)


def test_slots_that_are_nobodys_and_states_of_others_are_refused(decoder):
    states = states_of(decoder)
    for slot in (-1, 3, 4):
        with pytest.raises(CodecError, match="slots are 0 to 2"):
            states.enter(slot, None)
    small = open_checkpoint("small")
    with pytest.raises(CodecError, match="another decoder"):
        states.enter(0, CodecDecoder(small.codec_config, small.codec_tensors()).start())


def test_pieces_cover_every_history_once_and_bring_it_behind_itself(decoder):
    states, lanes = states_of(decoder), 3
    table = (states.pieces(lanes) * 8).tolist()
    covered = torch.zeros(states.words, dtype=torch.int64)
    for state, load, save, lane, count in table:
        covered[state : state + count] += 1
        assert save > load and save + count <= load + lane
    assert bool((covered == 1).all())


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


# ---- products


@pytest.mark.parametrize(("kind", "columns", "depth"), _MEASURED)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_program_fits_the_shared_memory_of_its_card(kind, columns, depth, limit):
    for rows in ROWS:
        tile = plan_of(kind, columns, depth, 2, limit).tile(rows).fitted(kind, 2, limit)
        assert tile.shared_bytes(kind, 2) <= limit and tile.stages >= 2


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("kind", "columns", "depth"), [*_MEASURED, (Kind.JOINED, 64, 96), (Kind.JOINED, 1_024, 2_560)])
def test_parts_are_whole_blocks_and_no_others_are_split(kind, columns, depth, itemsize, limit):
    plan = plan_of(kind, columns, depth, itemsize, limit)
    assert kind is Kind.JOINED or plan.parts == 1
    for _, tile in plan.tiles:
        assert plan.parts == 1 or depth % (plan.parts * tile.depth) == 0
        assert plan.parts > 1 or not tile.split


def test_where_triton_is_missing_it_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "mktts.batch.cuda.lanes", None)  # importing it then fails, as without triton
    with pytest.raises(BackendUnavailable, match="engine='batch' needs triton"):
        batch_runner(tiny, SimpleNamespace(device=torch.device("cuda"), batch=BatchSettings()), None, Admission())
