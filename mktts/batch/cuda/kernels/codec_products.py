"""The matrix products of the batched codec: rows of all lanes in one product, with the layer's end at its end.

A number that a product takes is stored as fp16 of a sixteenth of it (so that fp16's range reaches 10^6), alone or with
a second fp16 number, LOW_SCALE times what the first rounds away: split, 22 bits. A split product is three products of
fp16 numbers, high by high, and low by high and high by low in a sum of their own.

What a row gives depends on that row alone, bit for bit: no sum is split over programs, a sum's steps have the same
depth for any number of rows (see `mktts.batch.cuda.tiles`), matrix units treat rows alike at every place
of a tile of 64 rows or more, and the ends are compiled without contraction (`enable_fp_fusion=False`), with the fused
operations written out, so that every tile's code rounds alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mktts.batch.cuda.kernels import launch
from mktts.batch.cuda.memory import Rows
from mktts.batch.cuda.tiles import ProductTile, product_tile
from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import LOW_SCALE as _LOW
from mktts.codec.packed import Packed

LOW_SCALE = tl.constexpr(float(_LOW))
INPUT_SCALE = tl.constexpr(16.0)
_GROUP = 8
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds an fp32 number to an integer
# sin(pi r) = r * P(r^2) for |r| <= 1/2, least greatest error (3.4e-9) for five terms
_SINE_1 = tl.constexpr(3.141592502593994)
_SINE_3 = tl.constexpr(-5.1677069664001465)
_SINE_5 = tl.constexpr(2.5500314235687256)
_SINE_7 = tl.constexpr(-0.5980451703071594)
_SINE_9 = tl.constexpr(0.07722015678882599)


@triton.jit
def store(at, y, mask, low, SPLIT: tl.constexpr):
    """`y` fp32 in the stored form; its low parts lie `low` values behind."""
    y = y * (1.0 / INPUT_SCALE)
    high = y.to(tl.float16)
    tl.store(at, high, mask=mask)
    if SPLIT:
        tl.store(at + low, ((y - high.to(tl.float32)) * LOW_SCALE).to(tl.float16), mask=mask)


@triton.jit
def load(at, mask, low, SPLIT: tl.constexpr):
    """fp32 of the stored form."""
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        y = tl.fma(tl.load(at + low, mask=mask, other=0.0).to(tl.float32), 1.0 / LOW_SCALE, y)
    return y * INPUT_SCALE


@triton.jit
def snake(y, turns, magnitude):
    """y + sin(pi * turns * y)^2 * magnitude; the sine's period is taken off in half turns, which the square allows."""
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
    """From a tile's sums, its columns from `first` on, to what is stored: bias, GELU or SwiGLU, scale, residual, the
    value and its SnakeBeta."""
    y = total
    if SPLIT:
        y = tl.fma(rest, 1.0 / LOW_SCALE, y)
    y = y * INPUT_SCALE
    live = (row < rows)[:, None]
    if SWIGLU:  # columns are (gate, up) by turns
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
    x, high, low, bias, scale, residual, turns, magnitude, raw, act,
    rows, per, dilation, x_lane, x_low, act_lane, act_low,
    OUTS: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, SNAKES: tl.constexpr, ACT_SPLIT: tl.constexpr,
    GELU: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EXTRA: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile. Row r of the product is row r % per of lane r // per, and sees x[t], x[t + dilation], ...

    x, act: stored form; from a lane to the next, and from a number to its low part, in units of 8 values (x_lane,
    x_low, act_lane, act_low), which tells the compiler how they are aligned. high, low (OUTS, DEPTH), low None: not
    split. residual, raw (rows, OUTS) fp32, or fp16 of a sixteenth. EVEN: a step lies within one tap. GROUP: so many
    tiles of rows go together, column after column, while the weights of the column are in the cache.
    """
    SPLIT: tl.constexpr = low is not None
    WHOLE: tl.constexpr = OUTS % (BN + EXTRA) == 0
    down, across = tl.cdiv(rows, BM), tl.cdiv(OUTS, BN + EXTRA)
    top = tl.program_id(0) // (GROUP * across) * GROUP
    high_tiles = tl.minimum(down - top, GROUP)
    in_group = tl.program_id(0) - top * across
    row = (top + in_group % high_tiles) * BM + tl.arange(0, BM)
    first = in_group // high_tiles * (BN + EXTRA)
    step = tl.arange(0, BK)
    column = first + tl.arange(0, BN)
    real = tl.minimum(row, rows - 1)  # rows beyond the last are made of it, and not stored
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
    for k in range(0, DEPTH, BK):
        if EVEN:
            tap = k // CHANNELS
            at = x_row + (tap * (dilation * CHANNELS) + (k - tap * CHANNELS)) + step[None, :]
            a = tl.load(at)
            if SPLIT:
                a_low = tl.load(at + x_low * 8)
        else:
            deep = k + step < DEPTH
            tap = (k + step) // CHANNELS
            at = x_row + (tap * (dilation * CHANNELS) + (k + step - tap * CHANNELS))[None, :]
            a = tl.load(at, mask=deep[None, :], other=0.0)
            if SPLIT:
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
    _end(
        total, rest, row, rows, per, first, bias, scale, residual, turns, magnitude, raw, act, act_lane, act_low,
        OUTS, SNAKES, SPLIT, ACT_SPLIT, GELU, SWIGLU, WHOLE,
    )  # fmt: skip
    if EXTRA:
        _end(
            total_extra, rest_extra, row, rows, per, first + BN, bias, scale, residual, turns, magnitude, raw, act,
            act_lane, act_low, OUTS, SNAKES, SPLIT, ACT_SPLIT, GELU, SWIGLU, WHOLE,
        )  # fmt: skip


def run_product(
    x: Rows, weight: Packed, lanes: int, *, gelu: bool = False, swiglu: bool = False, scale: Tensor | None = None,
    residual: Tensor | None = None, raw: Tensor | None = None, snake: SnakeBeta | None = None, act: Rows | None = None,
    tile: ProductTile | None = None,
) -> None:  # fmt: skip
    """The product of `weight` over the newest rows of every lane of `x`, split where `weight` is.

    Its end, in this order: bias, GELU, or SwiGLU over neighbours (gate, up), times `scale` (outs,), plus `residual`;
    then the value to `raw` and, through `snake` (its frequency in half turns), to the newest rows of `act`. residual,
    raw (lanes * rows, outs) fp32, or fp16 of a sixteenth; they may be the same. tile: another than the table's.
    """
    outs, depth = weight.high.shape
    rows, channels = lanes * x.new, weight.channels
    if tile is None:
        shared = torch.cuda.get_device_properties(x.memory.device).shared_memory_per_block_optin
        tile = product_tile(rows, outs, depth, channels, weight.low is not None, shared)
    grid = (tile.programs(rows, outs),)
    turns, magnitude = (snake.frequency, snake.magnitude) if snake else (None, None)
    launch(
        product, grid, x.memory, weight.high, weight.low, weight.bias, scale, residual, turns, magnitude, raw,
        None if act is None else act.newest, rows, x.new, weight.dilation, x.lane // 8, x.plane // 8,
        0 if act is None else act.lane // 8, 0 if act is None else act.plane // 8,
        OUTS=outs, DEPTH=depth, CHANNELS=channels, SNAKES=outs if snake is None else len(snake.frequency),
        ACT_SPLIT=act is not None and act.split, GELU=gelu, SWIGLU=swiglu, EVEN=channels % tile.depth == 0,
        BM=tile.rows, BN=tile.outs, EXTRA=tile.extra, BK=tile.depth, GROUP=_GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
