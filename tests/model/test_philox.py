"""The counter-based generator against published vectors, and its arithmetic against one in plain Python floats."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from mktts.model.sampling import exact_log, gumbel, philox

# Random123's known answers (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
CEPHES = [
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(philox(counter, key)) == words


def f32(x: float) -> float:
    """Rounds a double to the nearest float32; of a sum or product of two float32 this is the one rounding of IEEE."""
    return struct.unpack("f", struct.pack("f", x))[0]


def scalar_log(x: float) -> float:
    """csrc/sampling.cuh, exact_log, one operation a line."""
    m, exponent = math.frexp(x)
    if m < f32(0.707106781186547524):
        exponent -= 1
        m = f32(m + m)
    m = f32(m - 1.0)
    z = f32(m * m)
    y = f32(CEPHES[0])
    for coefficient in CEPHES[1:]:
        y = f32(f32(y * m) + f32(coefficient))
    y = f32(f32(y * m) * z)
    y = f32(y + f32(exponent * f32(-2.12194440e-4)))
    y = f32(y + f32(z * -0.5))
    return f32(f32(m + y) + f32(exponent * f32(0.693359375)))


def scalar_gumbel(seed: int, frame: int, book: int, token: int) -> float:
    counter, key = [token // 4, book, frame, 0], [seed % 2**32, seed // 2**32]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            product1 >> 32 ^ counter[1] ^ key[0],
            product1 % 2**32,
            product0 >> 32 ^ counter[3] ^ key[1],
            product0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    u = f32(f32((counter[token % 4] >> 9) + 0.5) * 2**-23)
    return -scalar_log(-scalar_log(u))


@pytest.mark.parametrize(
    ("seed", "frame"), [(0, 0), (7, 3), (2**32 - 1, 8191), (2**64 - 1, 1), (0x123456789ABCDEF0, 500)]
)
def test_noise_is_the_scalar_transcription_bit_for_bit(seed, frame):
    noise = gumbel(seed, frame, range(1, 16), 2048)
    assert noise.shape == (15, 2048) and noise.dtype == np.float32
    for book, token in [(1, 0), (1, 1), (2, 2), (3, 3), (15, 2047), (8, 1001), (9, 64), (4, 513)]:
        assert float(noise[book - 1, token]) == scalar_gumbel(seed, frame, book, token)


def test_the_logarithm_is_that_of_float64_within_its_bound():
    k = np.arange(0, 2**23, 7, dtype=np.float32)
    u = (k + np.float32(0.5)) * np.float32(2**-23)
    before = u.copy()
    for x in (u, -exact_log(u)):
        true = np.log(x.astype(np.float64))
        assert (np.abs(exact_log(x) - true) / np.maximum(1, np.abs(true))).max() < 1e-7
    assert np.array_equal(u, before)
    ends = (np.array([0, 2**23 - 1], dtype=np.float32) + np.float32(0.5)) * np.float32(2**-23)
    assert 0 < ends[0] and ends[1] < 1 and np.isfinite(exact_log(-exact_log(ends))).all()


def test_seed_frame_and_codebook_each_give_other_noise_and_the_size_does_not():
    first = gumbel(1, 2, range(3, 4), 2048)[0]
    for seed, frame, book in [(2, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4)]:
        other = gumbel(seed, frame, range(book, book + 1), 2048)[0]
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.1 and (first == other).mean() < 0.01
    assert np.array_equal(gumbel(1, 2, range(3, 4), 301)[0], first[:301])
    assert np.array_equal(gumbel(1, 2, range(1, 16), 2048)[2], first)
