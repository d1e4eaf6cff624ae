"""The matrix products of the fused codec: one product for the rows of all lanes, with the layer's rest as epilogue.

A causal convolution is a matrix product over windows of rows; its input begins with the history rows. Operands are in
stored form (`mktts.codec.packed`), or fp32 and converted to it in the product. A split product consists of three fp16
products: high by high, and, in a separate sum, low by high and high by low. Every sum has a fixed order.

With many streams, the result of a row depends on that row alone, bit for bit: no sum is split over programs, the steps
of a sum have the same depth for any number of rows (see `mktts.batch.cuda.tiles`), tensor cores treat rows alike at
every place of a tile of 64 rows or more, and epilogues are compiled without contraction (`enable_fp_fusion=False`),
with fused operations written explicitly, so that the code of every tile rounds alike."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import INPUT_SCALE as _INPUT
from mktts.codec.packed import LOW_SCALE as _LOW
from mktts.codec.packed import Packed, ProductTile, Rows
from mktts.kernel.triton_kernels import launch

LOW_SCALE = tl.constexpr(float(_LOW))
INPUT_SCALE = tl.constexpr(float(_INPUT))
_GROUP = 8
_SUM_BLOCK = 512  # columns
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds an fp32 number to an integer
# sin(pi r) = r * P(r^2) for |r| <= 1/2, the minimax polynomial of five terms (error 3.4e-9)
_SINE_1 = tl.constexpr(3.141592502593994)
_SINE_3 = tl.constexpr(-5.1677069664001465)
_SINE_5 = tl.constexpr(2.5500314235687256)
_SINE_7 = tl.constexpr(-0.5980451703071594)
_SINE_9 = tl.constexpr(0.07722015678882599)


@triton.jit
def store(at, y, mask, low, SPLIT: tl.constexpr):
    """Stores fp32 values `y` as fp32 or in stored form; low parts are written `low` values after the high parts."""
    if at.dtype.element_ty == tl.float32:
        tl.store(at, y, mask=mask)
    else:
        y = y * (1.0 / INPUT_SCALE)
        high = y.to(tl.float16)
        tl.store(at, high, mask=mask)
        if SPLIT:
            tl.store(at + low, ((y - high.to(tl.float32)) * LOW_SCALE).to(tl.float16), mask=mask)


@triton.jit
def load(at, mask, low, SPLIT: tl.constexpr):
    """Loads values written by `store`, as fp32."""
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if at.dtype.element_ty == tl.float16:
        if SPLIT:
            y = tl.fma(tl.load(at + low, mask=mask, other=0.0).to(tl.float32), 1.0 / LOW_SCALE, y)
        y = y * INPUT_SCALE
    return y


@triton.jit
def snake(y, turns, magnitude):
    """y + sin(pi * turns * y)^2 * magnitude; the argument is reduced modulo a half turn, the period of the square."""
    half_turns = y * turns
    r = half_turns - ((half_turns + _TO_NEAREST) - _TO_NEAREST)
    square = r * r
    wave = tl.fma(square, _SINE_9, _SINE_7)
    wave = tl.fma(square, wave, _SINE_5)
    wave = tl.fma(square, wave, _SINE_3)
    wave = r * tl.fma(square, wave, _SINE_1)
    return tl.fma(wave * wave, magnitude, y)


@triton.jit
def _end(
    total, rest, row, rows, per, first, bias, scale, residual, turns, magnitude, raw, act, act_lane, act_low,
    OUTS: tl.constexpr, SNAKES: tl.constexpr, SPLIT: tl.constexpr, ACT_SPLIT: tl.constexpr, GELU: tl.constexpr,
    SWIGLU: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile's sums, whose columns start at `first`: bias, GELU or SwiGLU, scale, residual; stores the
    value and its SnakeBeta."""
    y = total
    if SPLIT:
        y = tl.fma(rest, 1.0 / LOW_SCALE, y)
    y = y * INPUT_SCALE
    live = (row < rows)[:, None]
    if SWIGLU:  # columns of gate and up alternate
        gate, up = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        first = first // 2
        WIDTH: tl.constexpr = OUTS // 2
    else:
        WIDTH: tl.constexpr = OUTS
    column = first + tl.arange(0, y.shape[1])
    inside = column < WIDTH
    if not WHOLE:
        live = live & inside[None, :]
    if bias is not None:
        y = y + tl.load(bias + column, mask=inside, other=0.0)[None, :]
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if scale is not None:
        y = y * tl.load(scale + column, mask=inside, other=0.0)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    if residual is not None:
        kept = tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
        if residual.dtype.element_ty == tl.float16:
            kept = kept * INPUT_SCALE
        y = y + kept
    if raw is not None:
        if raw.dtype.element_ty == tl.float16:
            tl.store(raw + at, (y * (1.0 / INPUT_SCALE)).to(tl.float16), mask=live)
        else:
            tl.store(raw + at, y, mask=live)
    if act is not None:
        if turns is not None:
            channel = column % SNAKES
            f = tl.load(turns + channel, mask=inside, other=0.0)[None, :]
            y = snake(y, f, tl.load(magnitude + channel, mask=inside, other=0.0)[None, :])
        lane = row // per
        start = lane * (act_lane * 8) + (row - lane * per) * WIDTH
        store(act + start[:, None] + column[None, :], y, live, act_low * 8, ACT_SPLIT)


