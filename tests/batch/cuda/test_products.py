"""Matrix products and attention with one order of sums: their error, and rows that do not feel their company.
Between them: the predictor's attention, heads that go to their pages, the talker's attention over pages, by one program
and by several. Then the codec's product kernel against plain operators; in other tiles: ../test_lanes.py."""

import math
from typing import NamedTuple

import codec_kernel_stand_ins as stand_ins
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.cuda.tiles import _MEASURED, Kind, plan_of, product_tile
from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import INPUT_SCALE, LOW_SCALE, Packed, Rows, RowsShape, pack
from mktts.model.qwen3 import Linear, rms_norm, rotate

pytestmark = pytest.mark.gpu
SHAPES = [*_MEASURED, (Kind.LINEAR, 120, 96), (Kind.GATED, 72, 64)]
ROWS = (1, 7, 8, 16, 33, 64, 130, 256, 512, 1_024)
MOST = 2_048
EPS = 1e-6


class Case:
    """Operands of one matrix, and the results of some of their rows by `products`."""

    def __init__(self, kind: Kind, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> None:
        g = torch.Generator("cuda").manual_seed(columns + depth)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=g, device="cuda") * scale).to(dtype)

        self.kind, self.columns = kind, columns
        self.x = normal(MOST, depth)
        self.weight = normal((2 if kind is Kind.GATED else 1) * columns, depth, scale=depth**-0.5)
        self.residual, self.norm = normal(MOST, columns), normal(columns)

    def of(self, products, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the rows of x at the places `rows` give."""
        x = self.x[rows]
        if self.kind is Kind.LINEAR:
            return (products.linear(x, self.weight),)
        if self.kind is Kind.GATED:
            return (products.gated(x, self.weight),)
        residual = self.residual[rows]
        out = torch.full_like(residual, torch.nan)
        products.add_norm(residual, x, self.weight, self.norm, out, EPS)
        return residual, out

    def truth(self, rows: torch.Tensor) -> torch.Tensor:
        """The first result in float64."""
        product = self.x[rows].double() @ self.weight.double().T
        if self.kind is Kind.GATED:
            return F.silu(product[:, : self.columns]) * product[:, self.columns :]
        return product + self.residual[rows].double() if self.kind is Kind.JOINED else product


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def own():
    from mktts.batch.cuda.kernels.products import FixedOrderProducts

    return FixedOrderProducts(torch.device("cuda"))


@pytest.mark.parametrize(("kind", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("count", [8, 64, 300, 1_024])
def test_the_error_is_that_of_cublas(own, kind, columns, depth, count):
    from mktts.batch.cuda.kernels.products import CublasProducts

    case, rows = Case(kind, columns, depth), torch.arange(count, device="cuda")
    truth, theirs = case.truth(rows), case.of(CublasProducts(), rows)
    mine = case.of(own, rows)
    assert error(mine[0], truth) <= 1.1 * error(theirs[0], truth)
    assert all(torch.isfinite(t).all() for t in mine)
    if kind is Kind.JOINED:
        norm = torch.rsqrt(truth.square().mean(1, keepdim=True) + EPS) * truth * case.norm.double()
        assert error(mine[1], norm) <= 1.1 * error(theirs[1], norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "columns", "depth"), SHAPES)
def test_rows_are_equal_bit_for_bit_in_any_number_and_place(own, kind, columns, depth, dtype):
    """In each of the matrix's tiles."""
    case = Case(kind, columns, depth, dtype)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    most_rows = [min(most, MOST) for most, _ in plan_of(kind, columns, depth, dtype.itemsize, limit).tiles]
    wanted = case.of(own, torch.arange(MOST, device="cuda"))
    generator = torch.Generator().manual_seed(0)
    for count in (*ROWS, *most_rows):
        rows = torch.randperm(MOST, generator=generator)[:count].cuda()
        for mine, all_of_them in zip(case.of(own, rows), wanted, strict=True):
            assert torch.equal(mine, all_of_them[rows]), count


def test_a_bias_is_added_before_rounding_and_rows_may_lie_apart(own):
    case = Case(Kind.LINEAR, 1_024, 2_048)
    x, bias = case.x.view(-1, 2, 2_048)[:, 1], case.norm
    truth = x.double() @ case.weight.double().T + bias.double()
    found = own.linear(x, case.weight, bias)
    assert error(found, truth) <= 1.1 * error(F.linear(x, case.weight, bias), truth)
    assert torch.equal(own.linear(x.contiguous(), case.weight, bias), found)


HEADS, KV_HEADS, WIDTH, POSITIONS = 16, 8, 128, 16
GROUP, COLUMNS = HEADS // KV_HEADS, (HEADS + 2 * KV_HEADS) * WIDTH
SHAPE = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "D": WIDTH}
PAGE, LAYERS, LAYER, PARTS, PAGES = 64, 2, 1, 8, 32
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 500, 1_024, 1_025, 1_500, 2_048)
PASSES = [(0, 2)] + [(start, 1) for start in range(2, POSITIONS)]  # the first position of each, and how many are new


