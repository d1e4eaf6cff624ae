"""Triton kernels of the fused codec decoder, and how they are launched. Tensors are contiguous fp32 unless said
otherwise.

A causal convolution is a matrix product over the window of rows it sees, of an input that begins with the history rows.
Sums run in fp32 and in a fixed order: the same input gives the same bits. Operands are split in two fp16 numbers (high
+ low / 2048, three products), which keep 22 bits of fp32's 24, scaled by 1/16 so that fp16's range reaches 10^6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mktts.codec.layers import SnakeBeta
from mktts.codec.packed import LOW_SCALE, MOVE_WORDS, Packed, tile

_LOW_SCALE = tl.constexpr(float(LOW_SCALE))
_INPUT_SCALE = tl.constexpr(16.0)


@triton.jit
def _store(
    y, index, column, mask, bias, scale, residual, frequency, magnitude, raw, act, act_channels, GELU: tl.constexpr
):
    """The end of a product: bias, GELU, scale, residual, and the result as it is and through SnakeBeta."""
    if bias is not None:
        y += tl.load(bias + column)
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if scale is not None:
        y *= tl.load(scale + column)
    if residual is not None:
        y += tl.load(residual + index, mask=mask, other=0.0)
    if raw is not None:
        tl.store(raw + index, y, mask=mask)
    if act is not None:
        channel = column % act_channels
        wave = tl.sin(y * tl.load(frequency + channel))
        tl.store(act + index, y + wave * wave * tl.load(magnitude + channel), mask=mask)


@triton.jit(do_not_specialize=["rows", "dilation"])
def _product_kernel(
    x, high, low, bias, scale, residual, frequency, magnitude, raw, act, partial,
    rows, outs, depth, channels, dilation, part, act_channels, eps,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile (BM, BN) of the product over columns [part * z, part * (z + 1)) of the operand."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    in_rows, in_outs = row < rows, column < outs
    first = tl.program_id(2) * part
    x_row = x + row[:, None] * channels
    w_column = column[None, :] * depth
    total = tl.zeros((BM, BN), tl.float32)
    rest = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for k in range(first, tl.minimum(first + part, depth), BK):
        if EVEN:  # a block of columns lies within one tap
            tap = k // channels
            offset = (tap * dilation * channels + (k - tap * channels)) + step
            x_mask = in_rows[:, None]
            w_mask = in_outs[None, :]
        else:
            tap = (k + step) // channels
            offset = tap * dilation * channels + (k + step) % channels
            x_mask = in_rows[:, None] & (k + step < depth)[None, :]
            w_mask = in_outs[None, :] & (k + step < depth)[:, None]
        a = tl.load(x_row + offset[None, :], mask=x_mask, other=0.0)
        w = tl.load(high + w_column + (k + step)[:, None], mask=w_mask, other=0.0)
        if NORM:
            squares += tl.sum(a * a, 1)
        a *= 1.0 / _INPUT_SCALE
        a_high = a.to(tl.float16)
        total = tl.dot(a_high, w, total)
        a_low = ((a - a_high.to(tl.float32)) * _LOW_SCALE).to(tl.float16)
        rest = tl.dot(a_low, w, rest)
        w_low = tl.load(low + w_column + (k + step)[:, None], mask=w_mask, other=0.0)
        rest = tl.dot(a_high, w_low, rest)
    total += rest * (1.0 / _LOW_SCALE)
    total *= _INPUT_SCALE
    if NORM:
        total *= tl.rsqrt(squares / depth + eps)[:, None]
    if SWIGLU:
        gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
        total = gate / (1.0 + tl.exp(-gate)) * up
        outs //= 2
        column = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        in_outs = column < outs
    index = row[:, None] * outs + column[None, :]
    mask = in_rows[:, None] & in_outs[None, :]
    if partial is not None:
        tl.store(partial + tl.program_id(2) * rows * outs + index, total, mask=mask)
    else:
        safe = tl.where(in_outs, column, 0)[None, :]
        _store(total, index, safe, mask, bias, scale, residual, frequency, magnitude, raw, act, act_channels, GELU)


@triton.jit(do_not_specialize=["rows", "parts"])
def _sum_kernel(
    partial, bias, scale, residual, frequency, magnitude, raw, act, rows, outs, parts, act_channels,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of a product in their order, then does what `_store` does."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows * outs
    y = tl.zeros((BLOCK,), tl.float32)
    for z in range(parts):
        y += tl.load(partial + z * rows * outs + index, mask=mask, other=0.0)
    _store(y, index, index % outs, mask, bias, scale, residual, frequency, magnitude, raw, act, act_channels, GELU)


@triton.jit
def rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["frames"])
def _attention_kernel(
    qkv, keys, values, out, position, inverse_frequency, frames, before, scale,
    HALF: tl.constexpr, PLACES: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Query `i` of head `h`: over the `before` cached places and the new frames 0..i; stores its own key and value."""
    h, i, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    dim = tl.arange(0, HALF)
    now = tl.load(position)
    frequency = tl.load(inverse_frequency + dim)
    width = heads * 2 * HALF
    own = qkv + i * 3 * width + h * 2 * HALF + dim
    angle = (now + i).to(tl.float32) * frequency
    cos, sin = tl.cos(angle), tl.sin(angle)
    q1, q2 = rotated(tl.load(own), tl.load(own + HALF), cos, sin)
    k1, k2 = rotated(tl.load(own + width), tl.load(own + width + HALF), cos, sin)
    v1, v2 = tl.load(own + 2 * width), tl.load(own + 2 * width + HALF)
    head = h * (before + frames) * 2 * HALF
    mine = head + (before + i) * 2 * HALF + dim
    tl.store(keys + mine, k1)
    tl.store(keys + mine + HALF, k2)
    tl.store(values + mine, v1)
    tl.store(values + mine + HALF, v2)
    q1, q2 = q1 * scale, q2 * scale

    place = tl.arange(0, PLACES)
    # in the window of this query, and not before the first frame
    seen = (place < before) & (place >= i) & (before - place <= now)
    cached = head + place[:, None] * 2 * HALF + dim[None, :]
    scores = tl.sum(tl.load(keys + cached, mask=seen[:, None], other=0.0) * q1[None, :], 1)
    scores += tl.sum(tl.load(keys + cached + HALF, mask=seen[:, None], other=0.0) * q2[None, :], 1)
    scores = tl.where(seen, scores, float("-inf"))

    j = tl.arange(0, NEW)
    known = (j <= i)[:, None]
    new = qkv + j[:, None] * 3 * width + h * 2 * HALF + dim[None, :]
    angles = (now + j).to(tl.float32)[:, None] * frequency[None, :]
    n1 = tl.load(new + width, mask=known, other=0.0)
    n2 = tl.load(new + width + HALF, mask=known, other=0.0)
    n1, n2 = rotated(n1, n2, tl.cos(angles), tl.sin(angles))
    fresh = tl.where(j <= i, tl.sum(n1 * q1[None, :], 1) + tl.sum(n2 * q2[None, :], 1), float("-inf"))

    top = tl.maximum(tl.max(scores, 0), tl.max(fresh, 0))
    scores, fresh = tl.exp(scores - top), tl.exp(fresh - top)
    total = tl.sum(scores, 0) + tl.sum(fresh, 0)
    y1 = tl.sum(tl.load(values + cached, mask=seen[:, None], other=0.0) * scores[:, None], 0)
    y2 = tl.sum(tl.load(values + cached + HALF, mask=seen[:, None], other=0.0) * scores[:, None], 0)
    y1 += tl.sum(tl.load(new + 2 * width, mask=known, other=0.0) * fresh[:, None], 0)
    y2 += tl.sum(tl.load(new + 2 * width + HALF, mask=known, other=0.0) * fresh[:, None], 0)
    result = out + i * width + h * 2 * HALF + dim
    tl.store(result, y1 / total)
    tl.store(result + HALF, y2 / total)


