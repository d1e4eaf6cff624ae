"""Tiles of the fixed-order products: which one a product of so many rows takes, and the parts of its sum.

The parts belong to the matrix alone. All else may depend on the rows, since it does not change a bit of the result:
tests/batch/cuda/test_products.py holds every tile to that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """What becomes of x @ weight.T."""

    LINEAR = "linear"  # it is the result
    GATED = "gated"  # the weight's halves are two products, and silu(first) * second the result
    JOINED = "joined"  # its parts go to the kernel that adds them to the residual stream


@dataclass(frozen=True)
class Tile:
    """What one program makes of x @ weight.T: `rows` x `columns`, `depth` of the sum at a time.

    stages: blocks of operands on their way at once. turned: the weights take the matrix unit's operand that needs 64
    rows, for few rows of x. split: each part of the sum has its own program.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    turned: bool = False
    split: bool = False

    def shared_bytes(self, kind: Kind, itemsize: int) -> int:
        """Bytes of shared memory that a program takes at most: its blocks on their way, and 1 KiB for barriers."""
        columns = 2 * self.columns if kind is Kind.GATED else self.columns
        return (self.rows + columns) * self.depth * itemsize * self.stages + 1024

    def fitted(self, kind: Kind, itemsize: int, limit: int) -> Tile:
        """With as many stages, at least two, as `limit` bytes hold."""
        tile = self
        while tile.stages > 2 and tile.shared_bytes(kind, itemsize) > limit:
            tile = replace(tile, stages=tile.stages - 1)
        return tile


@dataclass(frozen=True)
class Plan:
    """The parts of a matrix's sums, and its tiles by the most rows that each serves; the last serves any number."""

    parts: int
    tiles: tuple[tuple[int, Tile], ...]

    def tile(self, rows: int) -> Tile:
        """The tile for `rows` rows."""
        return next((tile for most, tile in self.tiles if rows <= most), self.tiles[-1][1])


