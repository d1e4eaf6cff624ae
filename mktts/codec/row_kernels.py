"""The fused codec's kernels that are not matrix products. Rows are fp32 or in stored form (`mktts.codec.packed`), with
FRAMES frames for each lane; row r belongs to lane r // FRAMES.

Each sum is computed by one program, in a block whose shape does not depend on the number of lanes."""

import triton
import triton.language as tl

from mktts.codec.product_kernels import load, store


@triton.jit
def begin(
    codes, books, slots, positions, inverse_frequency, quantized, turns,
    ENTRIES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, FRAMES: tl.constexpr,
):  # fmt: skip
    """Program (row): looks up the codes (rows, GROUPS), integers, and computes the rotation of the frame's position.

    quantized: (rows, planes, 2 * WIDTH), the entry of codebook 0, then the sum of the others' entries. turns: (rows, 2,
    HALF), cosines, then sines. A code outside its codebook (end of speech) is clamped to the nearest entry."""
    row = tl.program_id(0)
    dim = tl.arange(0, WIDTH)
    here = dim < WIDTH
    first = tl.minimum(tl.maximum(tl.load(codes + row * GROUPS), 0), ENTRIES - 1)
    rest = tl.zeros((WIDTH,), tl.float32)
    for g in tl.static_range(1, GROUPS):
        entry = tl.minimum(tl.maximum(tl.load(codes + row * GROUPS + g), 0), ENTRIES - 1)
        rest += tl.load(books + (entry + g * ENTRIES) * WIDTH + dim)
    PLANES: tl.constexpr = 1 if quantized.dtype.element_ty == tl.float32 else 2
    at = quantized + row * (PLANES * 2) * WIDTH + dim
    store(at, tl.load(books + first * WIDTH + dim), here, 2 * WIDTH, True)
    store(at + WIDTH, rest, here, 2 * WIDTH, True)
    pair = tl.arange(0, HALF)
    position = tl.load(positions + tl.load(slots + row // FRAMES)) + row % FRAMES
    angle = position.to(tl.float32) * tl.load(inverse_frequency + pair)
    tl.store(turns + row * 2 * HALF + pair, tl.cos(angle))
    tl.store(turns + row * 2 * HALF + HALF + pair, tl.sin(angle))


@triton.jit(do_not_specialize=["state_words"])
def move(
    state, work, pieces, slots, positions, nobody, state_words,
    SAVE: tl.constexpr, WORDS: tl.constexpr, FRAMES: tl.constexpr,
):  # fmt: skip
    """Program (piece, lane): copies a piece of the lane's histories from its slot to the front of a layer's input rows
    or, with SAVE, copies the newest rows back.

    pieces: (n, 5) int64, in units of 8 values: offset in the slot's state; offset in `work` to load to; offset in
    `work` to save from; stride of `work` between lanes; size (at most WORDS). SAVE also advances the lane's position,
    except for the slot `nobody` of padded lanes."""
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
            tl.store(positions + slot, tl.load(positions + slot) + FRAMES)
    else:
        value = tl.load(kept + i, mask=here, other=0.0)
        tl.store(work + (tl.load(piece + 1) + lanes_on) * 8 + i, value, mask=here)


@triton.jit
def norm(x, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): divides x (rows, WIDTH) fp32 by its root mean square -> out (rows, 2, WIDTH), stored form.

    The norm's weight is part of the next product."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    here = c < WIDTH
    y = tl.load(x + row * WIDTH + c, mask=here, other=0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    store(out + row * 2 * WIDTH + c, y, here, WIDTH, True)


@triton.jit
def rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def attend(
    qkv, turns, slots, positions, keys, values, out, layer, layers, scale,
    HALF: tl.constexpr, WINDOW: tl.constexpr, PLACES: tl.constexpr, RING: tl.constexpr, FRAMES: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    """Program (head, row): attention of one query over its window; stores the row's own key and value.

    qkv: (rows, 3 * heads * 2 HALF) fp32. out: (rows, planes, heads * 2 HALF). keys, values: with RING, for one frame of
    each lane, (slots, layers, heads, WINDOW, 2 HALF), position p at place p % WINDOW; otherwise, for one lane, (layers,
    heads, WINDOW - 1 + FRAMES, 2 HALF), oldest first. PLACES, NEW: powers of two, at least WINDOW and FRAMES."""
    h, row, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    D: tl.constexpr = 2 * HALF
    T: tl.constexpr = keys.dtype.element_ty
    pair = tl.arange(0, HALF)
    width = heads * D
    slot = tl.load(slots + row // FRAMES)
    now = tl.load(positions + slot)
    cos, sin = tl.load(turns + row * D + pair), tl.load(turns + row * D + HALF + pair)
    own = qkv + row * 3 * width + h * D + pair
    q1, q2 = rotated(tl.load(own), tl.load(own + HALF), cos, sin)
    k1, k2 = rotated(tl.load(own + width), tl.load(own + width + HALF), cos, sin)
    v1, v2 = tl.load(own + 2 * width), tl.load(own + 2 * width + HALF)
    q1, q2 = q1 * scale, q2 * scale

    if RING:
        head = ((slot.to(tl.int64) * layers + layer) * heads + h) * WINDOW * D
    else:
        head = (layer * heads + h) * (WINDOW - 1 + FRAMES) * D
    place = tl.arange(0, PLACES)
    if RING:
        # this frame's place holds a frame that left the window; in the first lap, places from `now` on are empty
        seen = (place < WINDOW) & (place < now) & ((now - place) % WINDOW != 0)
    else:
        # inside the window of this query and not before the first frame
        seen = (place < WINDOW - 1) & (place >= row) & (WINDOW - 1 - place <= now)
    at = head + place[:, None] * D + pair[None, :]
    scores = tl.sum(tl.load(keys + at, mask=seen[:, None], other=0.0).to(tl.float32) * q1[None, :], 1)
    scores += tl.sum(tl.load(keys + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32) * q2[None, :], 1)
    scores = tl.where(seen, scores, float("-inf"))
    fresh = tl.sum(k1 * q1, 0) + tl.sum(k2 * q2, 0)
    top = tl.maximum(tl.max(scores, 0), fresh)
    if FRAMES > 1:  # earlier frames of this pass, whose keys are stored by other programs
        j = tl.arange(0, NEW)
        earlier = (j < row)[:, None]
        other = qkv + j[:, None] * 3 * width + h * D + pair[None, :]
        turn = turns + j[:, None] * D + pair[None, :]
        o1, o2 = tl.load(other + width, mask=earlier, other=0.0), tl.load(other + width + HALF, mask=earlier, other=0.0)
        o_cos, o_sin = tl.load(turn, mask=earlier, other=0.0), tl.load(turn + HALF, mask=earlier, other=0.0)
        o1, o2 = rotated(o1, o2, o_cos, o_sin)
        others = tl.where(j < row, tl.sum(o1 * q1[None, :], 1) + tl.sum(o2 * q2[None, :], 1), float("-inf"))
        top = tl.maximum(top, tl.max(others, 0))
    scores, fresh = tl.exp(scores - top), tl.exp(fresh - top)
    total = tl.sum(scores, 0) + fresh
    y1 = tl.sum(tl.load(values + at, mask=seen[:, None], other=0.0).to(tl.float32) * scores[:, None], 0) + v1 * fresh
    y2 = tl.sum(tl.load(values + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32) * scores[:, None], 0)
    y2 += v2 * fresh
    if FRAMES > 1:
        others = tl.exp(others - top)
        total += tl.sum(others, 0)
        y1 += tl.sum(tl.load(other + 2 * width, mask=earlier, other=0.0) * others[:, None], 0)
        y2 += tl.sum(tl.load(other + 2 * width + HALF, mask=earlier, other=0.0) * others[:, None], 0)

    mine = head + ((now % WINDOW) if RING else (WINDOW - 1 + row)) * D + pair
    tl.store(keys + mine, k1.to(T))
    tl.store(keys + mine + HALF, k2.to(T))
    tl.store(values + mine, v1.to(T))
    tl.store(values + mine + HALF, v2.to(T))
    PLANES: tl.constexpr = 1 if out.dtype.element_ty == tl.float32 else 2
    result = out + row * PLANES * width + h * D + pair
    store(result, y1 / total, pair < HALF, width, True)
    store(result + HALF, y2 / total, pair < HALF, width, True)


@triton.jit(do_not_specialize=["per", "x_lane", "x_low", "out_lane", "out_low"])
def depthwise_norm(
    x, taps, bias, weight, shift, out, per, x_lane, x_low, out_lane, out_low, eps,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): ConvNeXt's depthwise convolution and its LayerNorm. Row r is row r % per of lane r // per.

    x: (lanes, planes, TAPS - 1 + per, CHANNELS). out: (lanes, planes, per, CHANNELS). Strides of lanes and planes in
    units of 8 values: x_lane, x_low, out_lane, out_low."""
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

    x (lanes, planes, TAPS - 1 + per, CHANNELS); taps (TAPS, CHANNELS); pcm (rows,) fp32."""
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
