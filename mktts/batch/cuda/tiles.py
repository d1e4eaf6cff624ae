"""Tiles of the fixed-order products and of the codec's, chosen by the number of rows. The parts of a sum depend on the
matrix alone; all else may depend on the rows, since it does not change a bit of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from mktts.codec.packed import ProductTile


class Kind(Enum):
    """How x @ weight.T is used."""

    LINEAR = "linear"  # it is the result
    GATED = "gated"  # the weight's halves are two products, and silu(first) * second the result
    JOINED = "joined"  # its parts go to the kernel that adds them to the residual stream


@dataclass(frozen=True)
class FixedOrderTile:
    """The tile that one program makes of x @ weight.T: `rows` x `columns`, `depth` of the sum at a time. stages: blocks
    of operands in flight. turned: the weights are the operand of the matrix unit that needs 64 rows. split: each part
    of the sum has its own program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    turned: bool = False
    split: bool = False

    def shared_bytes(self, kind: Kind, itemsize: int) -> int:
        """Bytes of shared memory that a program takes at most: its blocks in flight, and 1 KiB for barriers."""
        columns = 2 * self.columns if kind is Kind.GATED else self.columns
        return (self.rows + columns) * self.depth * itemsize * self.stages + 1024

    def fitted(self, kind: Kind, itemsize: int, limit: int) -> FixedOrderTile:
        """The tile with as many stages as fit into `limit` bytes, but at least two."""
        tile = self
        while tile.stages > 2 and tile.shared_bytes(kind, itemsize) > limit:
            tile = replace(tile, stages=tile.stages - 1)
        return tile


@dataclass(frozen=True)
class TilePlan:
    """The number of parts of a matrix's sums, and its tiles by the most rows of each; the last takes any number."""

    parts: int
    tiles: tuple[tuple[int, FixedOrderTile], ...]

    def tile(self, rows: int) -> FixedOrderTile:
        return next((tile for most, tile in self.tiles if rows <= most), self.tiles[-1][1])


_TABLE = json.loads(Path(__file__).with_name("tiles.json").read_text())


def _plan(table: dict[str, Any]) -> TilePlan:
    return TilePlan(table["parts"], tuple((most, FixedOrderTile(*sizes)) for most, *sizes in table["tiles"]))


_RULE = {kind: _plan(_TABLE["rule"][kind.value]) for kind in Kind}
# Cards with less shared memory multiply by instructions that take operands from registers: smaller tiles fit those.
_SMALL_RULE = {kind: _plan(_TABLE["small_rule"][kind.value]) for kind in Kind}
# By (kind, columns, depth), the fastest of 182 tiles on an H200; other products go by `_RULE`.
_MEASURED = {(Kind(table["kind"]), table["columns"], table["depth"]): _plan(table) for table in _TABLE["products"]}
LARGE_SHARED_BYTES = 227 * 1024  # that a program may have on compute capability 9.0, CUDA C++ Programming Guide
_SINGLE = TilePlan(
    1, ((1, FixedOrderTile(32, 32, 16, 4, 2)),)
)  # fp32 has no matrix unit: more sums would not fit registers


def plan_of(kind: Kind, columns: int, depth: int, itemsize: int, limit: int) -> TilePlan:
    """The plan of a matrix of `columns` results and sums of `depth` terms, of `itemsize` bytes each. limit: bytes of
    shared memory that a program may have on the device."""
    if itemsize == 4:
        return _SINGLE
    if limit >= LARGE_SHARED_BYTES:
        plan = _MEASURED.get((kind, columns, depth)) or _RULE[kind]
    else:
        plan = _SMALL_RULE[kind]
    if any(depth % (plan.parts * tile.depth) for _, tile in plan.tiles):
        # Beyond the last column one part reads zeros; several parts would read the columns of the next.
        return TilePlan(1, tuple((most, replace(tile, split=False)) for most, tile in plan.tiles))
    return plan


# ---- of the batched codec
#
# All steps of a layer have one depth, whatever the rows: a matrix unit adds the values of a step in one order, and
# steps of another depth could round differently. The other sizes of a tile only choose which program makes a value.

_PROGRAMS = 132  # that fill a large GPU once: the multiprocessors of an H100 or H200
_LEAST_ROWS = 64  # of Hopper's matrix instructions: with fewer another instruction would run, and round differently
_SHORT_DEPTH = 768  # terms

# The fastest tiles of some products on an H200: (outs, depth, channels, split) -> (most rows, tile), in ascending order
# of rows; the last one also takes more. Others take the largest of `candidates` that gives every multiprocessor a
# program.
MEASURED = {
    (table["outs"], table["depth"], table["channels"], table["split"]): tuple(
        (most, ProductTile(*sizes)) for most, *sizes in table["tiles"]
    )
    for table in _TABLE["codec"]
}


def product_tile(rows: int, outs: int, depth: int, channels: int, split: bool, shared_bytes: int) -> ProductTile:
    """The tile of a product (rows, depth) @ (depth, outs) over `channels` a tap, on a device whose programs have
    `shared_bytes` of shared memory."""
    measured = MEASURED.get((outs, depth, channels, split), ())
    tile = next((tile for most, tile in measured if rows <= most), measured[-1][1] if measured else None)
    if tile is None:
        tiles = candidates(outs, depth, channels, split)
        enough = (tile for tile in tiles if tile.programs(rows, outs) >= _PROGRAMS)
        tile = next(enough, _smallest(outs, step_depth(channels)))
    return fitted(tile, split, shared_bytes)


def step_depth(channels: int) -> int:
    """Terms of a step, all within one tap if the channels allow it."""
    return next((depth for depth in (64, 32, 16) if channels % depth == 0), 16)


def candidates(outs: int, depth: int, channels: int, split: bool) -> Iterator[ProductTile]:
    """Tiles for a product that was not measured, the largest first. Their sums take at most 128 registers a thread.
    Short sums have small tiles, so that some programs compute while others store."""
    step = step_depth(channels)
    stages = 4 if step < 64 else 3
    short = depth <= _SHORT_DEPTH
    if outs % 96 == 0 and outs % 64 and channels % step == 0:
        yield ProductTile(128, 64, step, 8, stages, extra=32)
        yield ProductTile(64, 64, step, 4, stages, extra=32)
    if outs == 192 and not short and not split:
        yield ProductTile(128, 128, step, 8, stages, extra=64)
    if outs % 256 == 0 and not short and not split:
        yield ProductTile(128, 256, step, 8, stages)
    if outs % 128 == 0 and not short:
        yield ProductTile(128, 128, step, 8, stages)
    if outs % 64 == 0:
        yield ProductTile(128, 64, step, 8 if split else 4, stages)
        yield ProductTile(64, 64, step, 4, stages)
    yield _smallest(outs, step)


def _smallest(outs: int, step: int) -> ProductTile:
    return ProductTile(_LEAST_ROWS, 32 if outs > 16 else 16, step, 4, 6)


def fitted(tile: ProductTile, split: bool, shared_bytes: int) -> ProductTile:
    """`tile` with fewer stages, then with fewer rows and columns, until its operands fit into `shared_bytes`."""
    while tile.shared_bytes(split) > shared_bytes:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.extra:
            tile = replace(tile, outs=tile.extra, extra=0)
        elif tile.outs > 64:
            tile = replace(tile, outs=tile.outs // 2)
        elif tile.rows > _LEAST_ROWS:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break
    return tile