_LINEAR = (
    (16, Tile(16, 64, 128, 4, 5, turned=True)),
    (32, Tile(32, 64, 128, 4, 5, turned=True)),
    (128, Tile(64, 64, 128, 4, 4)),
    (256, Tile(128, 64, 64, 4, 4)),
    (512, Tile(128, 128, 64, 8, 4)),
    (1024, Tile(128, 256, 64, 8, 4)),
)
_GATED = (
    (16, Tile(16, 64, 128, 4, 5, turned=True)),
    (32, Tile(32, 64, 128, 4, 4, turned=True)),
    (128, Tile(64, 64, 64, 4, 5)),
    (1024, Tile(128, 128, 64, 8, 4)),
)
_JOINED = (
    (16, Tile(16, 64, 128, 4, 5, turned=True, split=True)),
    (32, Tile(32, 64, 128, 4, 5, turned=True, split=True)),
    (128, Tile(64, 64, 128, 4, 4, split=True)),
    (256, Tile(128, 64, 64, 4, 4, split=True)),
    (512, Tile(128, 128, 64, 8, 4, split=True)),
    (1024, Tile(128, 128, 64, 8, 4)),
)
_PARTS = 4  # of a joined product: 1 024 columns in tiles of 64 then have 64 programs, which stream the weights
_RULE = {
    Kind.LINEAR: Plan(1, _LINEAR),
    Kind.GATED: Plan(1, _GATED),
    Kind.JOINED: Plan(_PARTS, _JOINED),
}
# Cards with less shared memory multiply by instructions that take operands from registers: smaller tiles fit those.
_SMALL_RULE = _RULE | {
    Kind.LINEAR: Plan(1, _LINEAR[:-1]),
    Kind.GATED: Plan(
        1,
        (
            (16, Tile(16, 64, 64, 4, 4, turned=True)),
            (32, Tile(32, 64, 64, 4, 4, turned=True)),
            (128, Tile(64, 64, 64, 4, 4)),
            (1024, Tile(128, 64, 64, 8, 3)),
        ),
    ),
}
LARGE_SHARED_BYTES = 227 * 1024  # that a program may have on compute capability 9.0, CUDA C++ Programming Guide
_SINGLE = Plan(1, ((1, Tile(32, 32, 16, 4, 2)),))  # fp32 has no matrix unit: more accumulators would not fit registers
# By (kind, columns, depth), the fastest of 182 on an H200; others go by `_RULE`.
_MEASURED: dict[tuple[Kind, int, int], Plan] = {
    (Kind.GATED, 3072, 1024): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 4, turned=True)),
            (32, Tile(32, 64, 128, 4, 4, turned=True)),
            (64, Tile(64, 32, 128, 4, 4)),
            (128, Tile(64, 32, 128, 4, 3)),
            (256, Tile(64, 64, 64, 4, 4)),
            (512, Tile(128, 64, 64, 4, 3)),
            (1024, Tile(128, 64, 64, 8, 3)),
        ),
    ),
    (Kind.JOINED, 1024, 3072): Plan(
        4,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True, split=True)),
            (32, Tile(32, 64, 128, 4, 5, turned=True, split=True)),
            (64, Tile(64, 32, 128, 4, 5, split=True)),
            (128, Tile(64, 32, 128, 4, 4, split=True)),
            (256, Tile(64, 64, 64, 4, 4, split=True)),
            (512, Tile(64, 128, 64, 4, 4, split=True)),
            (1024, Tile(128, 256, 64, 8, 4, split=True)),
        ),
    ),
    (Kind.LINEAR, 4096, 1024): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True)),
            (32, Tile(32, 64, 128, 4, 5, turned=True)),
            (64, Tile(64, 32, 128, 4, 5)),
            (128, Tile(64, 32, 128, 4, 4)),
            (256, Tile(64, 64, 64, 4, 4)),
            (512, Tile(64, 128, 64, 4, 4)),
            (1024, Tile(128, 128, 64, 8, 3)),
        ),
    ),
    (Kind.JOINED, 1024, 2048): Plan(
        2,
        (
            (16, Tile(16, 64, 256, 4, 3, turned=True, split=True)),
            (32, Tile(32, 64, 256, 4, 3, turned=True, split=True)),
            (64, Tile(64, 16, 128, 4, 5, split=True)),
            (128, Tile(64, 32, 128, 4, 4, split=True)),
            (256, Tile(64, 64, 128, 4, 4, split=True)),
            (1024, Tile(128, 64, 64, 4, 4, split=True)),
        ),
    ),
    (Kind.LINEAR, 2048, 1024): Plan(
        1,
        (
            (16, Tile(16, 64, 256, 4, 3, turned=True)),
            (32, Tile(32, 64, 256, 4, 3, turned=True)),
            (64, Tile(64, 16, 128, 4, 5)),
            (128, Tile(64, 32, 128, 4, 4)),
            (256, Tile(64, 64, 128, 4, 4)),
            (1024, Tile(128, 64, 64, 4, 4)),
        ),
    ),
    (Kind.LINEAR, 3072, 1024): Plan(
        1,
        (
            (16, Tile(16, 64, 256, 4, 3, turned=True)),
            (64, Tile(32, 64, 128, 4, 5, turned=True)),
            (128, Tile(64, 64, 128, 4, 4)),
            (256, Tile(64, 64, 64, 4, 4)),
            (512, Tile(64, 128, 64, 4, 4)),
            (1024, Tile(128, 128, 64, 8, 3)),
        ),
    ),
    (Kind.GATED, 6144, 2048): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 4, turned=True)),
            (32, Tile(32, 64, 128, 4, 4, turned=True)),
            (64, Tile(64, 64, 128, 4, 3)),
            (128, Tile(64, 64, 64, 4, 4)),
            (256, Tile(128, 128, 64, 8, 4)),
            (512, Tile(128, 64, 64, 4, 3)),
            (1024, Tile(128, 128, 64, 8, 4)),
        ),
    ),
    (Kind.JOINED, 2048, 6144): Plan(
        4,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True, split=True)),
            (32, Tile(32, 64, 128, 4, 5, turned=True, split=True)),
            (64, Tile(64, 64, 128, 4, 4, split=True)),
            (128, Tile(64, 64, 64, 4, 7, split=True)),
            (256, Tile(64, 128, 64, 4, 4, split=True)),
            (512, Tile(128, 256, 64, 8, 4, split=True)),
            (1024, Tile(128, 64, 64, 4, 4)),
        ),
    ),
    (Kind.LINEAR, 4096, 2048): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True)),
            (64, Tile(32, 64, 128, 4, 5, turned=True)),
            (128, Tile(64, 32, 128, 4, 4)),
            (256, Tile(64, 64, 64, 4, 4)),
            (512, Tile(64, 128, 64, 4, 4)),
            (1024, Tile(256, 128, 64, 8, 4)),
        ),
    ),
    (Kind.JOINED, 2048, 2048): Plan(
        2,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True, split=True)),
            (64, Tile(32, 64, 128, 4, 5, turned=True, split=True)),
            (128, Tile(64, 32, 128, 4, 4, split=True)),
            (256, Tile(64, 64, 64, 4, 4, split=True)),
            (512, Tile(64, 128, 64, 4, 4, split=True)),
            (1024, Tile(128, 128, 64, 8, 4)),
        ),
    ),
    (Kind.LINEAR, 1024, 2048): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True)),
            (32, Tile(32, 64, 128, 4, 5, turned=True)),
            (64, Tile(64, 16, 128, 4, 5)),
            (128, Tile(64, 32, 128, 4, 4)),
            (256, Tile(64, 64, 128, 4, 4)),
            (1024, Tile(128, 64, 64, 4, 4)),
        ),
    ),
    (Kind.LINEAR, 3072, 2048): Plan(
        1,
        (
            (16, Tile(16, 64, 128, 4, 5, turned=True)),
            (32, Tile(32, 64, 128, 4, 5, turned=True)),
            (64, Tile(64, 32, 128, 4, 5)),
            (128, Tile(64, 64, 128, 4, 4)),
            (256, Tile(64, 64, 64, 4, 4)),
            (512, Tile(64, 128, 64, 4, 4)),
            (1024, Tile(256, 128, 64, 8, 4)),
        ),
    ),
}


def plan_of(kind: Kind, columns: int, depth: int, itemsize: int, limit: int) -> Plan:
    """The plan of a matrix of `columns` results and sums of `depth` terms, elements of `itemsize` bytes.

    limit: bytes of shared memory that a program may have. It is of a device, so that a device has one plan of a matrix.
    """
    if itemsize == 4:
        return _SINGLE
    if limit >= LARGE_SHARED_BYTES:
        plan = _MEASURED.get((kind, columns, depth)) or _RULE[kind]
    else:
        plan = _SMALL_RULE[kind]
    if any(depth % (plan.parts * tile.depth) for _, tile in plan.tiles):
        # One part reads beyond the last column as zeros; several would read into the next.
        return Plan(1, tuple((most, replace(tile, split=False)) for most, tile in plan.tiles))
    return plan
