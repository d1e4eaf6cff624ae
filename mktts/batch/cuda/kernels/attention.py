"""Triton kernels of the talker's attention over paged keys and values, see `mktts.batch.cuda.kernels.rows`.

A row's positions are divided into up to PARTS parts of whole pages, by the row's length alone. One formula, `_join`,
joins the parts in their order, whether one program makes all of them or each has its own: the result is the same bit
for bit. Launch with enable_fp_fusion=False, so that the compiler cannot contract the formula in two ways."""

import triton
import triton.language as tl

_FAR = tl.constexpr(-1.0e30)  # a score that no position reaches: its exponential is 0
_PART_PAGES = tl.constexpr(2)  # the fewest of a part: shorter ones cost more in joins than more programs gain


@triton.jit
def _part_pages(pages, PARTS: tl.constexpr):
    """Pages of each part of a row that has `pages`."""
    return tl.maximum((pages + PARTS - 1) // PARTS, _PART_PAGES)


@triton.jit
def _nothing(D: tl.constexpr, QUERIES: tl.constexpr):
    """Softmax sums of no positions, as `_join` takes them."""
    return tl.full((QUERIES,), _FAR, tl.float32), tl.zeros((QUERIES,), tl.float32), tl.zeros((D, QUERIES), tl.float32)


@triton.jit
def _join(top, total, sums, top_2, total_2, sums_2):
    """Joins the softmax sums of two ranges of positions: largest score and sum of exponentials (queries,), and weighted
    values (D, queries)."""
    higher = tl.maximum(top, top_2)
    fade = tl.exp(top - higher)
    fade_2 = tl.exp(top_2 - higher)
    sums = sums * fade[None, :] + sums_2 * fade_2[None, :]
    return higher, total * fade + total_2 * fade_2, sums


@triton.jit(do_not_specialize=["table_stride", "layer", "layers", "programs"])
def attend(
    q, row_slot, row_pos, table, pages, out, part, bounds, table_stride, layer, layers, scale, programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (kv head, row, i of `programs`): softmax(q k) v over positions 0..row_pos of the row's slot.

    programs 1: the only one makes all parts and writes `out` (rows, HEADS D). programs PARTS: each makes a part, and
    writes its sums to `part` (rows, HEADS, PARTS, D) fp32, and its largest score and total to `bounds` (rows, HEADS,
    PARTS, 2) fp32, for `combine`. QUERIES: the query heads of a kv head, padded to the columns of a matrix product;
    positions are its rows, so that the matrix unit reads keys and values where they lie."""
    T: tl.constexpr = q.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)  # changes fastest, so that programs that run together read memory that lies together
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(2)
    slot = tl.load(row_slot + row)
    length = tl.load(row_pos + row) + 1
    g = tl.arange(0, QUERIES)
    d = tl.arange(0, D)
    p = tl.arange(0, PAGE)
    mine = g < GROUP
    places = (row * HEADS + kv_head * GROUP + g)[:, None] * D + d[None, :]
    count = (length + PAGE - 1) // PAGE
    each = _part_pages(count, PARTS)
    first = number * each
    last = tl.where(programs == 1, count, tl.minimum(first + each, count))
    if first < last:
        queries = tl.trans(tl.load(q + places, mask=mine[:, None], other=0.0))
        all_top, all_total, all_sums = _nothing(D, QUERIES)
        top, total, sums = _nothing(D, QUERIES)
        for i in range(first, last):
            page = tl.load(table + slot * table_stride + i).to(tl.int64)
            keys = pages + ((page * layers + layer) * KV_HEADS + kv_head) * 2 * PAGE * D
            here = i * PAGE + p < length  # what lies behind the newest position is undefined, and not read
            k = tl.load(keys + p[:, None] * D + d[None, :], mask=here[:, None], other=0.0)
            v = tl.load(keys + PAGE * D + p[None, :] * D + d[:, None], mask=here[None, :], other=0.0)
            if (i % each == 0) & (i > first):  # a new part
                all_top, all_total, all_sums = _join(all_top, all_total, all_sums, top, total, sums)
                top, total, sums = _nothing(D, QUERIES)
            score = tl.where(here[:, None], tl.dot(k, queries, input_precision="ieee") * scale, _FAR)
            higher = tl.maximum(top, tl.max(score, 0))
            e = tl.exp(score - higher[None, :])
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(e, 0)
            sums = tl.dot(v, e.to(T), sums * fade[None, :], input_precision="ieee")
            top = higher
        if programs == 1:
            all_top, all_total, all_sums = _join(all_top, all_total, all_sums, top, total, sums)
            made = tl.trans((all_sums / all_total[None, :]).to(T))
            tl.store(out + places, made, mask=mine[:, None])
        else:
            at = (row * HEADS + kv_head * GROUP + g) * PARTS + number
            tl.store(part + at[:, None] * D + d[None, :], tl.trans(sums), mask=mine[:, None])
            tl.store(bounds + at * 2, top, mask=mine)
            tl.store(bounds + at * 2 + 1, total, mask=mine)


@triton.jit
def combine(row_pos, part, bounds, out, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr):
    """Program (row, head): joins the sums that PARTS programs of `attend` have written."""
    T: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    count = (tl.load(row_pos + row) + PAGE) // PAGE
    each = _part_pages(count, PARTS)
    d = tl.arange(0, D)[:, None]
    one = tl.arange(0, 1)
    top, total, sums = _nothing(D, 1)
    for z in tl.static_range(PARTS):
        here = z * each < count
        at = head * PARTS + z
        top_2 = tl.load(bounds + at * 2 + one, mask=here & (one < 1), other=_FAR)
        total_2 = tl.load(bounds + at * 2 + 1 + one, mask=here & (one < 1), other=0.0)
        sums_2 = tl.load(part + at * D + d + one[None, :], mask=here & (d < D), other=0.0)
        top, total, sums = _join(top, total, sums, top_2, total_2, sums_2)  # an empty part changes nothing
    tl.store(out + head * D + d + one[None, :], (sums / total[None, :]).to(T))
