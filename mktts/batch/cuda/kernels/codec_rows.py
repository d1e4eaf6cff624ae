"""The batched codec's kernels that are not matrix products. "Stored form" is that of `codec_products`.

Each sum is made by one program, in a block whose shape does not depend on how many lanes there are.
"""

import triton
import triton.language as tl

from mktts.batch.cuda.kernels.codec_products import load, store
from mktts.codec.fused_kernels import rotated


@triton.jit
def begin(
    codes, books, slots, positions, inverse_frequency, quantized, turns,
    ENTRIES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (lane): what the codes (lanes, GROUPS) int32 stand for, and the rotation of the lane's position.

    quantized (lanes, 2, 2 * WIDTH), stored form: the entry of book 0, then the sum of the others'. turns (lanes, 2,
    HALF): cosines, then sines. An id that is not an entry of its book (end of speech) is taken as the nearest one.
    """
    lane = tl.program_id(0)
    dim = tl.arange(0, WIDTH)
    here = dim < WIDTH
    first = tl.minimum(tl.maximum(tl.load(codes + lane * GROUPS), 0), ENTRIES - 1)
    rest = tl.zeros((WIDTH,), tl.float32)
    for g in tl.static_range(1, GROUPS):
        entry = tl.minimum(tl.maximum(tl.load(codes + lane * GROUPS + g), 0), ENTRIES - 1)
        rest += tl.load(books + (entry + g * ENTRIES) * WIDTH + dim)
    at = quantized + lane * 4 * WIDTH + dim
    store(at, tl.load(books + first * WIDTH + dim), here, 2 * WIDTH, True)
    store(at + WIDTH, rest, here, 2 * WIDTH, True)
    pair = tl.arange(0, HALF)
    position = tl.load(positions + tl.load(slots + lane))
    angle = position.to(tl.float32) * tl.load(inverse_frequency + pair)
    tl.store(turns + lane * 2 * HALF + pair, tl.cos(angle))
    tl.store(turns + lane * 2 * HALF + HALF + pair, tl.sin(angle))


@triton.jit(do_not_specialize=["state_words"])
def move(state, work, pieces, slots, positions, nobody, state_words, SAVE: tl.constexpr, WORDS: tl.constexpr):
    """Program (piece, lane): copies a piece of the lane's histories from its slot to the front of the rows that a
    layer reads, or, with SAVE, the newest rows back.

    pieces (n, 5) int64, in units of 8 values: where in the slot's state; where in `work` to load to; where to save
    from; from a lane to the next there; how many (WORDS at most). SAVE: the lane's position goes on by one, but not
    that of the slot `nobody`, whose lanes are padding.
    """
    piece = pieces + 5 * tl.program_id(0)
    lane = tl.program_id(1)
    slot = tl.load(slots + lane)
    kept = state + (slot.to(tl.int64) * state_words + tl.load(piece)) * 8
    i = tl.arange(0, WORDS)
    here = i < tl.load(piece + 4) * 8
    lanes_on = lane * tl.load(piece + 3)
    if SAVE:
        value = tl.load(work + (tl.load(piece + 2) + lanes_on) * 8 + i, mask=here, other=0.0)
        tl.store(kept + i, value, mask=here)
        if (tl.program_id(0) == 0) & (slot != nobody):
            tl.store(positions + slot, tl.load(positions + slot) + 1)
    else:
        value = tl.load(kept + i, mask=here, other=0.0)
        tl.store(work + (tl.load(piece + 1) + lanes_on) * 8 + i, value, mask=here)


@triton.jit
def norm(x, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): x (rows, WIDTH) fp32 by its root mean square -> out (rows, 2, WIDTH), stored form.

    The norm's weight is in the product that follows.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    here = c < WIDTH
    y = tl.load(x + row * WIDTH + c, mask=here, other=0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    store(out + row * 2 * WIDTH + c, y, here, WIDTH, True)


@triton.jit
def attend(
    qkv, turns, slots, positions, keys, values, out, layer, layers, scale,
    HALF: tl.constexpr, WINDOW: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Program (head, lane): a query over its window, in the ring of the lane's slot; its own key and value go there.

    qkv (lanes, 3 * heads * 2 HALF) fp32; keys, values (slots, layers, heads, WINDOW, 2 HALF): the frame at position p
    has place p % WINDOW; out (lanes, 2, heads * 2 HALF), stored form. PLACES: a power of two, WINDOW or more.
    """
    h, lane, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    D: tl.constexpr = 2 * HALF
    T: tl.constexpr = keys.dtype.element_ty
    pair = tl.arange(0, HALF)
    width = heads * D
    slot = tl.load(slots + lane)
    now = tl.load(positions + slot)
    cos, sin = tl.load(turns + lane * D + pair), tl.load(turns + lane * D + HALF + pair)
    own = qkv + lane * 3 * width + h * D + pair
    q1, q2 = rotated(tl.load(own), tl.load(own + HALF), cos, sin)
    k1, k2 = rotated(tl.load(own + width), tl.load(own + width + HALF), cos, sin)
    v1, v2 = tl.load(own + 2 * width), tl.load(own + 2 * width + HALF)
    q1, q2 = q1 * scale, q2 * scale

    ring = ((slot.to(tl.int64) * layers + layer) * heads + h) * WINDOW * D
    place = tl.arange(0, PLACES)
    # the place of this frame holds one that has left the window, and places from `now` on hold none before a lap
    seen = (place < WINDOW) & (place < now) & ((now - place) % WINDOW != 0)
    at = ring + place[:, None] * D + pair[None, :]
    scores = tl.sum(tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32) * q1[None, :], 1)
    scores += tl.sum(tl.load(keys + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32) * q2[None, :], 1)
    scores = tl.where(seen, scores, float("-inf"))
    fresh = tl.sum(k1 * q1, 0) + tl.sum(k2 * q2, 0)
    top = tl.maximum(tl.max(scores, 0), fresh)
    scores, fresh = tl.exp(scores - top), tl.exp(fresh - top)
    total = tl.sum(scores, 0) + fresh
    y1 = tl.sum(tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32) * scores[:, None], 0) + v1 * fresh
    y2 = tl.sum(tl.load(values + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32) * scores[:, None], 0)
    y2 += v2 * fresh

    mine = ring + (now % WINDOW) * D + pair
    tl.store(keys + mine, k1.to(T))
    tl.store(keys + mine + HALF, k2.to(T))
    tl.store(values + mine, v1.to(T))
    tl.store(values + mine + HALF, v2.to(T))
    result = out + lane * 2 * width + h * D + pair
    store(result, y1 / total, pair < HALF, width, True)
    store(result + HALF, y2 / total, pair < HALF, width, True)


