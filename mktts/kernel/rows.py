"""Triton kernels for the operations between matrix products of many rows. Every value that the oracle rounds is rounded
here too, to the dtype T of the activations."""

import triton
import triton.language as tl


@triton.jit
def rms(x, weight, eps, T: tl.constexpr, N: tl.constexpr):
    """x (N,) fp32, normalised in fp32, rounded to T, multiplied by weight, rounded to T, as in Qwen3RMSNorm."""
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)).to(T).to(tl.float32)
    return (y * weight).to(T)


@triton.jit
def add_norm(x, delta, weight, out, eps, N: tl.constexpr, ADDS: tl.constexpr):
    """Program (row): x += delta if ADDS, then out = rms(x) * weight. x, delta, out: (rows, N)."""
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
def norm_rope(heads, weight, cos, sin, eps, T: tl.constexpr, D: tl.constexpr):
    """Normalises and rotates heads; returns both halves, in T. heads: pointers (N, D / 2) to their first halves.

    weight: pointers to the first half of the norm's weight, of the same width. cos, sin: fp32, of the same width."""
    HALF: tl.constexpr = D // 2
    a = tl.load(heads).to(tl.float32)
    b = tl.load(heads + HALF).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
    a = ((a * scale).to(T).to(tl.float32) * tl.load(weight).to(tl.float32)).to(T).to(tl.float32)
    b = ((b * scale).to(T).to(tl.float32) * tl.load(weight + HALF).to(tl.float32)).to(T).to(tl.float32)
    first = ((a * cos).to(T).to(tl.float32) + (-b * sin).to(T).to(tl.float32)).to(T)
    second = ((b * cos).to(T).to(tl.float32) + (a * sin).to(T).to(tl.float32)).to(T)
    return first, second


@triton.jit
def turn_heads(
    qkv, q_norm, k_norm, cos, sin, turns_stride, index, q_out, keys, values, eps, positions,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, TILE kv heads): normalises and rotates their query heads, into q_out, and their keys; writes keys
    and values at position index[row].

    qkv: (rows, (HEADS + 2 KV_HEADS) D). cos, sin: (positions, D / 2), with turns_stride between positions. q_out:
    (KV_HEADS, HEADS / KV_HEADS, rows, D). keys, values: (KV_HEADS, positions, D)."""
    T: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    kv_head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(index + row)
    d = tl.broadcast_to(tl.arange(0, HALF)[None, :], (TILE, HALF))
    c = tl.load(cos + position * turns_stride + d).to(tl.float32)
    s = tl.load(sin + position * turns_stride + d).to(tl.float32)
    heads = qkv + row * (HEADS + 2 * KV_HEADS) * D
    for g in tl.static_range(GROUP):
        head = (kv_head * GROUP + g)[:, None]
        a, b = norm_rope(heads + head * D + d, q_norm + d, c, s, eps, T, D)
        out = q_out + (head * rows + row) * D + d
        tl.store(out, a)
        tl.store(out + HALF, b)
    a, b = norm_rope(heads + (HEADS + kv_head)[:, None] * D + d, k_norm + d, c, s, eps, T, D)
    to = (kv_head[:, None] * positions + position) * D + d
    tl.store(keys + to, a)
    tl.store(keys + to + HALF, b)
    value = heads + (HEADS + KV_HEADS + kv_head)[:, None] * D + d
    tl.store(values + to, tl.load(value))
    tl.store(values + to + HALF, tl.load(value + HALF))