class Given:
    """Random norms, angles and projections `qkv` (positions, rows, COLUMNS)."""

    def __init__(self, dtype: torch.dtype, positions: int, rows: int) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to("cuda", dtype)

        self.q_norm, self.k_norm, self.qkv = normal(WIDTH), normal(WIDTH), normal(positions, rows, COLUMNS)
        angle = torch.outer(torch.arange(positions).float(), torch.rand(WIDTH // 2, generator=g)).to("cuda")
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (rows, HEADS, positions, WIDTH), keys and values as the oracle makes them."""
        q, k, v = self.qkv.transpose(0, 1).unflatten(2, (-1, WIDTH)).split((HEADS, KV_HEADS, KV_HEADS), 2)
        cos, sin = (torch.cat((t, t), 1) for t in (self.cos, self.sin))
        q, k = rms_norm(q, self.q_norm, EPS).transpose(1, 2), rms_norm(k, self.k_norm, EPS).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)


def predicted(given: Given, lanes: torch.Tensor, least_old: int = 0) -> torch.Tensor:
    """What the predictor's attention gives lanes (N,) -> (N, positions, HEADS, WIDTH)."""
    from mktts.batch.cuda.kernels import rows

    count, made = len(lanes), []
    cache = torch.full((count, KV_HEADS, 2, POSITIONS, WIDTH), torch.nan, device="cuda", dtype=given.qkv.dtype)
    for start, new in PASSES:
        qkv = given.qkv[start : start + new, lanes].transpose(0, 1).contiguous()
        out = torch.full((count, new, HEADS, WIDTH), torch.nan, device="cuda", dtype=qkv.dtype)
        rows.attend_predictor[(count, KV_HEADS // 2)](
            qkv, given.q_norm, given.k_norm, given.cos, given.sin, cache, out, EPS, WIDTH**-0.5, start,
            **SHAPE, POSITIONS=POSITIONS, TILE=2, OLD=max(least_old, -(-start // 4) * 4), NEW=new, num_warps=1,
        )  # fmt: skip
        made.append(out)
    return torch.cat(made, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_predictors_attention_is_that_of_float64(dtype):
    given = Given(dtype, POSITIONS, 5)
    found = predicted(given, torch.arange(5))
    q, k, v = (t.double() for t in given.heads())
    k, v = (t.repeat_interleave(GROUP, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(~torch.ones(16, 16).bool().tril().to("cuda"), -torch.inf)
    truth = (scores.softmax(3) @ v).transpose(1, 2)
    assert (found.double() - truth).norm() / truth.norm() < (2e-6 if dtype == torch.float32 else 3e-3)


def test_a_lane_does_not_feel_the_others_nor_the_room_for_older_positions():
    given = Given(torch.bfloat16, POSITIONS, 300)
    alone = predicted(given, torch.arange(300))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:7]
    assert torch.equal(predicted(given, order), alone[order])
    assert torch.equal(predicted(given, order, least_old=16), alone[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_go_to_their_pages(dtype):
    from mktts.batch.cuda.kernels import rows

    count = 5
    given = Given(dtype, 3 * PAGE, count)
    position = torch.tensor([0, 1, 63, 64, 191], device="cuda").int()
    slot = torch.arange(count, device="cuda").flip(0).int()
    table = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0)).int().view(count, 3).to("cuda")
    pages = torch.full((3 * count, LAYERS, KV_HEADS, 2, PAGE, WIDTH), torch.nan, device="cuda", dtype=dtype)
    queries = torch.full((count, HEADS, WIDTH), torch.nan, device="cuda", dtype=dtype)
    own = torch.arange(count, device="cuda")
    rows.place_heads[(count, KV_HEADS // 4)](
        given.qkv[position.long(), own].contiguous(), given.q_norm, given.k_norm, given.cos, given.sin, slot, position,
        table, pages, queries, EPS, table.shape[1], LAYER, LAYERS, **SHAPE, PAGE=PAGE, TILE=4, num_warps=1,
    )  # fmt: skip
    q, k, v = (t[own, :, position.long()] for t in given.heads())
    held = table[slot.long(), (position // PAGE).long()].long()
    close = dict.fromkeys(("rtol", "atol"), 1e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(queries, q, **close)
    torch.testing.assert_close(pages[held, LAYER, :, 0, (position % PAGE).long()], k, **close)
    assert torch.equal(pages[held, LAYER, :, 1, (position % PAGE).long()], v)
    assert pages.isfinite().sum() == 2 * count * KV_HEADS * WIDTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_feel_the_number_of_programs_nor_their_place(dtype):
    g = torch.Generator("cuda").manual_seed(0)
    slots = len(LENGTHS)
    pages = torch.randn(slots * PAGES, LAYERS, KV_HEADS, 2, PAGE, WIDTH, generator=g, device="cuda").to(dtype)
    table = torch.randperm(slots * PAGES, generator=g, device="cuda").int().view(slots, PAGES)
    for row, length in enumerate(LENGTHS):  # what lies behind the newest position may be anything
        for page in range(length // PAGE, PAGES):
            pages[table[row, page].long(), :, :, :, max(0, length - page * PAGE) :] = torch.nan
    queries = torch.randn(slots, HEADS * WIDTH, generator=g, device="cuda").to(dtype)
    last = torch.tensor(LENGTHS, device="cuda").int() - 1
    slot = torch.arange(slots, device="cuda").int()
    alone = attended(queries, slot, last, table, pages, 1)
    apart = attended(queries, slot, last, table, pages, PARTS)
    assert torch.equal(alone, apart)
    order = torch.randperm(slots, generator=g, device="cuda").repeat(5)
    many = attended(queries[order], slot[order], last[order], table, pages, 1)
    assert torch.equal(many, alone[order])
    for row, length in enumerate(LENGTHS):
        keys, values = pages[table[row].long(), LAYER].double().permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (keys, values))
        scores = torch.einsum("hd,hnd->hn", queries[row].double().view(HEADS, WIDTH), keys) * WIDTH**-0.5
        truth = torch.einsum("hn,hnd->hd", scores.softmax(1), values).flatten()
        limit = 2e-6 if dtype == torch.float32 else 5e-3
        assert (alone[row].double() - truth).norm() / truth.norm() < limit, length


def attended(queries, slot, last, table, pages, programs):
    from mktts.batch.cuda.kernels import attention

    count = len(queries)
    out = torch.full_like(queries, torch.nan)
    part = torch.full((count, HEADS, PARTS, WIDTH), torch.nan, device="cuda")
    bounds = torch.full((count, HEADS, PARTS, 2), torch.nan, device="cuda")
    shape = {"HEADS": HEADS, "D": WIDTH, "PAGE": PAGE, "PARTS": PARTS}
    attention.attend[(KV_HEADS, count, programs)](
        queries, slot, last, table, pages, out, part, bounds, PAGES, LAYER, LAYERS, WIDTH**-0.5, programs,
        **shape, KV_HEADS=KV_HEADS, QUERIES=8, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    if programs > 1:
        attention.combine[(count, HEADS)](last, part, bounds, out, **shape, num_warps=1, enable_fp_fusion=False)
    return out


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
