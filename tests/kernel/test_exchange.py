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
from mktts.spec import NUM_CODEBOOKS

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
    # Two roundings to bf16: of the sum, which fp32 may bring to the other side of a tie, and of the new residual.
    assert np.abs(results[0][0] - (residual + exact)).max() <= 2.0**-7 * np.abs(residual + exact).max()


def test_sums_are_added_in_the_order_of_the_groups():
    p = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    total = ((((((p[0] + p[1]) + p[2]) + p[3]) + p[4]) + p[5]) + p[6]) + p[7]
    assert np.array_equal(exchange.sum_of_shares(p), exchange.from_bf16(exchange.to_bf16(total)))


def test_one_sum_after_another_in_the_same_words_needs_no_reset():
    grid, area = GRIDS[3], GRIDS[3].new_area()
    residual, shares = case(grid)
    for tag in range(1, 20):  # the count has four bits
        fresh_area = exchange.run(blocks_of(grid, grid.new_area(), 1, residual, shares), order(tag))
        used_area = exchange.run(blocks_of(grid, area, tag, residual, shares), order(tag + 100))
        assert np.array_equal(used_area[0], fresh_area[0])
        residual = used_area[0]


def test_words_of_an_exchange_that_was_given_up_are_not_taken_for_the_next_ones():
    grid, area = GRIDS[3], GRIDS[3].new_area()
    residual, shares = case(grid)
    begun = blocks_of(grid, area, 1, residual, 100 * shares)
    for block in begun[: grid.blocks - 1]:
        next(block)
    assert (area != 0).any()
    result = exchange.run(blocks_of(grid, area, 2, residual, shares), order(0))
    expected = exchange.run(blocks_of(grid, grid.new_area(), 2, residual, shares), order(0))
    assert np.array_equal(result[0], expected[0])


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


def test_a_words_count_is_never_that_of_what_it_held_before():
    """Position 1 is written in the layers of a frame's first pass alone: what it held came before fourteen others."""
    for layers in range(1, 65):
        assert ((NUM_CODEBOOKS - 2) * layers + 1) % 16 != 0


def test_bf16_is_torchs():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    theirs = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(exchange.from_bf16(exchange.to_bf16(values)), theirs)
    words = exchange.words_of(0x1ABCD, values)
    assert np.array_equal(exchange.from_bf16(words), theirs) and set(words >> 16) == {0xABCD}
    shares = exchange.shares_of(0x1B, values)
    assert np.allclose(exchange.values_of(shares), values, rtol=2.0**-19, atol=0) and set(shares & 15) == {0xB}


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
    facts = {**sizes, "positions": "POSITIONS", "group": "GROUP"}
    exports = "".join(f"\nEXPORT(u32, fact_{name}, {value});" for name, value in facts.items())
    flags = ["--std=c++17", "-DRING=2", *(f"-D{name}={value}" for name, value in shape.defines.items())]
    found = kernel_build.constants_of(compile_source(source(SHARED) + exports, SHARED, "sm_90a", flags)[0])
    expected = {name: layout[name].itemsize for name in layout.names}
    expected |= {"positions": exchange.POSITIONS, "group": shape.group}
    assert {name: found[f"fact_{name}"] for name in facts} == expected
    assert layout.itemsize == found["exchange_bytes"]
