"""The counter-based generator against published vectors, and its noise against that of csrc/sampling.cuh."""

import numpy as np
import pytest

from mktts.model.sampling import exact_log, gumbel, philox

# Random123's known answers (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(philox(counter, key)) == words


# Seed, frame, codebook, id -> the bits that csrc/sampling.cuh gives, one rounding an operation.
NOISE = [
    (0, 0, 1, 0, "0x1.13a3d8p-3"),
    (7, 3, 1, 1, "-0x1.031860p-1"),
    (7, 3, 2, 2, "-0x1.1bfabep+0"),
    (2**32 - 1, 8191, 3, 3, "0x1.98008cp+0"),
    (2**64 - 1, 1, 15, 2047, "0x1.a6c538p+1"),
    (2**64 - 1, 1, 8, 1001, "0x1.ed69c6p+0"),
    (0x123456789ABCDEF0, 500, 9, 64, "0x1.09745ep+1"),
    (0x123456789ABCDEF0, 500, 4, 513, "0x1.4a4b2ap-5"),
]


@pytest.mark.parametrize(("seed", "frame", "book", "token", "bits"), NOISE)
def test_noise_is_the_kernels_bit_for_bit(seed, frame, book, token, bits):
    noise = gumbel(seed, frame, range(1, 16), 2048)
    assert noise.shape == (15, 2048) and noise.dtype == np.float32
    assert noise[book - 1, token] == float.fromhex(bits)
    assert np.array_equal(gumbel(seed, frame, range(book, book + 1), 301)[0], noise[book - 1, :301])


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
