"""Graphs of the fused codec on a CUDA device against plain operators in fp32."""

import gc
from functools import partial

import numpy as np
import pytest
import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.fused import FusedCodec
from mktts.codec.graphs import GraphedCodec, codec_for
from mktts.measure.parity.codec import random_codes, snr_db
from mktts.spec import NUM_CODEBOOKS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
FULL = "random:tiny:custom_voice:full-codec"
LEAST_SNR_DB = 80.0


@pytest.fixture(
    scope="module", params=["random:tiny", FULL]
)  # narrow layers, whose tiles have rests; the released ones
def checkpoint(request) -> Checkpoint:
    return open_checkpoint(request.param)


@pytest.fixture(scope="module")
def reference(checkpoint) -> CodecDecoder:
    return CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors(), DEVICE)


@pytest.fixture(scope="module")
def graphed(checkpoint) -> GraphedCodec:
    codec = codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), DEVICE)
    assert codec.name == "fused"
    return codec


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 13])
def test_300_frames_are_those_of_fp32(reference, graphed, chunk):
    codes = random_codes(300, seed=0)
    ours, theirs = graphed.start(), reference.start()
    pcm = np.concatenate([graphed.submit(piece, ours).result() for piece in codes.split(chunk)])
    expected = torch.cat([reference.decode(piece, theirs) for piece in codes.split(60)]).cpu()
    assert snr_db(pcm, expected) > LEAST_SNR_DB
    assert ours.frames == int(ours.views[-1]) == 300


def test_states_are_exchangeable_with_those_of_plain_operators(reference, graphed):
    codes = random_codes(60, seed=3)
    state = graphed.start()
    turns = enumerate(codes.split(4))
    mixed = [(graphed if t % 2 else reference).submit(piece, state).result() for t, piece in turns]
    assert snr_db(np.concatenate(mixed), reference.decode_all(codes).cpu()) > LEAST_SNR_DB


def test_the_fused_codec_leaves_no_fp32_weights_on_the_device():
    full = open_checkpoint(FULL)
    codec_for(full.codec_config, full.codec_tensors(), DEVICE)  # what a process keeps: handles, compiled kernels
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    _codec = FusedCodec(partial(CodecDecoder, full.codec_config, full.codec_tensors(), DEVICE))
    gc.collect()
    stored = sum(tensor.nbytes for tensor in full.codec_tensors().values())
    assert torch.cuda.memory_allocated() - before < 1.05 * stored


def test_codes_that_are_yet_to_be_written_are_read_behind_the_work_that_writes_them(graphed):
    codes = random_codes(3, seed=9)
    there, later = codes.int().to(DEVICE), torch.zeros(3, NUM_CODEBOOKS, dtype=torch.int32, pin_memory=True)
    ours, theirs = graphed.start(), graphed.start()
    for frame in range(3):
        torch.cuda._sleep(1_000_000_000)  # half a second: longer than a busy host takes to get here
        later[frame].copy_(there[frame], non_blocking=True)
        pending = graphed.submit_unmade(later[frame : frame + 1], ours)
        assert not later[frame].any()
        expected = graphed.submit(codes[frame : frame + 1], theirs).result()
        assert np.array_equal(pending.result(), expected)
    assert ours.frames == theirs.frames == 3 and torch.equal(ours.flat, theirs.flat)


def test_submitted_work_leaves_the_callers_stream_free(graphed):
    """The caller's stream is busy with later work; the result is there all the same."""
    codes, state = random_codes(8, seed=4), graphed.start()
    graphed.submit(codes, state).result()
    work = graphed.submit(codes, state)
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second, queued after the call
    done = torch.cuda.current_stream().record_event()
    work.result()
    assert not done.query()
    torch.cuda.synchronize()


def test_a_process_that_allows_tf32_decodes_without_it(reference):
    flags, codes = torch.backends.cuda.matmul, random_codes(8, seed=5)
    expected = reference.decode_all(codes)
    before = flags.fp32_precision
    try:
        flags.fp32_precision = "tf32"
        pcm = GraphedCodec(reference).submit(codes, reference.start()).result()
        assert flags.fp32_precision == "tf32"
    finally:
        flags.fp32_precision = before
    assert snr_db(pcm, expected.cpu()) > 100
