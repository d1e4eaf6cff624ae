"""Triton kernels between the talker's products. The unit is a row, not a stream: row r belongs to slot row_slot[r] at
position row_pos[r], so that the rows of lanes and of prompts ride in one launch.

Keys and values are paged: pages (pages, layers, kv heads, 2, PAGE, D), and a slot's i-th page stands in
table[slot, i]. Every value that the oracle rounds is rounded here too, to the dtype T of the activations.
"""

import triton
import triton.language as tl

_FAR = tl.constexpr(-1.0e30)  # a score that no position reaches: its exponential is 0


@triton.jit
def rms(x, weight, eps, T: tl.constexpr, N: tl.constexpr):
    """x (N,) fp32 normalised in fp32, rounded to T, times weight, rounded to T, as Qwen3RMSNorm."""
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)).to(T).to(tl.float32)
    return (y * weight).to(T)


@triton.jit
def add_norm(x, delta, weight, out, eps, N: tl.constexpr, ADDS: tl.constexpr):
    """Program (row): x += delta where ADDS, then out = rms(x) * weight. x, delta, out (rows, N)."""
    T: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, N)
    value = tl.load(x + row * N + c).to(tl.float32)
    if ADDS:
        value = (value + tl.load(delta + row * N + c).to(tl.float32)).to(T).to(tl.float32)
        tl.store(x + row * N + c, value.to(T))
    tl.store(out + row * N + c, rms(value, tl.load(weight + c).to(tl.float32), eps, T, N))


@triton.jit
def silu_mul(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block): out (rows, N) = silu(gate) * up of gate_up (rows, 2 N)."""
    T: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < N
    gate = tl.load(gate_up + row * 2 * N + c, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + c, mask=live, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(T).to(tl.float32)
    tl.store(out + row * N + c, (gate * up).to(T), mask=live)


@triton.jit
def norm_rope(head, weight, cos, sin, eps, T: tl.constexpr, D: tl.constexpr):
    """The head (D,) at `head`, normalised and rotated: its two halves, in T."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    a = tl.load(head + d).to(tl.float32)
    b = tl.load(head + HALF + d).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
    a = ((a * scale).to(T).to(tl.float32) * tl.load(weight + d).to(tl.float32)).to(T).to(tl.float32)
    b = ((b * scale).to(T).to(tl.float32) * tl.load(weight + HALF + d).to(tl.float32)).to(T).to(tl.float32)
    first = ((a * cos).to(T).to(tl.float32) + (-b * sin).to(T).to(tl.float32)).to(T)
    second = ((b * cos).to(T).to(tl.float32) + (a * sin).to(T).to(tl.float32)).to(T)
    return first, second


@triton.jit(do_not_specialize=["table_stride", "layer", "layers"])
def place_heads(
    qkv, q_norm, k_norm, cos, sin, row_slot, row_pos, table, pages, q_out, eps, table_stride, layer, layers,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head): norm and rotation of its query heads, into q_out, and of its key; key and value go to
    their page. qkv (rows, (HEADS + 2 KV_HEADS) D); cos, sin (positions, D / 2)."""
    T: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(row_slot + row)
    position = tl.load(row_pos + row)
    d = tl.arange(0, HALF)
    c = tl.load(cos + position * HALF + d).to(tl.float32)
    s = tl.load(sin + position * HALF + d).to(tl.float32)
    heads = qkv + row * (HEADS + 2 * KV_HEADS) * D
    for g in tl.static_range(GROUP):
        a, b = norm_rope(heads + (kv_head * GROUP + g) * D, q_norm, c, s, eps, T, D)
        out = q_out + (row * HEADS + kv_head * GROUP + g) * D
        tl.store(out + d, a)
        tl.store(out + HALF + d, b)
    a, b = norm_rope(heads + (HEADS + kv_head) * D, k_norm, c, s, eps, T, D)
    page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
    key = pages + (((page * layers + layer) * KV_HEADS + kv_head) * 2 * PAGE + position % PAGE) * D
    tl.store(key + d, a)
    tl.store(key + HALF + d, b)
    value = heads + (HEADS + KV_HEADS + kv_head) * D
    tl.store(key + PAGE * D + d, tl.load(value + d))
    tl.store(key + PAGE * D + HALF + d, tl.load(value + HALF + d))


@triton.jit(do_not_specialize=["start"])
def attend_predictor(
    qkv, q_norm, k_norm, cos, sin, cache, out, eps, scale, start,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, POSITIONS: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Program (lane, kv head) of the code predictor: norm, rotation, cache and attention of NEW positions from `start`.

    qkv (lanes * NEW, (HEADS + 2 KV_HEADS) D); cache (lanes, KV_HEADS, 2, POSITIONS, D) of this layer; out (lanes * NEW,
    HEADS D). All sixteen positions of a frame fit in registers, so that nothing is paged.
    """
    T: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    d = tl.arange(0, HALF)
    p = tl.arange(0, POSITIONS)
    keys = cache + (lane * KV_HEADS + kv_head) * 2 * POSITIONS * D
    values = keys + POSITIONS * D
    place = p[:, None] * D + d[None, :]
    old = (p < start)[:, None]
    k1 = tl.load(keys + place, mask=old, other=0.0).to(tl.float32)
    k2 = tl.load(keys + HALF + place, mask=old, other=0.0).to(tl.float32)
    v1 = tl.load(values + place, mask=old, other=0.0).to(tl.float32)
    v2 = tl.load(values + HALF + place, mask=old, other=0.0).to(tl.float32)
    for i in tl.static_range(NEW):
        heads = qkv + (lane * NEW + i) * (HEADS + 2 * KV_HEADS) * D
        position = start + i
        c = tl.load(cos + position * HALF + d).to(tl.float32)
        s = tl.load(sin + position * HALF + d).to(tl.float32)
        a, b = norm_rope(heads + (HEADS + kv_head) * D, k_norm, c, s, eps, T, D)
        va = tl.load(heads + (HEADS + KV_HEADS + kv_head) * D + d)
        vb = tl.load(heads + (HEADS + KV_HEADS + kv_head) * D + HALF + d)
        tl.store(keys + position * D + d, a)
        tl.store(keys + position * D + HALF + d, b)
        tl.store(values + position * D + d, va)
        tl.store(values + position * D + HALF + d, vb)
        here = (p == position)[:, None]
        k1 = tl.where(here, a.to(tl.float32)[None, :], k1)
        k2 = tl.where(here, b.to(tl.float32)[None, :], k2)
        v1 = tl.where(here, va.to(tl.float32)[None, :], v1)
        v2 = tl.where(here, vb.to(tl.float32)[None, :], v2)
        for g in tl.static_range(GROUP):
            qa, qb = norm_rope(heads + (kv_head * GROUP + g) * D, q_norm, c, s, eps, T, D)
            w = tl.sum(k1 * qa.to(tl.float32)[None, :], 1) + tl.sum(k2 * qb.to(tl.float32)[None, :], 1)
            w = tl.where(p <= position, w * scale, _FAR)
            w = tl.exp(w - tl.max(w, 0))
            w = w / tl.sum(w, 0)
            head = out + ((lane * NEW + i) * HEADS + kv_head * GROUP + g) * D
            tl.store(head + d, tl.sum(v1 * w[:, None], 0).to(T))
            tl.store(head + HALF + d, tl.sum(v2 * w[:, None], 0).to(T))