@triton.jit
def _gather_kernel(codes, books, out, entries, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Frame t: the entry of book 0, then the sum of the entries of the other books."""
    t = tl.program_id(0)
    dim = tl.arange(0, WIDTH)
    rest = tl.zeros((WIDTH,), tl.float32)
    for g in tl.static_range(1, GROUPS):
        rest += tl.load(books + (tl.load(codes + t * GROUPS + g) + g * entries) * WIDTH + dim)
    tl.store(out + t * 2 * WIDTH + dim, tl.load(books + tl.load(codes + t * GROUPS) * WIDTH + dim))
    tl.store(out + t * 2 * WIDTH + WIDTH + dim, rest)


@triton.jit
def _depthwise_kernel(x, taps, bias, weight, shift, out, channels, eps, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Row t of the depthwise convolution of ConvNeXt, and its LayerNorm."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < channels
    y = tl.load(bias + c, mask=mask, other=0.0)
    for j in tl.static_range(TAPS):
        y += tl.load(x + (t + j) * channels + c, mask=mask, other=0.0) * tl.load(
            taps + j * channels + c, mask=mask, other=0.0
        )
    centred = tl.where(mask, y - tl.sum(y, 0) / channels, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / channels + eps)
    y = normed * tl.load(weight + c, mask=mask, other=0.0) + tl.load(shift + c, mask=mask, other=0.0)
    tl.store(out + t * channels + c, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _waveform_kernel(x, taps, bias, pcm, rows, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The last convolution, to one channel, clamped to full scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (c < channels)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in tl.static_range(TAPS):
        a = tl.load(x + (row + j)[:, None] * channels + c[None, :], mask=mask, other=0.0)
        total += a * tl.load(taps + j * channels + c, mask=c < channels, other=0.0)[None, :]
    y = tl.sum(total, 1) + tl.load(bias)
    tl.store(pcm + row, tl.minimum(tl.maximum(y, -1.0), 1.0), mask=row < rows)


@triton.jit(do_not_specialize=["frames"])
def _move_kernel(source, target, table, position, frames, WORDS: tl.constexpr):
    """Row p of `table` (from, to, count): copies that many values; program 0 also moves the position on."""
    p = tl.program_id(0)
    start, end, count = tl.load(table + 3 * p), tl.load(table + 3 * p + 1), tl.load(table + 3 * p + 2)
    i = tl.arange(0, WORDS)
    tl.store(target + end + i, tl.load(source + start + i, mask=i < count), mask=i < count)
    if p == 0 and frames > 0:
        tl.store(position, tl.load(position) + frames)


def product(
    x: Tensor, weight: Packed, rows: int, *, norm_eps: float | None = None, swiglu: bool = False, gelu: bool = False,
    scale: Tensor | None = None, residual: Tensor | None = None, raw: Tensor | None = None,
    snake: SnakeBeta | None = None, act: Tensor | None = None,
) -> None:  # fmt: skip
    """y = x @ weight + bias for `rows` rows, y = gelu(y), y * scale + residual -> `raw`; snake(y) -> `act`.

    `x` (rows + history, channels). `norm_eps`: RMSNorm of the operand, whose weight is part of `weight`. `swiglu`: of
    each two columns that follow each other, silu(first) * second is the result, half as wide; with `norm_eps` and `raw`
    only. `raw` and `act` hold rows * outs values; `raw` may be `residual`.
    """
    outs, depth = weight.high.shape
    shape = tile(rows, outs, depth, weight.channels, splittable=norm_eps is None)
    frequency, magnitude = (snake.frequency, snake.magnitude) if snake else (None, None)
    act_channels = len(frequency) if snake else outs
    partial = None
    if shape.parts > 1:
        partial = torch.empty(shape.parts * rows * outs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, shape.rows), triton.cdiv(outs, shape.outs), shape.parts)
    _product_kernel[grid](
        x, weight.high, weight.low, weight.bias, scale, residual, frequency, magnitude, raw, act, partial,
        rows, outs, depth, weight.channels, weight.dilation, shape.part, act_channels, norm_eps or 0.0,
        NORM=norm_eps is not None, SWIGLU=swiglu, GELU=gelu, EVEN=shape.even,
        BM=shape.rows, BN=shape.outs, BK=shape.depth, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if partial is not None:
        _sum_kernel[(triton.cdiv(rows * outs, 512),)](
            partial, weight.bias, scale, residual, frequency, magnitude, raw, act, rows, outs, shape.parts,
            act_channels, GELU=gelu, BLOCK=512,
        )  # fmt: skip


def attention(
    qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor, position: Tensor, inverse_frequency: Tensor
) -> None:
    """`qkv` (n, 3 * heads * head_dim) -> `out` (n, heads * head_dim). keys, values (heads, window - 1 + n, head_dim):
    the last n places are written, keys rotated."""
    frames, (heads, places, head_dim) = len(qkv), keys.shape
    before = places - frames
    _attention_kernel[(heads, frames)](
        qkv, keys, values, out, position, inverse_frequency, frames, before, head_dim**-0.5,
        HALF=head_dim // 2, PLACES=triton.next_power_of_2(before), NEW=max(2, triton.next_power_of_2(frames)),
    )  # fmt: skip


def gather(codes: Tensor, books: Tensor, out: Tensor) -> None:
    """`codes` (n, groups) int64, `books` (groups * entries, width) -> `out` (n, 2 * width): book 0, sum of others."""
    frames, groups = codes.shape
    _gather_kernel[(frames,)](codes, books, out, len(books) // groups, GROUPS=groups, WIDTH=books.shape[1])


def depthwise_norm(x: Tensor, taps: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor], eps: float, out: Tensor) -> None:
    """`x` (k - 1 + rows, channels), `taps` (k, channels) -> `out` (rows, channels), normalised."""
    rows, channels = out.shape
    _depthwise_kernel[(rows,)](
        x, taps, bias, *norm, out, channels, eps, TAPS=len(taps), BLOCK=triton.next_power_of_2(channels)
    )


def waveform(x: Tensor, taps: Tensor, bias: Tensor, pcm: Tensor) -> None:
    """`x` (k - 1 + samples, channels), `taps` (k, channels), `bias` (1,) -> `pcm` (samples,) in [-1, 1]."""
    k, channels = taps.shape
    _waveform_kernel[(triton.cdiv(len(pcm), 16),)](
        x, taps, bias, pcm, len(pcm), channels, TAPS=k, ROWS=16, BLOCK=triton.next_power_of_2(channels)
    )


def move(source: Tensor, target: Tensor, table: Tensor, position: Tensor, frames: int) -> None:
    """Copies pieces of flat `source` to flat `target`, by rows (from, to, count <= MOVE_WORDS) of `table` int64, and
    adds `frames` to `position` () int64."""
    _move_kernel[(len(table),)](source, target, table, position, frames, WORDS=MOVE_WORDS)