@triton.jit(do_not_specialize=["per", "x_lane", "x_low", "out_lane", "out_low"])
def depthwise_norm(
    x, taps, bias, weight, shift, out, per, x_lane, x_low, out_lane, out_low, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the depthwise convolution of ConvNeXt and its LayerNorm. Row r is row r % per of lane r // per.

    x (lanes, 2, TAPS - 1 + per, CHANNELS), out (lanes, 2, per, CHANNELS), stored form: with strides of 8 x_lane, 8
    x_low, 8 out_lane and 8 out_low.
    """
    row = tl.program_id(0)
    lane = row // per
    c = tl.arange(0, BLOCK)
    here = c < CHANNELS
    at = x + lane * (x_lane * 8) + (row - lane * per) * CHANNELS + c
    y = tl.load(bias + c, mask=here, other=0.0)
    for j in tl.static_range(TAPS):
        tap = tl.load(taps + j * CHANNELS + c, mask=here, other=0.0)
        y = tl.fma(load(at + j * CHANNELS, here, x_low * 8, True), tap, y)
    centred = tl.where(here, y - tl.sum(y, 0) / CHANNELS, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / CHANNELS + eps)
    y = y * tl.load(weight + c, mask=here, other=0.0) + tl.load(shift + c, mask=here, other=0.0)
    at = out + lane * (out_lane * 8) + (row - lane * per) * CHANNELS + c
    store(at, y, here, out_low * 8, True)


@triton.jit(do_not_specialize=["rows", "per", "x_lane", "x_low"])
def waveform(
    x, taps, bias, pcm, rows, per, x_lane, x_low,
    SPLIT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of ROWS rows): the last convolution, to one channel, clamped to full scale.

    x (lanes, 1 or 2, TAPS - 1 + per, CHANNELS), stored form; taps (TAPS, CHANNELS); pcm (rows,) fp32.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    here = c < CHANNELS
    real = tl.minimum(row, rows - 1)
    lane = real // per
    at = x + (lane * (x_lane * 8) + (real - lane * per) * CHANNELS)[:, None] + c[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in tl.static_range(TAPS):
        tap = tl.load(taps + j * CHANNELS + c, mask=here, other=0.0)[None, :]
        total = tl.fma(load(at + j * CHANNELS, here[None, :], x_low * 8, SPLIT), tap + tl.zeros_like(total), total)
    y = tl.sum(total, 1) + tl.load(bias)
    tl.store(pcm + row, tl.minimum(tl.maximum(y, -1.0), 1.0), mask=row < rows)
