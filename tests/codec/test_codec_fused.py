"""The fused pass with plain operators in place of its kernels; and how its products are packed and cut.

The kernels themselves need a device: tests/codec/test_codec_fused_cuda.py.
"""

from collections.abc import Callable
from functools import partial

import codec_stand_ins
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.fused import MAX_FUSED_FRAMES, FusedCodec
from mktts.codec.packed import MOVE_WORDS, copies, tile
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes, snr_db


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


@pytest.fixture(scope="module")
def fused(tiny) -> FusedCodec:
    return FusedCodec(plain(tiny), codec_stand_ins)


def plain(checkpoint: Checkpoint) -> Callable[[], CodecDecoder]:
    return partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors())


def test_every_chunk_size_gives_the_plain_decoders_samples_and_state(codec, fused):
    ours, theirs = fused.start(), codec.start()
    for frames in (1, 1, 2, 3, 4, 8, 5, 8, 1):  # past the window
        codes = random_codes(frames, seed=frames)
        expected = codec.decode(codes, theirs)
        assert snr_db(fused.decode(codes, ours), expected) > 100
        assert ours.frames == theirs.frames == int(ours.position)
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
    shape = tile(rows, outs, taps * channels, channels, splittable)
    starts = [shape.part * z for z in range(shape.parts)]
    assert starts[-1] < taps * channels <= shape.part * shape.parts  # no program is idle, none of the depth is left
    assert shape.part % shape.depth == 0  # a program's last block reaches into no other program's part
    assert splittable or shape.parts == 1
    assert min(shape.rows, shape.outs, shape.depth) >= 16  # what the matrix units take
    if shape.even:
        assert channels % shape.depth == 0


def test_copies_of_any_size_are_cut_into_pieces_that_a_program_holds():
    table = copies([(0, 7, 2 * MOVE_WORDS + 1), (9_000, 10_000, 5)], torch.device("cpu"))
    assert table.tolist() == [
        [0, 7, MOVE_WORDS],
        [MOVE_WORDS, 7 + MOVE_WORDS, MOVE_WORDS],
        [2 * MOVE_WORDS, 7 + 2 * MOVE_WORDS, 1],
        [9_000, 10_000, 5],
    ]
