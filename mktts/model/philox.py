"""Random numbers that follow from counters alone: the same seed, frame and codebook give the same noise anywhere.

Philox4x32-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). What
follows it here is the arithmetic of csrc/sampling.cuh, operation by operation, so that both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # fractions of the golden ratio and of the square root of 3
STREAM = 0  # the fourth counter: draws for another purpose would take another value
_WORD = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)

# Polynomial and split ln 2 of logf in the Cephes library (S. Moshier): (log(1 + m) - m + m^2 / 2) / m^3.
_LOG = np.array(
    [
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ],
    dtype=np.float32,
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_SQRT_HALF, _HALF, _ONE = np.float32(0.707106781186547524), np.float32(0.5), np.float32(1)


def philox(counters: Sequence[np.ndarray | int], key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10: four counters that broadcast to one shape S, 32 bits each, and a key -> (*S, 4) uint32."""
    c0, c1, c2, c3 = (np.asarray(counter, dtype=np.uint64) for counter in counters)
    for turn in range(ROUNDS):
        k0, k1 = (np.uint64((word + turn * step) & 0xFFFFFFFF) for word, step in zip(key, KEY_STEPS, strict=True))
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c2 = (second >> _HALF_BITS) ^ (c1 ^ k0), (first >> _HALF_BITS) ^ (c3 ^ k1)
        c1, c3 = second & _WORD, first & _WORD
    words = np.empty((*np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape), 4), dtype=np.uint32)
    for place, word in enumerate((c0, c1, c2, c3)):
        words[..., place] = word
    return words


def exact_log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive normal float32, of additions and multiplications that are each rounded once.

    A library's logarithm, or a fused multiply-add, would give other last bits on another machine; these come out
    the same everywhere. The error is below 1e-7, or 1e-7 of the logarithm where that is above 1.
    """
    bits = x.view(np.uint32)
    m = ((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F000000)).view(np.float32)  # x = m * 2^exponent, m in [1/2, 1)
    small = m < _SQRT_HALF
    exponent = ((bits >> np.uint32(23)).astype(np.int32) - np.int32(126) - small).astype(np.float32)
    m += m * small  # exact, as is the next line: m in [sqrt(1/2) - 1, sqrt(2) - 1)
    m -= _ONE
    square = m * m
    y = np.full_like(m, _LOG[0])
    for coefficient in _LOG[1:]:
        y *= m
        y += coefficient
    y *= m
    y *= square
    y += exponent * _LN2_LOW
    square *= -_HALF
    y += square
    m += y
    m += exponent * _LN2_HIGH
    return m


def gumbel(seed: int, frame: int, books: range, size: int) -> np.ndarray:
    """Gumbel noise of one frame: (len(books), size) float32. The largest score + noise is a draw of softmax(score).

    `seed` in [0, 2^64) is the key. Counters are (id // 4, codebook, frame, STREAM), and id takes word id % 4. Its top
    23 bits k give u = (k + 1/2) 2^-23, exact and inside (0, 1), and -log(-log(u)).
    """
    blocks = np.arange(-(-size // 4))
    words = philox((blocks, np.array(books)[:, None], frame, STREAM), (seed & 0xFFFFFFFF, seed >> 32))
    k = words.reshape(len(books), -1)[:, :size] >> np.uint32(9)
    u = (k.astype(np.float32) + _HALF) * np.float32(2**-23)
    return -exact_log(-exact_log(u))
