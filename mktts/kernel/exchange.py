"""csrc/exchange.cuh read in Python: how blocks add a residual and hand it to each other without a barrier.

A block is a generator that gives way wherever the kernel polls, so any order of blocks can be tried. Every function
names the function of csrc that it reads; `LINES` holds the lines of csrc that fix layout and order, and a test looks
for them there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from mktts.errors import EngineError
from mktts.kernel.grid import Shape, power_of_two

POSITIONS = 2  # that one pass can take
_COUNT = np.uint32(15)  # the bits of a share that count
# What is read here -> the line of csrc that says it.
LINES = {
    "word": "put32(word, (tag << 16) | to_bf16(value))",
    "fresh": "((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0",
    "share": "word = (__float_as_uint(value) & ~15u) | (c.layers[S::ID] & 15u)",
    "sent": "put32(&to[n][c.group][c.rank * EACH + row], word)",
    "counted": "bad |= v[i] ^ t; s[i] += __uint_as_float(v[i] & ~15u)",
    "added": "x[n].v[g][i] = round_bf16(x[n].v[g][i] + sum[i])",
}


def to_bf16(values: np.ndarray | float) -> np.ndarray:
    """The 16 bits of the nearest bfloat16, ties to even, as uint32. For finite values."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 from the low 16 bits of each word."""
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32)


def words_of(tag: int, values: np.ndarray) -> np.ndarray:
    """`publish`: [tag:16 | bf16:16]."""
    return np.uint32((tag & 0xFFFF) << 16) | to_bf16(values)


def shares_of(count: int, values: np.ndarray) -> np.ndarray:
    """`send_part`: [fp32, upper 28 bits | count:4]."""
    return (np.asarray(values, np.float32).view(np.uint32) & ~_COUNT) | (np.uint32(count) & _COUNT)


def values_of(shares: np.ndarray) -> np.ndarray:
    """What `take_parts` adds: fp32 without the count."""
    return (shares & ~_COUNT).view(np.float32)


def counted(shares: np.ndarray, count: int) -> np.ndarray:
    """`take_parts`: which shares are of this sum; others are old ones."""
    return (shares & _COUNT) == (count & int(_COUNT))


def layout(shape: Shape) -> np.dtype:
    """state.cuh, struct Exchange: every word of device memory that blocks meet at. Offsets are the compiler's."""
    t, p = shape.talker, shape.predictor
    blocks, group, heads = shape.blocks, shape.group, t.num_key_value_heads
    shares = (2, POSITIONS, heads, max(t.hidden_size, p.hidden_size))
    queries = t.num_attention_heads // heads
    share = power_of_two(-(-queries * t.head_dim // group))
    return np.dtype(
        [
            ("h", "u4", shares),
            ("x", "u4", shares),
            ("layers", "u4", (4,)),
            ("part", "u8", (heads, queries * t.head_dim // share, group, share + 2)),
            ("qkv", "u4", (heads, POSITIONS, (queries + 2) * t.head_dim)),
            ("att", "u4", (heads, queries * t.head_dim)),
            ("act", "u4", (POSITIONS, max(t.intermediate_size, p.intermediate_size))),
            ("logits", "u4", (max(t.vocab_size, p.vocab_size),)),
            ("projected", "u4", (p.hidden_size,)),
            ("offers", "u8", (2, blocks, 3)),
            ("sums", "u8", (2, blocks)),
            ("go", "u4"),
        ],
        align=True,
    )


@dataclass(frozen=True)
class Grid:
    """Who multiplies which rows of a residual of `width` values; each of `heads` groups of blocks has a share of it."""

    blocks: int
    heads: int
    width: int

    @property
    def group(self) -> int:
        return self.blocks // self.heads

    @property
    def each(self) -> int:
        """Rows whose shares a block multiplies; the last of a group fewer."""
        return -(-self.width // self.group)

    def rows_of_rank(self, block: int) -> slice:
        """The rows whose shares a block multiplies: those of all blocks with its rank."""
        first = block % self.group * self.each
        return slice(first, min(first + self.each, self.width))

    def new_area(self) -> np.ndarray:
        """(heads, width): one position of `Shares`, zeros, as on a new device."""
        return np.zeros((self.heads, self.width), np.uint32)


def sum_of_shares(shares: np.ndarray) -> np.ndarray:
    """`take_parts`: (heads, rows) fp32 -> (rows,), one group after another, rounded to bf16."""
    total = np.zeros(shares.shape[1], np.float32)
    for share in shares:
        total = total + share
    return from_bf16(to_bf16(total))


Block = Generator[str, None, np.ndarray]


def add_residual(
    grid: Grid, area: np.ndarray, block: int, count: int, residual: np.ndarray, share: np.ndarray
) -> Block:
    """One block's way through `project_parts` and `take_sums`: residual + the groups' shares, for all rows.

    residual (width,) fp32 of bf16 values. share: of `rows_of_rank`, by this block's group. count: of the sum. Yields
    what it waits for each time it polls in vain; returns the new residual (width,).
    """
    area[block // grid.group, grid.rows_of_rank(block)] = shares_of(count, share)
    while not counted(area, count).all():
        yield "partial sums"
    return from_bf16(to_bf16(residual + sum_of_shares(values_of(area))))


def run(
    blocks: list[Block], choose: Callable[[int], int], seen: Callable[[int], None] = lambda ended: None
) -> list[np.ndarray]:
    """Runs blocks to their ends, one step of one of them at a time, and returns what they returned.

    `choose(n)` picks one of the n that have not ended, and must come to every one of them again and again. `seen` is
    called after every step with the number of those that have. Raises EngineError, as the kernel's watchdog does, where
    all that are left wait for what nobody will send.
    """
    results: dict[int, np.ndarray] = {}
    left = list(range(len(blocks)))
    waits: dict[int, str] = {}
    idle: set[int] = set()  # blocks that have polled in vain since anybody moved on
    while left:
        block = left[choose(len(left))]
        try:
            wait = next(blocks[block])
        except StopIteration as end:
            results[block], wait = end.value, ""
            left.remove(block)
        idle = idle | {block} if wait == waits.get(block) else set()
        waits[block] = wait
        seen(len(results))
        if left and len(idle) == len(left):
            raise EngineError(f"block {left[0]} waits for {waits[left[0]]} that nobody sends")
    return [results[block] for block in range(len(blocks))]
