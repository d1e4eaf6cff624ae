"""The exchange read in Python: what it computes, in any order of blocks, and that csrc still says the same."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from compiler import needs_nvrtc

from mktts.errors import EngineError
from mktts.kernel import build as kernel_build
from mktts.kernel import exchange
from mktts.kernel.build import CSRC, SHARED, source
from mktts.kernel.exchange import Grid
from mktts.kernel.grid import choose_shape
from mktts.kernel.nvrtc import compile_source
from mktts.measure.inspection import config_at

GRIDS = [Grid(128, 8, 1024), Grid(128, 8, 2048), Grid(64, 8, 1024), Grid(16, 2, 64), Grid(8, 4, 64)]
# Of cards with 108, 58 and 24 multiprocessors: the last block of a group has fewer rows.
GRIDS += [Grid(104, 8, 1024), Grid(56, 8, 1024), Grid(24, 8, 1024)]


def case(grid: Grid, seed: int = 0):
    rng = np.random.default_rng(seed)
    residual = exchange.from_bf16(exchange.to_bf16(rng.standard_normal(grid.width)))
    return residual, rng.standard_normal((grid.heads, grid.width)).astype(np.float32)


def blocks_of(grid, area, tag, residual, shares):
    ranks = [grid.rows_of_rank(block) for block in range(grid.blocks)]
    return [
        exchange.add_residual(grid, area, block, tag, residual, shares[block // grid.group][ranks[block]])
        for block in range(grid.blocks)
    ]


def order(seed):
    rng = np.random.default_rng(seed)
    return lambda count: int(rng.integers(count))


def in_turn(step):
    turns = itertools.count(0, step)
    return lambda count: next(turns) % count


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_block_gets_the_sum_whatever_the_order_of_blocks(grid):
    residual, shares = case(grid)
    exact = torch.from_numpy(shares.astype(np.float64).sum(0)).float().bfloat16().float().numpy()
    results = [
        exchange.run(blocks_of(grid, grid.new_area(), 1, residual, shares), choose)
        for choose in (order(1), order(2), in_turn(1), in_turn(-1))
    ]
    for values in (values for result in results for values in result):
        assert np.array_equal(values, results[0][0])
    # One rounding of shares, to 2^-29, may bring a sum to the other side of a tie of bf16's.
    rounded = torch.from_numpy(residual + exact).bfloat16().float().numpy()
    wrong = results[0][0] != rounded
    assert (
        wrong.mean() < 1e-3 and np.abs(results[0][0] - rounded)[wrong].max(initial=0) <= 2.0**-7 * np.abs(exact).max()
    )


def in_layers(grid, areas, block, count, shares):
    """One block through `count` sums, in areas that take turns, from a residual of zeros: the last residual."""
    residual, rows = np.zeros(grid.width, np.float32), grid.rows_of_rank(block)
    for i in range(count):
        share = shares[i, block // grid.group][rows]
        residual = yield from exchange.add_residual(
            grid, areas[i % len(areas)], block, 1 + i // len(areas), residual, share
        )
    return residual


def summed(shares):
    residual = torch.zeros(shares.shape[-1])
    for each in shares:
        residual = (residual + torch.from_numpy(each.astype(np.float64).sum(0)).float().bfloat16().float()).bfloat16()
    return residual.float().numpy()


@pytest.mark.parametrize("seed", range(3))
def test_two_areas_that_take_turns_need_no_reset_in_any_order_of_blocks(seed):
    grid, count = Grid(16, 4, 64), 140  # a word of eight bits counts four shares a sum, 70 sums: it comes round
    shares = np.random.default_rng(seed).integers(-64, 64, (count, grid.heads, grid.width)).astype(np.float32)
    areas = [grid.new_area("h"), grid.new_area("x")]
    blocks = [in_layers(grid, areas, block, count, shares) for block in range(grid.blocks)]
    for residual in exchange.run(blocks, order(seed)):
        assert np.array_equal(residual, summed(shares))


def test_one_area_for_all_sums_would_be_too_few():
    """Whoever is ahead adds to it before the others have read it."""
    grid = Grid(16, 4, 64)
    shares = np.random.default_rng(0).integers(-64, 64, (8, grid.heads, grid.width)).astype(np.float32)
    area = grid.new_area()
    with pytest.raises(EngineError, match="that nobody sends"):
        exchange.run([in_layers(grid, [area], block, 8, shares) for block in range(grid.blocks)], order(0))


def test_half_a_sum_is_never_taken_for_a_whole_one():
    grid, area = GRIDS[3], GRIDS[3].new_area()
    residual, shares = case(grid)
    for block in blocks_of(grid, area, 1, residual, 100 * shares)[: grid.blocks - 1]:
        next(block)
    with pytest.raises(EngineError, match="that nobody sends"):
        exchange.run(blocks_of(grid, area, 2, residual, shares), order(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e5])
@pytest.mark.parametrize("groups", [1, 8])
def test_what_is_no_share_makes_its_sum_nan_and_the_next_one_is_well(bad, groups):
    grid, area = GRIDS[2], GRIDS[2].new_area()
    residual, shares = case(grid)
    spoilt = shares.copy()
    spoilt[:groups, 5] = bad
    found = exchange.run(blocks_of(grid, area, 1, residual, spoilt), order(1))[0]
    assert np.isnan(found[5]) and np.isnan(found).sum() == 1
    assert np.isfinite(exchange.run(blocks_of(grid, area, 2, residual, shares), order(2))[0]).all()


def test_the_largest_shares_of_all_groups_are_still_a_sum():
    largest = np.nextafter(np.float32(exchange.MOST), np.float32(0))
    for sign in (1, -1):
        word = sum((exchange.shares_of(np.full(1, sign * largest)) for _ in range(8)), np.zeros(1, np.uint64))
        assert exchange.counts_of(word) == [8]
        assert exchange.from_fixed(exchange.sums_of(word)) == [8 * sign * largest]


def test_a_block_that_never_comes_is_noticed():
    grid = GRIDS[3]
    residual, shares = case(grid)
    blocks = blocks_of(grid, grid.new_area(), 1, residual, shares)
    with pytest.raises(EngineError, match="that nobody sends"):
        exchange.run(blocks[:-1], order(0))


def test_the_blocks_of_a_group_share_out_all_rows():
    for grid in GRIDS:
        for first in range(0, grid.blocks, grid.group):
            rows = [np.arange(grid.width)[grid.rows_of_rank(block)] for block in range(first, first + grid.group)]
            assert np.array_equal(np.concatenate(rows), np.arange(grid.width)) and min(map(len, rows)) > 0


def test_bf16_is_torchs():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    theirs = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(exchange.from_bf16(exchange.to_bf16(values)), theirs)
    words = exchange.words_of(0x1ABCD, values)
    assert np.array_equal(exchange.from_bf16(words), theirs) and set(words >> 16) == {0xABCD}
    words = exchange.shares_of(values)
    assert np.abs(exchange.from_fixed(exchange.sums_of(words)) - values).max() <= 2.0**-22  # fp32's own, below 8


def test_csrc_has_the_lines_that_this_reads():
    headers = " ".join(source("frame.cu").split())
    assert {name for name, line in exchange.LINES.items() if line not in headers} == set()


@pytest.mark.parametrize(
    ("size", "multiprocessors"), [("tiny-projected", 132), ("0.6b", 132), ("1.7b", 132), ("0.6b", 58), ("1.7b", 24)]
)
@needs_nvrtc
def test_words_lie_where_the_compiler_puts_them(size, multiprocessors):
    shape = choose_shape(config_at(size), multiprocessors)
    layout = exchange.layout(shape)
    struct = re.search(r"struct Exchange \{(.*?)\n\};", (CSRC / "state.cuh").read_text(), re.DOTALL)[1]
    assert re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*|\[[^\]]*\]", "", struct)) == list(layout.names)
    sizes = {name: f"sizeof(Exchange::{name})" for name in layout.names}
    facts = {**sizes, "positions": "POSITIONS", "sums": "SUMS", "copies": "COPIES", "group": "GROUP"}
    exports = "".join(f"\nEXPORT(u32, fact_{name}, {value});" for name, value in facts.items())
    flags = ["--std=c++17", "-DRING=2", *(f"-D{name}={value}" for name, value in shape.defines.items())]
    found = kernel_build.constants_of(compile_source(source(SHARED) + exports, SHARED, "sm_90a", flags)[0])
    expected = {name: layout[name].itemsize for name in layout.names}
    expected |= {
        "positions": exchange.POSITIONS,
        "sums": exchange.SUMS,
        "copies": exchange.COPIES,
        "group": shape.group,
    }
    assert {name: found[f"fact_{name}"] for name in facts} == expected
    assert layout.itemsize == found["exchange_bytes"]
