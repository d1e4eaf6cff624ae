"""The fused kernels on a CUDA device against plain operators, and graphs of every kind against fp32."""

import gc
from functools import partial

import codec_stand_ins
import numpy as np
import pytest
import torch

from mktts.codec.decoder import CodecDecoder
from mktts.codec.fused import FusedCodec
from mktts.codec.graphs import GraphedCodec, codec_for
from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import copies, pack
from mktts.measure.parity.codec import random_codes, snr_db
from mktts.model.qwen3 import Linear
from mktts.spec import NUM_CODEBOOKS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LEAST_SNR_DB = {"plain": 100.0, "fused": 80.0}


@pytest.fixture(scope="module")
def kernels():
    from mktts.codec import fused_kernels as codec_kernels

    return codec_kernels


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# rows, outs, channels, taps, dilation: one row; a split sum; a residual unit; its mix; odd sizes; large tiles
PRODUCTS = [(1, 512, 512, 1, 1), (5, 96, 512, 7, 1), (160, 96, 96, 7, 9), (90, 192, 192, 1, 1), (37, 12, 20, 3, 2)]
PRODUCTS += [(700, 192, 64, 3, 3), (2000, 96, 32, 2, 1)]


@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("ending", ["plain", "everything", "snake", "scaled"])
def test_a_product_is_that_of_plain_operators(kernels, shape, ending):
    rows, outs, channels, taps, dilation = shape
    depth = taps * channels
    bias = random(outs, seed=1) if ending != "plain" else None
    packed = pack(Linear(random(depth, outs, seed=2) / depth**0.5, bias), channels, True, dilation)
    x = random(rows + (taps - 1) * dilation, channels, seed=3)
    snake = SnakeBeta(random(outs // 2, seed=4).exp(), random(outs // 2, seed=5).exp())
    residual = random(rows, outs, seed=6)
    results = []
    for run in (kernels, codec_stand_ins):
        raw, act = torch.full((rows, outs), torch.nan, device=DEVICE), torch.full((rows * outs,), torch.nan).to(DEVICE)
        options = {
            "plain": dict(raw=raw),
            "snake": dict(snake=snake, act=act),
            "everything": dict(raw=raw, residual=residual, snake=snake, act=act),
            "scaled": dict(raw=raw, residual=residual, scale=random(outs, seed=7), gelu=True),
        }[ending]
        run.product(x, packed, rows, **options)
        results.append((raw, act))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("frames", [1, 5, 8])
def test_norms_gates_and_in_place_residuals_are_those_of_plain_operators(kernels, frames):
    hidden, inner = 512, 1024
    wide = pack(Linear(random(hidden, 2 * inner) / 20, None), hidden, True, norm=random(hidden, seed=1))
    narrow = pack(Linear(random(inner, hidden, seed=2) / 30, None), inner, True)
    results = []
    for run in (kernels, codec_stand_ins):
        x, gated = random(frames, hidden, seed=3) * 100, torch.empty(frames, inner, device=DEVICE)
        run.product(x, wide, frames, norm_eps=1e-5, swiglu=True, raw=gated)
        run.product(gated, narrow, frames, scale=random(hidden, seed=4), residual=x, raw=x)
        results.append(x)
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("position", "frames"), [(0, 1), (0, 8), (3, 4), (70, 2), (71, 1), (5000, 8)])
def test_attention_is_that_of_plain_operators(kernels, position, frames):
    heads, window, head_dim = 4, 72, 64
    frequency = 1e4 ** (-torch.arange(head_dim // 2).float() / (head_dim // 2)).to(DEVICE)
    results = []
    for run in (kernels, codec_stand_ins):
        keys, values = (random(heads, window - 1 + frames, head_dim, seed=seed) for seed in (1, 2))
        out = torch.empty(frames, heads * head_dim, device=DEVICE)
        at = torch.tensor(position, device=DEVICE)
        run.attention(random(frames, 3 * heads * head_dim, seed=3), keys, values, out, at, frequency)
        results.append((keys, values, out))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_small_kernels_are_those_of_plain_operators(kernels):
    codes, books = random_codes(3, seed=0).to(DEVICE), random(16 * 2048, 32)
    x, taps, bias = random(6 + 50, 96, seed=1), random(7, 96, seed=2), random(96, seed=3)
    table = copies([(0, 5_000, 4_999), (5_000, 0, 4_500)], torch.device(DEVICE))
    results = []
    for run in (kernels, codec_stand_ins):
        quantized, normed = torch.empty(3, 64, device=DEVICE), torch.empty(50, 96, device=DEVICE)
        pcm, moved = torch.empty(50, device=DEVICE), torch.zeros(10_000, device=DEVICE)
        position = torch.tensor(7, device=DEVICE)
        run.gather(codes, books, quantized)
        run.depthwise_norm(x, taps, bias, (bias.abs(), bias), 1e-6, normed)
        with torch.backends.cudnn.flags(enabled=False):  # the plain convolution in fp32: cuDNN's would be in tf32
            run.waveform(x, taps / 20, bias[:1], pcm)
        run.move(random(10_000, seed=4), moved, table, position, 3)
        results.append((quantized, normed, pcm, moved, position))
    assert int(results[0][-1]) == 10
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def full():
    from mktts.checkpoint import open_checkpoint

    return open_checkpoint("random:tiny:custom_voice:full-codec")


@pytest.fixture(scope="module")
def reference(full) -> CodecDecoder:
    return CodecDecoder(full.codec_config, full.codec_tensors(), "cuda")


@pytest.fixture(scope="module", params=LEAST_SNR_DB)
def graphed(full, request, reference) -> GraphedCodec:
    if request.param == "plain":
        codec = GraphedCodec(reference)
    else:
        codec = codec_for(full.codec_config, full.codec_tensors(), "cuda")
        assert codec.name == request.param
    codec.least_db = LEAST_SNR_DB[request.param]
    return codec


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 13])
def test_300_frames_of_every_kind_are_those_of_fp32(reference, graphed, chunk):
    codes = random_codes(300, seed=0)
    ours, theirs = graphed.start(), reference.start()
    pcm = np.concatenate([graphed.submit(piece, ours).result() for piece in codes.split(chunk)])
    expected = torch.cat([reference.decode(piece, theirs) for piece in codes.split(60)]).cpu()
    assert snr_db(pcm, expected) > graphed.least_db
    assert ours.frames == int(ours.position) == 300


def test_work_submitted_for_two_streams_is_that_of_each_alone(graphed):
    codes = [random_codes(31, seed=seed) for seed in (1, 2)]
    sizes = [1, 1, 2, 4, 8, 15]
    states, others = [graphed.start(), graphed.start()], [graphed.start(), graphed.start()]
    pieces = list(zip(*(c.split(sizes) for c in codes), strict=True))
    pending = [[graphed.submit(piece, state) for piece, state in zip(pair, states, strict=True)] for pair in pieces]
    for stream, state in enumerate(others):
        expected = [graphed.submit(pair[stream], state).result() for pair in pieces]
        assert np.array_equal(np.concatenate([work[stream].result() for work in pending]), np.concatenate(expected))
        assert torch.equal(states[stream].flat, state.flat)


def test_states_are_exchangeable_with_those_of_plain_operators(reference, graphed):
    codes = random_codes(60, seed=3)
    state = graphed.start()
    turns = enumerate(codes.split(4))
    mixed = [(graphed if t % 2 else reference).submit(piece, state).result() for t, piece in turns]
    assert snr_db(np.concatenate(mixed), reference.decode_all(codes).cpu()) > graphed.least_db


def test_the_fused_codec_leaves_no_fp32_weights_on_the_device(full):
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


def test_a_process_that_allows_tf32_decodes_without_it(full, reference):
    flags, codes = torch.backends.cuda.matmul, random_codes(8, seed=5)
    expected = reference.decode_all(codes)
    before = flags.fp32_precision
    try:
        flags.fp32_precision = "tf32"
        pcm = GraphedCodec(reference).submit(codes, reference.start()).result()
        assert flags.fp32_precision == "tf32"
    finally:
        flags.fp32_precision = before
    assert snr_db(pcm, expected.cpu()) > LEAST_SNR_DB["plain"]
