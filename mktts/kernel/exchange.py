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
SUMS = 3  # kinds of sums: of the talker, of the predictor, of the second position in a pass of two
COPIES = 4  # of a sum's words, alike; a quarter of the blocks read each. Here there is one
LINE_ROWS, LINE_STEP = 16, 4  # rows whose words share a line, and how many lines apart such lines lie
PLACES, MOST = 2.0**28, 2.0**18  # a share's fixed point: what 1 counts, and what is no share any more
_NO_SHARE = 1 << 50
_WHOLE = _NO_SHARE // 2  # sums of shares are at most that
_ONE = 56  # where a word's count of shares begins
# What is read here -> the line of csrc that says it.
LINES = {
    "word": "put32(word, (tag << 16) | to_bf16(value))",
    "fresh": "((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0",
    "share": "return fabsf(v) < MOST ? __float2ll_rn(v * PLACES) : NOT_A_SHARE;",
    "sent": "add_to(words, row, (1ull << 56) + (u64)to_fixed(value))",
    "taken back": "add_to(of.word[S::ID + at / EACH], row, -t.v[i])",
    "counted": "bad |= (((u32)(v[i] >> 32) + (1u << 23)) >> 24) ^ count",
    "whole": "const i64 sum = (i64)(v[n][g][i] << 8) >> 8",
    "added": "x[n].v[g][i] = round_bf16(x[n].v[g][i] + round_bf16(from_fixed(sum)))",
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


def to_fixed(values: np.ndarray | float) -> np.ndarray:
    """int64 with 28 binary places, ties to even; what is no share of a sum makes that NaN (`from_fixed`)."""
    values = np.asarray(values, np.float32)
    shares = np.abs(values) < MOST
    return np.where(shares, np.rint(np.where(shares, values, 0) * np.float32(PLACES)).astype(np.int64), _NO_SHARE)


def from_fixed(sums: np.ndarray) -> np.ndarray:
    """fp32 of int64 sums."""
    return np.where(np.abs(sums) <= _WHOLE, sums.astype(np.float32) / np.float32(PLACES), np.float32(np.nan))


def shares_of(values: np.ndarray) -> np.ndarray:
    """`send_share`: what is added to a sum's word, uint64."""
    return to_fixed(values).view(np.uint64) + np.uint64(1 << _ONE)


def counts_of(words: np.ndarray) -> np.ndarray:
    """How many shares were added to each word, modulo 256. What it holds may be negative and borrow from the count."""
    return ((words + np.uint64(1 << (_ONE - 1))) >> np.uint64(_ONE)).astype(np.int64)


def sums_of(words: np.ndarray) -> np.ndarray:
    """int64: what words hold beside their counts."""
    bits = 64 - _ONE
    return (words << np.uint64(bits)).view(np.int64) >> bits


def layout(shape: Shape) -> np.dtype:
    """state.cuh, struct Exchange: every word of device memory that blocks meet at. Offsets are the compiler's."""
    t, p = shape.talker, shape.predictor
    blocks, group, heads = shape.blocks, shape.group, t.num_key_value_heads
    widest = max(t.hidden_size, p.hidden_size)
    places = -(-widest // LINE_ROWS) * LINE_ROWS * LINE_STEP
    sums = np.dtype([("word", "u8", (SUMS, COPIES, places)), ("was", "i8", (SUMS, widest))])
    queries = t.num_attention_heads // heads
    share = power_of_two(-(-queries * t.head_dim // group))
    return np.dtype(
        [
            ("h", sums),
            ("x", sums),
            ("counts", "u4", (4,)),
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

    def new_area(self, name: str = "h") -> Area:
        """As on a new device."""
        return Area(name, np.zeros(self.width, np.uint64), np.zeros(self.width, np.int64))


@dataclass(frozen=True)
class Area:
    """state.cuh, `Sums`: one word a row, and the newest sum of it that every block has read."""

    name: str
    words: np.ndarray  # (width,) uint64
    was: np.ndarray  # (width,) int64


Block = Generator[str, None, np.ndarray]


def add_residual(grid: Grid, area: Area, block: int, sums: int, residual: np.ndarray, share: np.ndarray) -> Block:
    """One block's way through `take_back`, `project_parts` and `take_sums`: residual + the groups' shares, all rows.

    residual (width,) fp32 of bf16 values. share: of `rows_of_rank`, by this block's group. sums: that the area has had,
    this one among them; all blocks have read those before. Yields what it waits for each time it polls in vain; returns
    the new residual (width,).
    """
    rows, count = grid.rows_of_rank(block), grid.heads * sums
    if block < grid.group:
        area.words[rows] -= area.was[rows].view(np.uint64)
    area.words[rows] += shares_of(share)
    while (counts_of(area.words) != count & 255).any():
        yield f"sum {sums} in {area.name}"
    found = sums_of(area.words)
    if block < grid.group:
        area.was[rows] = found[rows]
    return from_bf16(to_bf16(residual + from_bf16(to_bf16(from_fixed(found)))))


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
