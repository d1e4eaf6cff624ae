"""How the products of the batched codec are cut into tiles, by their sizes and by how many rows come.

The depth of a step is one for a layer, whatever the rows: matrix units add the values of a step in one order, so that
steps of another depth could round otherwise. The other sizes of a tile only choose which program makes a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

_PROGRAMS = 132  # that fill a large GPU once: the multiprocessors of an H100 or H200
_LEAST_ROWS = 64  # of Hopper's matrix instructions: with fewer, another instruction would run, and round otherwise
_SHORT_DEPTH = 768  # terms
_PLANE_BYTES = 2  # of an fp16 value


@dataclass(frozen=True)
class ProductTile:
    """A program makes `rows` x (`outs` + `extra`) values, `depth` terms of their sums a step.

    Sizes are powers of two; `extra` (0: none) lets 96 = 64 + 32 and 192 = 128 + 64 columns fit without waste.
    """

    rows: int
    outs: int
    depth: int
    warps: int
    stages: int  # steps whose loads are in flight
    extra: int = 0

    def programs(self, rows: int, outs: int) -> int:
        return -(-rows // self.rows) * -(-outs // (self.outs + self.extra))

    def shared_bytes(self, split: bool) -> int:
        """Of shared memory, for operands of one fp16 number, or of two (`split`)."""
        return self.stages * (self.rows + self.outs + self.extra) * self.depth * _PLANE_BYTES * (2 if split else 1)


# The fastest tiles of some products on an H200: (outs, depth, channels, split) -> (most rows, tile), in ascending order
# of rows; the last one also takes more. Others take the largest of `candidates` that gives every multiprocessor a
# program.
MEASURED: dict[tuple[int, int, int, bool], tuple[tuple[int, ProductTile], ...]] = {
    (384, 2688, 384, False): (
        (5120, ProductTile(64, 64, 64, 4, 4)),
        (81920, ProductTile(256, 128, 64, 8, 3)),
    ),
    (192, 1344, 192, False): (
        (20480, ProductTile(64, 64, 64, 4, 4)),
        (81920, ProductTile(128, 64, 64, 4, 4)),
        (327680, ProductTile(128, 128, 64, 8, 3, 64)),
    ),
    (768, 5376, 768, False): (
        (1024, ProductTile(64, 32, 64, 4, 4)),
        (4096, ProductTile(128, 128, 64, 8, 3)),
        (16384, ProductTile(128, 256, 64, 8, 3)),
    ),
    (96, 672, 96, False): (
        (61440, ProductTile(128, 128, 32, 8, 4)),
        (983040, ProductTile(128, 64, 32, 4, 3, 32)),
    ),
    (5 * 384, 1536, 768, False): (
        (1024, ProductTile(64, 64, 64, 4, 4)),
        (16384, ProductTile(128, 256, 64, 8, 3)),
    ),
    (768, 768, 384, False): (
        (5120, ProductTile(64, 64, 64, 4, 4)),
        (20480, ProductTile(128, 256, 64, 8, 3)),
        (81920, ProductTile(64, 128, 64, 4, 3)),
    ),
    (6144, 3072, 1536, False): (
        (128, ProductTile(64, 128, 64, 4, 3)),
        (512, ProductTile(128, 128, 64, 8, 4)),
        (2048, ProductTile(128, 256, 64, 8, 3)),
    ),
    (288, 384, 192, False): (
        (20480, ProductTile(128, 64, 64, 8, 4, 32)),
        (327680, ProductTile(128, 64, 64, 4, 3, 32)),
    ),
    (1536, 7168, 1024, True): (
        (128, ProductTile(64, 32, 64, 4, 6)),
        (512, ProductTile(64, 32, 64, 4, 3)),
        (2048, ProductTile(128, 64, 64, 8, 3)),
    ),
    (384, 384, 384, False): (
        (5120, ProductTile(64, 64, 64, 4, 4)),
        (20480, ProductTile(128, 64, 64, 4, 3)),
        (81920, ProductTile(64, 128, 64, 4, 3)),
    ),
    (192, 192, 192, False): (
        (20480, ProductTile(64, 64, 64, 4, 3)),
        (327680, ProductTile(128, 64, 64, 4, 3)),
    ),
    (768, 768, 768, False): (
        (1024, ProductTile(64, 32, 64, 4, 4)),
        (4096, ProductTile(64, 64, 64, 4, 4)),
        (16384, ProductTile(64, 128, 64, 4, 3)),
    ),
    (96, 96, 96, False): (
        (245760, ProductTile(128, 32, 32, 4, 4)),
        (983040, ProductTile(64, 64, 32, 4, 3, 32)),
    ),
    (4096, 1024, 1024, True): (
        (64, ProductTile(64, 32, 64, 4, 6)),
        (256, ProductTile(64, 32, 64, 4, 3)),
        (1024, ProductTile(128, 128, 64, 8, 3)),
    ),
    (1024, 4096, 4096, True): (
        (64, ProductTile(64, 32, 64, 4, 6)),
        (256, ProductTile(64, 32, 64, 4, 3)),
        (1024, ProductTile(128, 64, 64, 8, 3)),
    ),
    (384, 2688, 384, True): (
        (5120, ProductTile(64, 64, 64, 4, 3)),
        (81920, ProductTile(128, 128, 64, 8, 3)),
    ),
    (192, 1344, 192, True): (
        (81920, ProductTile(64, 64, 64, 4, 3)),
        (327680, ProductTile(128, 64, 64, 8, 3)),
    ),
    (768, 5376, 768, True): (
        (1024, ProductTile(64, 32, 64, 4, 6)),
        (16384, ProductTile(128, 128, 64, 8, 3)),
    ),
    (96, 672, 96, True): ((983040, ProductTile(64, 64, 32, 4, 3, 32)),),
    (5 * 384, 1536, 768, True): (
        (1024, ProductTile(64, 32, 64, 4, 3)),
        (16384, ProductTile(128, 128, 64, 8, 3)),
    ),
    (768, 768, 384, True): (
        (5120, ProductTile(64, 64, 64, 4, 3)),
        (81920, ProductTile(64, 128, 64, 4, 2)),
    ),
    (6144, 3072, 1536, True): (
        (128, ProductTile(64, 128, 64, 4, 3)),
        (2048, ProductTile(128, 128, 64, 8, 3)),
    ),
    (288, 384, 192, True): (
        (20480, ProductTile(64, 64, 64, 4, 2, 32)),
        (327680, ProductTile(128, 64, 64, 8, 3, 32)),
    ),
    (384, 384, 384, True): (
        (5120, ProductTile(64, 64, 64, 4, 3)),
        (81920, ProductTile(64, 128, 64, 4, 2)),
    ),
    (192, 192, 192, True): (
        (20480, ProductTile(64, 64, 64, 4, 3)),
        (327680, ProductTile(64, 64, 64, 4, 2)),
    ),
    (768, 768, 768, True): (
        (1024, ProductTile(64, 32, 64, 4, 3)),
        (4096, ProductTile(64, 64, 64, 4, 2)),
        (16384, ProductTile(64, 128, 64, 4, 2)),
    ),
    (96, 96, 96, True): (
        (61440, ProductTile(64, 64, 32, 4, 3, 32)),
        (983040, ProductTile(64, 32, 32, 4, 3)),
    ),
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
    """Terms of a step: within one tap, if the channels allow it."""
    return next((depth for depth in (64, 32, 16) if channels % depth == 0), 16)


def candidates(outs: int, depth: int, channels: int, split: bool) -> Iterator[ProductTile]:
    """Tiles for a product that was not measured, the largest first. Sums take 128 registers of a thread at most.

    Short sums take small tiles: while some programs store, others on the same multiprocessor compute.
    """
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
    """`tile` with fewer stages, then fewer rows and columns, as far as its operands must fit into `shared_bytes`."""
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
