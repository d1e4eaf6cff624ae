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
from mktts.kernel.tape import choose_shape
from mktts.measure.inspection import config_at

GRIDS = [Grid(128, 8, 1024), Grid(128, 8, 2048), Grid(64, 8, 1024), Grid(16, 2, 64), Grid(8, 4, 64)]


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


def test_sums_are_added_in_the_order_of_the_warp():
    """For 8 groups of 8 rows a lane adds groups g and g + 4, then lanes add g and g ^ 1, then g ^ 2."""
    p = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    assert np.array_equal(exchange.sum_of_parts(p), ((p[0] + p[4]) + (p[1] + p[5])) + ((p[2] + p[6]) + (p[3] + p[7])))


def test_one_exchange_after_another_in_the_same_boxes_needs_no_reset():
    grid, area = GRIDS[3], GRIDS[3].new_area()
    residual, shares = case(grid)
    for tag in range(1, 6):
        fresh_area = exchange.run(blocks_of(grid, grid.new_area(), tag, residual, shares), order(tag))
        used_area = exchange.run(blocks_of(grid, area, tag, residual, shares), order(tag + 100))
        assert np.array_equal(used_area[0], fresh_area[0])
        residual = used_area[0]


def test_words_of_an_exchange_that_was_given_up_are_not_taken_for_the_next_ones():
    grid, area = GRIDS[3], GRIDS[3].new_area()
    residual, shares = case(grid)
    begun = blocks_of(grid, area, 1, residual, 100 * shares)
    for block in begun[: grid.blocks - 1]:
        next(block)
    assert (area["parts"] != 0).any()
    result = exchange.run(blocks_of(grid, area, 2, residual, shares), order(0))
    expected = exchange.run(blocks_of(grid, grid.new_area(), 2, residual, shares), order(0))
    assert np.array_equal(result[0], expected[0])


def test_a_block_that_never_comes_is_noticed():
    grid = GRIDS[3]
    residual, shares = case(grid)
    blocks = blocks_of(grid, grid.new_area(), 1, residual, shares)
    with pytest.raises(EngineError, match="that nobody sends"):
        exchange.run(blocks[:-1], order(0))


def test_owners_share_out_all_rows():
    for grid in GRIDS:
        rows = [grid.first_owned(block) + i for block in range(grid.blocks) for i in range(grid.owned)]
        assert sorted(rows) == list(range(grid.width))


def test_bf16_is_torchs():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    theirs = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(exchange.from_bf16(exchange.to_bf16(values)), theirs)
    words = exchange.words_of(0x1ABCD, values)
    assert np.array_equal(exchange.from_bf16(words), theirs) and set(words >> 16) == {0xABCD}
    parts = exchange.parts_of(0x1ABCD, values)
    assert np.array_equal(parts.astype(np.uint32).view(np.float32), values) and set(parts >> np.uint64(32)) == {0x1ABCD}


def test_csrc_has_the_lines_that_this_reads():
    headers = " ".join(source("frame.cu").split())
    assert {name for name, line in exchange.LINES.items() if line not in headers} == set()


@pytest.mark.parametrize("size", ["tiny-projected", "0.6b", "1.7b"])
@needs_nvrtc
def test_words_lie_where_the_compiler_puts_them(size):
    shape = choose_shape(config_at(size), 132)
    layout, width = exchange.layout(shape), shape.talker.hidden_size
    grid = Grid(shape.blocks, shape.talker.num_key_value_heads, width)
    struct = re.search(r"struct Exchange \{(.*?)\n\};", (CSRC / "state.cuh").read_text(), re.DOTALL)[1]
    assert re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*|\[[^\]]*\]", "", struct)) == list(layout.names)
    sizes = {name: f"sizeof(Exchange::{name})" for name in layout.names}
    facts = {**sizes, "boxes": "BOXES", "positions": "POSITIONS", "group": "GROUP", "owned": "Owned<T_H>::RPO"}
    exports = "".join(f"\nEXPORT(u32, fact_{name}, {value});" for name, value in facts.items())
    flags = ["--gpu-architecture=sm_90a", "--std=c++17", "-DRING=2"]
    flags += [f"-D{name}={value}" for name, value in shape.defines.items()]
    found = kernel_build._compile(kernel_build.nvrtc()[0], source(SHARED) + exports, SHARED, flags).constants
    expected = {name: layout[name].itemsize for name in layout.names}
    expected |= {"boxes": exchange.boxes_of(shape.blocks), "positions": exchange.POSITIONS}
    expected |= {"group": grid.group, "owned": grid.owned}
    assert {name: found[f"fact_{name}"] for name in facts} == expected
    assert layout.itemsize == found["exchange_bytes"]