@triton.jit(do_not_specialize=["rows", "per", "dilation", "x_lane", "x_low", "act_lane", "act_low"])
def product(
    x, high, low, bias, scale, residual, turns, magnitude, raw, act, partial,
    rows, per, dilation, x_lane, x_low, act_lane, act_low, eps,
    OUTS: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, SNAKES: tl.constexpr, ACT_SPLIT: tl.constexpr,
    GELU: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EXTRA: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Computes one tile. Row r of the product is row r % per of lane r // per, and reads x[t], x[t + dilation], ...

    x, act: fp32 or stored form; their strides from lane to lane (x_lane, act_lane) and from a number to its low part
    (x_low, act_low) are in units of 8 values, which tells the compiler their alignment. high, low: (OUTS, DEPTH); low
    None: not split. residual, raw: (rows, OUTS) fp32, or a sixteenth in fp16. EVEN: a step lies within one tap. GROUP:
    number of row tiles processed together for each column tile, while its weights are in the cache. eps: of an RMSNorm
    of x, fp32, whose weight is part of the product's; None: no norm. PART: the number of terms that a program sums into
    `partial` (parts, rows, OUTS) fp32, completed by `sum_parts`; 0: all terms."""
    SPLIT: tl.constexpr = low is not None
    PLAIN: tl.constexpr = x.dtype.element_ty == tl.float32
    WHOLE: tl.constexpr = OUTS % (BN + EXTRA) == 0
    down, across = tl.cdiv(rows, BM), tl.cdiv(OUTS, BN + EXTRA)
    top = tl.program_id(0) // (GROUP * across) * GROUP
    high_tiles = tl.minimum(down - top, GROUP)
    in_group = tl.program_id(0) - top * across
    row = (top + in_group % high_tiles) * BM + tl.arange(0, BM)
    first = in_group // high_tiles * (BN + EXTRA)
    step = tl.arange(0, BK)
    column = first + tl.arange(0, BN)
    real = tl.minimum(row, rows - 1)  # rows beyond the last repeat it and are not stored
    lane = real // per
    x_row = x + (lane * (x_lane * 8) + (real - lane * per) * CHANNELS)[:, None]
    w_row = column[None, :] * DEPTH + step[:, None]
    inside = (column < OUTS)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    rest = total
    if EXTRA:
        extra = first + BN + tl.arange(0, EXTRA)
        extra_row = extra[None, :] * DEPTH + step[:, None]
        extra_inside = (extra < OUTS)[None, :]
        total_extra = tl.zeros((BM, EXTRA), tl.float32)
        rest_extra = total_extra
    if PLAIN:
        squares = tl.zeros((BM,), tl.float32)
    start, end = 0, DEPTH
    if PART:
        start = tl.program_id(1) * PART
        end = tl.minimum(start + PART, DEPTH)
    for k in range(start, end, BK):
        if EVEN:
            tap = k // CHANNELS
            at = x_row + (tap * (dilation * CHANNELS) + (k - tap * CHANNELS)) + step[None, :]
            if PLAIN:
                a = tl.load(at, mask=(row < rows)[:, None], other=0.0)
            else:
                a = tl.load(at)
            if SPLIT and not PLAIN:
                a_low = tl.load(at + x_low * 8)
        else:
            deep = k + step < DEPTH
            tap = (k + step) // CHANNELS
            at = x_row + (tap * (dilation * CHANNELS) + (k + step - tap * CHANNELS))[None, :]
            a = tl.load(at, mask=deep[None, :], other=0.0)
            if SPLIT and not PLAIN:
                a_low = tl.load(at + x_low * 8, mask=deep[None, :], other=0.0)
        if EVEN and WHOLE:
            w = tl.load(high + w_row + k)
            if SPLIT:
                w_low = tl.load(low + w_row + k)
        elif EVEN:
            w = tl.load(high + w_row + k, mask=inside, other=0.0)
            if SPLIT:
                w_low = tl.load(low + w_row + k, mask=inside, other=0.0)
        else:
            w = tl.load(high + w_row + k, mask=inside & deep[:, None], other=0.0)
            if SPLIT:
                w_low = tl.load(low + w_row + k, mask=inside & deep[:, None], other=0.0)
        if PLAIN:
            if eps is not None:
                squares += tl.sum(a * a, 1)
            value = a * (1.0 / INPUT_SCALE)
            a = value.to(tl.float16)
            a_low = ((value - a.to(tl.float32)) * LOW_SCALE).to(tl.float16)
        total = tl.dot(a, w, total)
        if SPLIT:
            rest = tl.dot(a_low, w, rest)
            rest = tl.dot(a, w_low, rest)
        if EXTRA:
            tl.static_assert(EVEN)
            if WHOLE:
                w = tl.load(high + extra_row + k)
                if SPLIT:
                    w_low = tl.load(low + extra_row + k)
            else:
                w = tl.load(high + extra_row + k, mask=extra_inside, other=0.0)
                if SPLIT:
                    w_low = tl.load(low + extra_row + k, mask=extra_inside, other=0.0)
            total_extra = tl.dot(a, w, total_extra)
            if SPLIT:
                rest_extra = tl.dot(a_low, w, rest_extra)
                rest_extra = tl.dot(a, w_low, rest_extra)
    if eps is not None:
        norm = tl.rsqrt(squares / DEPTH + eps)[:, None]
        total *= norm
        rest *= norm
    if PART:
        if SPLIT:
            total = tl.fma(rest, 1.0 / LOW_SCALE, total)
        line = (tl.program_id(1) * rows + row)[:, None] * OUTS
        tl.store(partial + line + column[None, :], total, mask=(row < rows)[:, None] & inside)
    else:
        _end(
            total, rest, row, rows, per, first, bias, scale, residual, turns, magnitude, raw, act, act_lane, act_low,
            OUTS, SNAKES, SPLIT, ACT_SPLIT, GELU, SWIGLU, WHOLE,
        )  # fmt: skip
    if EXTRA:
        _end(
            total_extra, rest_extra, row, rows, per, first + BN, bias, scale, residual, turns, magnitude, raw, act,
            act_lane, act_low, OUTS, SNAKES, SPLIT, ACT_SPLIT, GELU, SWIGLU, WHOLE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "per", "act_lane", "act_low"])
def sum_parts(
    partial, bias, scale, residual, turns, magnitude, raw, act, rows, per, act_lane, act_low,
    OUTS: tl.constexpr, PARTS: tl.constexpr, SNAKES: tl.constexpr, ACT_SPLIT: tl.constexpr, GELU: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): adds the partial sums of a product in order and applies its epilogue."""
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    total = tl.zeros((1, BN), tl.float32)
    for part in range(PARTS):
        line = (part * rows + row)[:, None] * OUTS
        total += tl.load(partial + line + column[None, :], mask=(column < OUTS)[None, :], other=0.0)
    _end(
        total, total, row, rows, per, first, bias, scale, residual, turns, magnitude, raw, act, act_lane, act_low,
        OUTS, SNAKES, False, ACT_SPLIT, GELU, False, OUTS % BN == 0,
    )  # fmt: skip


def run_product(
    x: Rows, weight: Packed, tile: ProductTile, *, eps: float | None = None, gelu: bool = False, swiglu: bool = False,
    scale: Tensor | None = None, residual: Tensor | None = None, raw: Tensor | None = None,
    snake: SnakeBeta | None = None, act: Rows | None = None,
) -> None:  # fmt: skip
    """Multiplies the newest rows of every lane of `x` by `weight`; a split product if `weight` is split.

    eps: of an RMSNorm of `x` (fp32, one tap) before the product; None: no norm. The epilogue, in this order: bias; GELU
    or SwiGLU over alternating columns (gate, up); times `scale` (outs,); plus `residual`. The value is written to `raw`
    and, after `snake` (its frequency in half turns), to the newest rows of `act`. residual, raw: (lanes * rows, outs)
    fp32, or a sixteenth in fp16; may be the same tensor. With eps or swiglu, `tile` must not have parts."""
    outs, depth = weight.high.shape
    rows, channels = x.lanes * x.new, weight.channels
    parts = tile.parts(depth)
    partial = torch.empty(parts * rows * outs, device=x.memory.device) if parts > 1 else None
    turns, magnitude = (snake.frequency, snake.magnitude) if snake else (None, None)
    end = weight.bias, scale, residual, turns, magnitude, raw, None if act is None else act.newest
    strides = (0, 0) if act is None else (act.lane // 8, act.plane // 8)
    options = dict(
        OUTS=outs, SNAKES=len(snake.frequency) if snake else outs, ACT_SPLIT=act is not None and act.split, GELU=gelu,
        enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        product, (tile.programs(rows, outs), parts), x.memory, weight.high, weight.low, *end, partial,
        rows, x.new, weight.dilation, x.lane // 8, x.plane // 8, *strides, eps, **options,
        DEPTH=depth, CHANNELS=channels, SWIGLU=swiglu, EVEN=channels % tile.depth == 0,
        BM=tile.rows, BN=tile.outs, EXTRA=tile.extra, BK=tile.depth, GROUP=_GROUP, PART=tile.part,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if partial is not None:
        grid = rows, -(-outs // _SUM_BLOCK)
        launch(sum_parts, grid, partial, *end, rows, x.new, *strides, **options, PARTS=parts, BN=_SUM_BLOCK)
