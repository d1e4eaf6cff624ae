"""Triton kernels between the talker's products. The unit is a row, not a stream: row r belongs to slot row_slot[r] at
position row_pos[r], so that one launch takes the rows of lanes and of prompts.

Keys and values are paged: pages (pages, layers, kv heads, 2, PAGE, D); table[slot, i] is the slot's i-th page. Values
are rounded as in `mktts.kernel.rows`."""

import triton
import triton.language as tl

from mktts.kernel.rows import norm_rope, rms


@triton.jit(do_not_specialize=["lane_count", "nobody", "capacity"])
def inputs(
    slots, fresh, ends, text, prompt_slots, prompt_positions, prompt_rows, positions, frames, ended, seen,
    embedding_sum, row_slot, row_pos, x, h, norm_weight, eps, lane_count, nobody, capacity,
    H: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (row): the row's slot and position, its input x and the norm of that, h (rows, H).

    Rows before `lane_count` are those of lanes: x = round(sum of the newest frame's embeddings) + text row, at the
    slot's next position. A lane at its first frame (`fresh`) has no such row, since the rows of its prompt follow
    below; its slot begins anew: at position `ends`, with no frames, no code seen, not ended. A lane whose slot has
    ended, or is full, has no row either. A lane without a row, and a prompt row without an address, work on zeros at
    position 0 of the padding slot `nobody`. The first seven arguments are parts of the tick's block; positions, frames,
    ended (slots,) int32, seen (slots, V) uint8, embedding_sum (slots, H) fp32."""
    T: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, H)
    sums = tl.zeros((H,), tl.float32)
    if row < lane_count:
        slot = tl.load(slots + row)
        begins = tl.load(fresh + row) != 0
        position = tl.load(positions + slot)
        idle = begins | (tl.load(ended + slot) != 0) | (position >= capacity)
        address = tl.where(idle, 0, tl.load(text + row))
        sums = tl.load(embedding_sum + slot * H + c, mask=(c < H) & ~idle, other=0.0)
        tl.store(row_slot + row, tl.where(idle, nobody, slot.to(tl.int32)))
        tl.store(row_pos + row, tl.where(idle, 0, position))
        if begins:
            tl.store(positions + slot, tl.load(ends + row).to(tl.int32))
            tl.store(frames + slot, 0)
            tl.store(ended + slot, 0)
            i = tl.arange(0, SIZE)
            tl.store(seen + slot * V + i, tl.zeros((SIZE,), tl.uint8), mask=i < V)
        else:
            tl.store(positions + slot, tl.where(idle, position, position + 1))
    else:
        at = row - lane_count
        address = tl.load(prompt_rows + at)
        tl.store(row_slot + row, tl.load(prompt_slots + at).to(tl.int32))
        tl.store(row_pos + row, tl.load(prompt_positions + at).to(tl.int32))
    source = address.to(tl.pointer_type(T))
    value = sums.to(T).to(tl.float32) + tl.load(source + c, mask=(c < H) & (address != 0), other=0.0).to(tl.float32)
    value = value.to(T).to(tl.float32)
    tl.store(x + row * H + c, value.to(T))
    tl.store(h + row * H + c, rms(value, tl.load(norm_weight + c).to(tl.float32), eps, T, H))


_FAR = tl.constexpr(-1.0e30)  # a score that no position reaches: its exponential is 0


@triton.jit(do_not_specialize=["table_stride", "layer", "layers"])
def place_heads(
    qkv, q_norm, k_norm, cos, sin, row_slot, row_pos, table, pages, q_out, eps, table_stride, layer, layers,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (row, TILE kv heads): norm and rotation of their query heads, into q_out, and of their keys; keys and
    values go to their page. qkv (rows, (HEADS + 2 KV_HEADS) D); cos, sin (positions, D / 2)."""
    T: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(row_slot + row)
    position = tl.load(row_pos + row)
    d = tl.broadcast_to(tl.arange(0, HALF)[None, :], (TILE, HALF))
    c = tl.load(cos + position * HALF + d).to(tl.float32)
    s = tl.load(sin + position * HALF + d).to(tl.float32)
    heads = qkv + row * (HEADS + 2 * KV_HEADS) * D
    for g in tl.static_range(GROUP):
        at = (kv_head * GROUP + g)[:, None] * D + d
        a, b = norm_rope(heads + at, q_norm + d, c, s, eps, T, D)
        out = q_out + row * HEADS * D + at
        tl.store(out, a)
        tl.store(out + HALF, b)
    a, b = norm_rope(heads + (HEADS + kv_head)[:, None] * D + d, k_norm + d, c, s, eps, T, D)
    page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
    keys = pages + ((page * layers + layer) * KV_HEADS * 2 * PAGE + position % PAGE) * D
    keys += kv_head[:, None] * (2 * PAGE * D) + d
    values = heads + (HEADS + KV_HEADS + kv_head)[:, None] * D + d
    tl.store(keys, a)
    tl.store(keys + HALF, b)
    tl.store(keys + PAGE * D, tl.load(values))
    tl.store(keys + PAGE * D + HALF, tl.load(values + HALF))


@triton.jit(do_not_specialize=["start"])
def attend_predictor(
    qkv, q_norm, k_norm, cos, sin, cache, out, eps, scale, start,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, POSITIONS: tl.constexpr, TILE: tl.constexpr,
    OLD: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Program (lane, TILE kv heads) of the code predictor: norm, rotation, cache and attention of NEW positions from
    `start`, which is at most OLD.

    qkv (lanes * NEW, (HEADS + 2 KV_HEADS) D); cache (lanes, KV_HEADS, 2, POSITIONS, D) of this layer; out (lanes * NEW,
    HEADS D). All positions of a frame fit into registers, so that nothing is paged. Every tensor is (TILE, D / 2), the
    first or the second half of heads, so that sums over positions need no exchange between threads. OLD does not change
    the result: positions from `start` on add zeros."""
    T: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    d = tl.broadcast_to(tl.arange(0, HALF)[None, :], (TILE, HALF))
    keys = cache + lane * (KV_HEADS * 2 * POSITIONS * D) + kv_head[:, None] * (2 * POSITIONS * D) + d
    values = keys + POSITIONS * D
    k1, k2, v1, v2 = (), (), (), ()  # halves of keys and values by position, OLD of the cache, then the new ones
    for p in tl.static_range(OLD):
        old = (d >= 0) & (p < start)
        k1 += (tl.load(keys + p * D, mask=old, other=0.0),)
        k2 += (tl.load(keys + p * D + HALF, mask=old, other=0.0),)
        v1 += (tl.load(values + p * D, mask=old, other=0.0),)
        v2 += (tl.load(values + p * D + HALF, mask=old, other=0.0),)
    for i in tl.static_range(NEW):
        row = lane * NEW + i
        heads = qkv + row * (HEADS + 2 * KV_HEADS) * D
        c = tl.load(cos + (start + i) * HALF + d).to(tl.float32)
        s = tl.load(sin + (start + i) * HALF + d).to(tl.float32)
        a, b = norm_rope(heads + (HEADS + kv_head)[:, None] * D + d, k_norm + d, c, s, eps, T, D)
        value = heads + (HEADS + KV_HEADS + kv_head)[:, None] * D + d
        k1, k2, v1, v2 = k1 + (a,), k2 + (b,), v1 + (tl.load(value),), v2 + (tl.load(value + HALF),)
        q1, q2 = (), ()  # by query head of the group, as all tuples below
        for g in tl.static_range(GROUP):
            a, b = norm_rope(heads + (kv_head * GROUP + g)[:, None] * D + d, q_norm + d, c, s, eps, T, D)
            q1, q2 = q1 + (a.to(tl.float32),), q2 + (b.to(tl.float32),)
        scores = ()
        for p in tl.static_range(OLD + i + 1):
            a, b = k1[p].to(tl.float32), k2[p].to(tl.float32)
            for g in tl.static_range(GROUP):
                score = tl.sum(q1[g] * a + q2[g] * b, 1) * scale
                scores += (tl.where((p < start) | (p >= OLD), score, _FAR),)
        tops, totals, sums1, sums2 = (), (), (), ()
        for g in tl.static_range(GROUP):
            top = scores[g]
            for p in tl.static_range(1, OLD + i + 1):
                top = tl.maximum(top, scores[p * GROUP + g])
            tops += (top,)
            totals += (tl.zeros((TILE,), tl.float32),)
            sums1 += (tl.zeros((TILE, HALF), tl.float32),)
            sums2 += (tl.zeros((TILE, HALF), tl.float32),)
        for p in tl.static_range(OLD + i + 1):
            a, b = v1[p].to(tl.float32), v2[p].to(tl.float32)
            total, sum1, sum2 = totals, sums1, sums2
            totals, sums1, sums2 = (), (), ()
            for g in tl.static_range(GROUP):
                e = tl.exp(scores[p * GROUP + g] - tops[g])
                totals += (total[g] + e,)
                sums1 += (sum1[g] + e[:, None] * a,)
                sums2 += (sum2[g] + e[:, None] * b,)
        for g in tl.static_range(GROUP):
            made = out + (row * HEADS + kv_head * GROUP + g)[:, None] * D + d
            tl.store(made, (sums1[g] / totals[g][:, None]).to(T))
            tl.store(made + HALF, (sums2[g] / totals[g][:, None]).to(T))
    for i in tl.static_range(NEW):
        place = keys + (start + i) * D
        tl.store(place, k1[OLD + i])
        tl.store(place + HALF, k2[OLD + i])
        tl.store(place + POSITIONS * D, v1[OLD + i])
        tl.store(place + POSITIONS * D + HALF, v2[OLD + i])


@triton.jit(do_not_specialize=["columns"])
def set_table(changes, table, columns, COLUMNS: tl.constexpr):
    """Program (change): sets a row of table (slots, columns) int32. changes (n, 1 + columns) int32: slot and row."""
    change = changes + tl.program_id(0).to(tl.int64) * (columns + 1)
    slot = tl.load(change).to(tl.int64)
    i = tl.arange(0, COLUMNS)
    tl.store(table + slot * columns + i, tl.load(change + 1 + i, mask=i < columns), mask=i < columns)


@triton.jit
def copy_rows(copies, pages, D: tl.constexpr, PAGE: tl.constexpr):
    """Program (copy, part): copies the first rows of one page's keys, or values, of one layer and head. copies (n, 3)
    int32: source, target, rows. pages (pages, parts, PAGE, D)."""
    copy = copies + 3 * tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    source = (tl.load(copy).to(tl.int64) * parts + part) * PAGE * D
    target = (tl.load(copy + 1).to(tl.int64) * parts + part) * PAGE * D
    e = tl.arange(0, PAGE * D)
    live = e < tl.load(copy + 2) * D
    tl.store(pages + target + e, tl.load(pages + source + e, mask=live), mask=live)
