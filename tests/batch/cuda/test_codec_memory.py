"""What the batched CUDA codec prepares without a device: states by slot, shared memory, tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.batch.cuda.codec_memory import INPUT_SCALE, CodecWork, RingStates, RowsShape
from mktts.batch.cuda.tiles import MEASURED, product_tile, step_depth
from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.packed import LOW_SCALE, rows_per_frame
from mktts.errors import CodecError
from mktts.measure.parity.codec import random_codes

CPU = torch.device("cpu")
SHARED_BYTES = {"H100": 232_448, "A100": 166_912, "RTX 4090": 101_376}  # of one program, CUDA Programming Guide


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
        assert torch.equal(states.keys[2, :, :, place], state.keys[:, :, cached - age])
        assert torch.equal(states.values[2, :, :, place], state.values[:, :, cached - age])


@pytest.mark.parametrize("split_from", [0, 5])
def test_histories_are_held_to_22_bits_where_they_are_split_and_to_11_elsewhere(decoder, split_from):
    states, state = states_of(decoder, split_from=split_from), decoder.start()
    decoder.decode(random_codes(20, seed=0), state)
    states.enter(1, state)
    assert not states.histories[[0, 2, 3]].any()
    at = 0
    for index, history in enumerate(state.history):
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


def test_a_smaller_pass_works_at_the_front_of_a_larger_ones_memory():
    work, shapes = CodecWork(CPU), [RowsShape(2, 4, 8, True), RowsShape(0, 3, 4, False)]
    large, _ = work.inputs(8, shapes)
    taken = work.bytes
    small, rows = work.inputs(2, shapes)
    assert small.data_ptr() == large.data_ptr() and work.bytes == taken
    assert [len(row.memory) for row in rows] == [2 * 2 * 48, 2 * 16]
    assert rows[0].newest.data_ptr() == rows[0].memory.data_ptr() + 2 * 8 * 2
    assert work.tensor("x", 4, 4).data_ptr() != work.tensor("x", 8, 8).data_ptr() and work.bytes == taken + 320


SIZES = [
    (768, 5376, 768),
    (96, 672, 96),
    (192, 192, 192),
    (288, 384, 192),
    (6144, 3072, 1536),
    (12, 84, 12),
    (8, 56, 8),
]


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
