"""The batched codec's product kernel on a CUDA device: against plain operators.
In other tiles: test_codec_lanes.py."""

import math
from typing import NamedTuple

import codec_kernel_stand_ins as stand_ins
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.cuda.tiles import product_tile
from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import INPUT_SCALE, LOW_SCALE, Packed, Rows, RowsShape, pack
from mktts.model.qwen3 import Linear

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Size(NamedTuple):
    lanes: int
    rows: int  # of a lane
    outs: int
    channels: int
    taps: int
    dilation: int


# one row a lane; a step beyond a tap; units of 96 and of 192 channels; a width that no tile divides; many tiles of rows
SIZES = [Size(5, 1, 64, 64, 1, 1), Size(2, 40, 12, 20, 3, 2), Size(3, 50, 96, 96, 7, 9), Size(1, 90, 192, 192, 1, 1)]
SIZES += [Size(2, 33, 288, 192, 2, 1), Size(3, 301, 192, 64, 1, 1)]


@pytest.fixture(scope="module")
def run_product():
    from mktts.codec.product_kernels import run_product

    def run(x: Rows, weight: Packed, **end) -> None:
        shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        sizes = x.lanes * x.new, *weight.high.shape, weight.channels
        run_product(x, weight, product_tile(*sizes, weight.low is not None, shared), **end)

    return run


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def stored(value: Tensor, past: int, split: bool) -> Rows:
    """`value` (lanes, past + new, channels)."""
    lanes, rows, channels = value.shape
    shape = RowsShape(past, rows - past, channels, split)
    memory = torch.zeros(lanes * shape.lane, dtype=torch.float16, device=DEVICE)
    stand_ins.write(memory, shape.lane, shape.plane, 0, value)
    return Rows(past, rows - past, channels, split, memory)


def read(rows: Rows) -> Tensor:
    """(lanes, new, channels)."""
    found = stand_ins.read(rows.memory, rows.lane, rows.plane, rows.channels)
    return found[:, rows.past : rows.past + rows.new]


def layer(size: Size, split: bool, biased: bool = True) -> tuple[Tensor, Packed]:
    """An input (lanes, history + rows, channels) and a convolution over it."""
    depth = size.taps * size.channels
    bias = random(size.outs, seed=1) if biased else None
    weight = pack(Linear(random(depth, size.outs, seed=2) / depth**0.5, bias), split, size.channels, size.dilation)
    return random(size.lanes, (size.taps - 1) * size.dilation + size.rows, size.channels, seed=3), weight


def expected_sums(x: Tensor, weight: Packed, size: Size) -> Tensor:
    """(lanes * rows, outs) in fp64, of the operands as they are rounded."""
    if weight.low is None:
        x = (x / INPUT_SCALE).half().double() * INPUT_SCALE
    operand = torch.cat([x[:, j * size.dilation :][:, : size.rows] for j in range(size.taps)], 2).flatten(0, 1)
    whole = weight.high.double() + (0 if weight.low is None else weight.low.double() / LOW_SCALE)
    y = operand.double() @ whole.t()
    return y if weight.bias is None else y + weight.bias


@pytest.mark.parametrize("split", [True, False], ids=["split", "fp16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_units_end_is_that_of_plain_operators(run_product, size, split):
    x, weight = layer(size, split)
    count = size.lanes * size.rows
    raw = random(count, size.outs, seed=4)
    alpha, magnitude = random(size.outs // 2, seed=5).exp(), random(size.outs // 2, seed=6).exp()
    act = stored(torch.zeros(size.lanes, 3 + size.rows, size.outs, device=DEVICE), 3, split)
    expected = expected_sums(x, weight, size) + raw
    run_product(
        stored(x, (size.taps - 1) * size.dilation, split), weight,
        residual=raw, raw=raw, snake=SnakeBeta(alpha / math.pi, magnitude), act=act,
    )  # fmt: skip
    torch.testing.assert_close(raw.double(), expected, atol=2e-5, rtol=1e-5)
    wave = (expected.view(count, 2, -1) * alpha).sin() ** 2 * magnitude
    expected = (expected.view(count, 2, -1) + wave).view(size.lanes, size.rows, -1)
    close = dict(atol=1e-4, rtol=1e-5) if split else dict(atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(read(act).double(), expected, **close)
    assert not act.memory.view(size.lanes, -1)[:, : 3 * size.outs].any()


def test_the_other_ends_are_those_of_plain_operators(run_product):
    size = Size(3, 2, 128, 64, 1, 1)
    x, weight = layer(size, True)
    sums, scale = expected_sums(x, weight, size), random(size.outs, seed=7)
    act = stored(torch.zeros(3, 2, 128, device=DEVICE), 0, True)
    residual, raw = random(6, 128, seed=8), torch.empty(6, 128, device=DEVICE)
    run_product(stored(x, 0, True), weight, gelu=True, scale=scale, residual=residual, raw=raw, act=act)
    expected = F.gelu(sums) * scale + residual
    torch.testing.assert_close(raw.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read(act).flatten(0, 1).double(), expected, atol=1e-5, rtol=1e-5)
    x, weight = layer(size, True, biased=False)
    gate, up = expected_sums(x, weight, size).view(6, 64, 2).unbind(2)
    act = stored(torch.zeros(3, 2, 64, device=DEVICE), 0, True)
    run_product(stored(x, 0, True), weight, swiglu=True, act=act)
    torch.testing.assert_close(read(act).flatten(0, 1).double(), F.silu(gate) * up, atol=1e-5, rtol=1e-5)


def test_residual_sums_in_fp16_are_sixteenths(run_product):
    size = Size(1, 64, 96, 96, 1, 1)
    x, weight = layer(size, False)
    value = random(64, 96, seed=9) * 100_000  # beyond fp16's range
    raw = (value / INPUT_SCALE).half()
    expected = expected_sums(x, weight, size) + raw.double() * INPUT_SCALE
    run_product(stored(x, 0, False), weight, residual=raw, raw=raw)
    torch.testing.assert_close(raw.double() * INPUT_SCALE, expected, atol=1e-3, rtol=1e-3)
