"""The fused pass with plain operators in place of its kernels; and how its products are packed and cut.

The kernels themselves need a device: tests/codec/test_codec_fused_cuda.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from codec_kernel_stand_ins import STAND_INS
from hypothesis import given
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.fused import MAX_FUSED_FRAMES, FusedCodec
from mktts.codec.packed import PIECE_VALUES, RowsShape, few_rows_tile, moves
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes, snr_db


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


@pytest.fixture(scope="module")
def fused(tiny) -> FusedCodec:
    return FusedCodec(plain(tiny), STAND_INS)


def plain(checkpoint: Checkpoint) -> Callable[[], CodecDecoder]:
    return partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors())


def test_every_chunk_size_gives_the_plain_decoders_samples_and_state(codec, fused):
    ours, theirs = fused.start(), codec.start()
    for frames in (1, 1, 2, 3, 4, 8, 5, 8, 1):  # past the window
        codes = random_codes(frames, seed=frames)
        expected = codec.decode(codes, theirs)
        assert snr_db(fused.decode(codes, ours), expected) > 100
        assert ours.frames == theirs.frames == int(ours.views[-1])
        torch.testing.assert_close(*(s.flat.view(torch.float32) for s in (ours, theirs)), atol=1e-4, rtol=0)


def test_a_longer_pass_and_the_kernels_without_a_gpu_are_refused_by_name(tiny, fused):
    with pytest.raises(CodecError, match="at most 8 frames, got 9"):
        fused.decode(random_codes(MAX_FUSED_FRAMES + 1, seed=6), fused.start())
    with pytest.raises(BackendUnavailable, match="the fused codec needs"):
        FusedCodec(plain(tiny))


@given(
    rows=st.integers(1, 20_000),
    outs=st.integers(1, 400).map(lambda n: 4 * n),
    channels=st.sampled_from([4, 16, 24, 96, 192, 512, 1024]),
    taps=st.sampled_from([1, 2, 3, 7]),
    splittable=st.booleans(),
)
def test_the_parts_of_a_product_cover_its_depth_once(rows, outs, channels, taps, splittable):
    depth = taps * channels
    tile = few_rows_tile(rows, outs, depth, channels, splittable)
    assert tile.part * (tile.parts(depth) - 1) < depth  # no program is idle
    assert tile.part % tile.depth == 0  # a program's last step reaches into no other program's part
    assert splittable or not tile.part
    assert min(tile.rows, tile.outs, tile.depth) >= 16  # what the matrix units take
    assert channels % tile.depth == 0 or tile.depth == 16


def test_histories_are_moved_in_pieces_that_a_program_holds():
    shapes = [RowsShape(2, 8, 8, split=False), RowsShape(1, 3, PIECE_VALUES + 8, split=True)]
    first, second = 80, 4 * (PIECE_VALUES + 8)  # values of a plane of each
    expected = [(0, 0, 64, first, 16)]
    for plane in range(2):
        state, work = 160 + plane * (PIECE_VALUES + 8), 2 * first + plane * second
        saved = work + 3 * (PIECE_VALUES + 8)
        expected.append((state, work, saved, 2 * second, PIECE_VALUES))
        expected.append((state + PIECE_VALUES, work + PIECE_VALUES, saved + PIECE_VALUES, 2 * second, 8))
    table = 8 * moves(2, shapes, [0, 160], torch.device("cpu"))
    assert table.tolist() == [list(row) for row in expected]
