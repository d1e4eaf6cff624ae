"""Triton kernels of a frame's sixteen draws. Random numbers are those of `mktts.model.sampling.gumbel`, bit for bit:
launch with enable_fp_fusion=False, so that every operation is rounded once, as there."""

import triton
import triton.language as tl

from mktts.kernel.rows import rms

_NEVER = tl.constexpr(-3.0e38)  # the score of an id that may not be drawn
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)  # mktts.model.sampling.MULTIPLIERS
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)  # mktts.model.sampling.KEY_STEPS
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def _exact_log(x):
    """As mktts.model.sampling.exact_log."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23).to(tl.int32) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.707106781186547524
    exponent = tl.where(small, exponent - 1, exponent)
    m = tl.where(small, m + m, m) - 1.0
    square = m * m
    y = tl.full(m.shape, 7.0376836292e-2, tl.float32)
    y = y * m + -1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m + -1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m + -1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m + -2.4999993993e-1
    y = y * m + 3.3333331174e-1
    y = y * m * square
    scale = exponent.to(tl.float32)
    y = y + scale * -2.12194440e-4
    y = y + square * -0.5
    return (m + y) + scale * 0.693359375


@triton.jit
def _gumbel(words):
    u = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -_exact_log(-_exact_log(u))


@triton.jit
def _noise(seed_low, seed_high, frame, book, SIZE: tl.constexpr):
    """Gumbel noise (SIZE,) of ids 0..SIZE - 1: mktts.model.sampling.gumbel."""
    c0 = tl.arange(0, SIZE // 4).to(tl.uint32)
    c1 = tl.zeros((SIZE // 4,), tl.uint32) + book.to(tl.uint32)
    c2 = tl.zeros((SIZE // 4,), tl.uint32) + frame.to(tl.uint32)
    c3 = tl.zeros((SIZE // 4,), tl.uint32)
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    m0 = tl.full(c0.shape, _MULTIPLIER_0, tl.uint32)
    m1 = tl.full(c0.shape, _MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEP_0).to(tl.uint32)
        k1 = (k1 + _KEY_STEP_1).to(tl.uint32)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return _gumbel(words.reshape(SIZE))


@triton.jit
def _best_kept(scores, seed_low, seed_high, frame, book, top_k, top_p, SIZE: tl.constexpr):
    """The id with the largest score + noise among those that top-k and top-p keep; of equal ones the lowest.

    Only candidates are checked: the best id is taken, and refused if `top_k` or more scores lie above its own, or if
    the kept mass above it reaches `top_p`; then the search goes on among the ids above it."""
    i = tl.arange(0, SIZE)
    noisy = tl.where(scores > _NEVER, scores + _noise(seed_low, seed_high, frame, book, SIZE), _NEVER)
    best = tl.argmax(noisy, 0, tie_break_left=True)
    most = tl.max(scores, 0)
    if ((top_k > 0) | (top_p < 1.0)) & (most > _NEVER):  # otherwise no id may be drawn, and the search would not end
        won = tl.max(tl.where(i == best, scores, _NEVER), 0)
        limit = 3.0e38
        if top_p < 1.0:
            # The k-th largest score by bisection of its bits in the order of floats; without top-k, all count.
            key = scores.to(tl.int32, bitcast=True)
            key = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int64)
            low = tl.full((), -2147483648, tl.int64)
            if top_k > 0:
                step = tl.full((), 1, tl.int64) << 31
                for _ in range(32):
                    enough = tl.sum((key >= low + step).to(tl.int32), 0) >= top_k
                    low = tl.where(enough, low + step, low)
                    step = step >> 1
            limit = top_p * tl.sum(tl.where((key >= low) & (scores > _NEVER), tl.exp(scores - most), 0.0), 0)
        above = tl.sum((scores > won).to(tl.int32), 0)
        mass = tl.sum(tl.where((scores > won) | ((scores == won) & (i > best)), tl.exp(scores - most), 0.0), 0)
        by_k = (top_k > 0) & (above >= top_k)
        refused = by_k | (mass >= limit)
        while refused:
            alive = (scores > won) | ((scores == won) & (i > best) & (not by_k))
            noisy = tl.where(alive, noisy, _NEVER)
            best = tl.argmax(noisy, 0, tie_break_left=True)
            won = tl.max(tl.where(i == best, scores, _NEVER), 0)
            above = tl.sum((scores > won).to(tl.int32), 0)
            mass = tl.sum(tl.where((scores > won) | ((scores == won) & (i > best)), tl.exp(scores - most), 0.0), 0)
            by_k = (top_k > 0) & (above >= top_k)
            refused = by_k | (mass >= limit)
    return best


@triton.jit(do_not_specialize=["book", "eos", "suppressed_from", "min_frames", "nobody"])
def draw(
    lanes, logits, settings, frames, ended, seen, codes, ended_out, codec_slots, table, embedding_sum,
    x_out, h_out, norm_weight, eps, book, row_stride, eos, suppressed_from, min_frames, nobody,
    V: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, NORM: tl.constexpr,
    SETTINGS: tl.constexpr, PENALTY: tl.constexpr,
):  # fmt: skip
    """Program (lane): draws code `book` of the lane's slot, and makes the predictor's next input from its embedding.

    By lane: lanes int64, its slot; logits, V of them, at a stride of `row_stride`; settings (B, SETTINGS) int32, see
    `mktts.batch.cuda.stage.packed`; codes (B, 16) int32; ended_out int32: 1 where the slot has ended, 2 where no logit
    is a number; codec_slots int32: the slot whose codec state advances, `nobody` where the slot has ended. By slot:
    frames, ended int32, seen (slots, V) uint8 of code 0, embedding_sum (slots, H) fp32. x_out gets the embedding (after
    the talker's hidden state where FIRST), h_out its norm where NORM. A score that is infinite or no number counts as
    one that may not be drawn."""
    T: tl.constexpr = logits.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(lanes + lane)
    i = tl.arange(0, SIZE)
    inside = i < V
    scores = tl.load(logits + lane * row_stride + i, mask=inside, other=_NEVER).to(tl.float32)
    scores = tl.where((scores > _NEVER) & (scores < -_NEVER), scores, _NEVER)
    frame = tl.load(frames + slot)
    mine = settings + lane * SETTINGS
    if FIRST:
        broken = tl.sum((scores > _NEVER).to(tl.int32), 0) == 0  # no logit is a number
        by = tl.load(mine + PENALTY).to(tl.float32, bitcast=True)
        was = tl.load(seen + slot * V + i, mask=inside, other=0) != 0
        scores = tl.where(was, tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + by), scores * by), scores)
        never = ((i >= suppressed_from) & (i != eos)) | ((i == eos) & (frame < min_frames)) | (i >= V)
        scores = tl.where(never, _NEVER, scores)
    choice = mine + (2 if FIRST else 6)
    if tl.load(choice) == 0:
        best = tl.argmax(scores, 0, tie_break_left=True)
    else:
        warmth = tl.load(choice + 1).to(tl.float32, bitcast=True)
        scores = tl.where(scores > _NEVER, tl.div_rn(scores, tl.zeros_like(scores) + warmth), _NEVER)
        best = _best_kept(
            scores, tl.load(mine), tl.load(mine + 1), frame, tl.full((), 0, tl.int32) + book,
            tl.load(choice + 2), tl.load(choice + 3).to(tl.float32, bitcast=True), SIZE,
        )  # fmt: skip
    best = tl.minimum(best, V - 1)  # a row of the table, whatever the scores were
    tl.store(codes + lane * 16 + book, best)
    c = tl.arange(0, H)
    row = tl.load(table + best.to(tl.int64) * H + c).to(tl.float32)
    if FIRST:
        over = (tl.load(ended + slot) != 0) | (best == eos) | broken
        tl.store(ended + slot, over.to(tl.int32))
        tl.store(ended_out + lane, over.to(tl.int32) + broken.to(tl.int32))
        tl.store(codec_slots + lane, tl.where(over, nobody, slot.to(tl.int32)))
        tl.store(seen + slot * V + best, 1)
        tl.store(embedding_sum + slot * H + c, row)
    else:
        tl.store(embedding_sum + slot * H + c, tl.load(embedding_sum + slot * H + c) + row)
    if LAST:
        tl.store(frames + slot, frame + 1)
    else:
        at = lane * (2 if FIRST else 1) + (1 if FIRST else 0)
        tl.store(x_out + at * H + c, row.to(T))
        if NORM:
            tl.store(h_out + at * H + c, rms(row, tl.load(norm_weight + c).to(tl.float32), eps, T, H))
