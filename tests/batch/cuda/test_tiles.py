"""Tiles of the fixed-order products: what they take of a multiprocessor, and whom they serve."""

from __future__ import annotations

import pytest
from product_shapes import RELEASED

from mktts.batch.cuda.tiles import FixedOrderTile, Kind, TilePlan, plan_of

ROWS = (1, 16, 17, 64, 128, 256, 512, 1_024, 2_048)
LIMITS = [pytest.param(99 * 1024, id="small card"), pytest.param(227 * 1024, id="large card")]


@pytest.mark.parametrize(("kind", "columns", "depth"), RELEASED)
@pytest.mark.parametrize("limit", LIMITS)
def test_a_program_fits_the_shared_memory_of_its_card(kind, columns, depth, limit):
    for rows in ROWS:
        tile = plan_of(kind, columns, depth, 2, limit).tile(rows).fitted(kind, 2, limit)
        assert tile.shared_bytes(kind, 2) <= limit and tile.stages >= 2


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("kind", "columns", "depth"), [*RELEASED, (Kind.JOINED, 64, 96), (Kind.JOINED, 1_024, 2_560)])
def test_parts_are_whole_blocks_and_no_others_are_split(kind, columns, depth, itemsize, limit):
    plan = plan_of(kind, columns, depth, itemsize, limit)
    assert kind is Kind.JOINED or plan.parts == 1
    for _, tile in plan.tiles:
        assert plan.parts == 1 or depth % (plan.parts * tile.depth) == 0
        assert plan.parts > 1 or not tile.split


def test_a_tile_serves_up_to_its_rows_and_the_last_one_all():
    few, many = FixedOrderTile(16, 64, 128, 4, 4, turned=True), FixedOrderTile(128, 128, 64, 8, 3)
    plan = TilePlan(1, ((16, few), (128, many)))
    assert [plan.tile(rows) for rows in (1, 16, 17, 128, 5_000)] == [few, few, many, many, many]


def test_stages_shrink_until_they_fit_and_two_stay():
    tile = FixedOrderTile(64, 64, 128, 4, 6)
    assert tile.fitted(Kind.LINEAR, 2, 227 * 1024) == tile
    assert tile.fitted(Kind.LINEAR, 2, 99 * 1024).stages == 3
    assert tile.fitted(Kind.GATED, 2, 99 * 1024).stages == 2
    assert tile.fitted(Kind.GATED, 2, 1024).stages == 2
