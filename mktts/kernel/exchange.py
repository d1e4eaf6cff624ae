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
from mktts.kernel.tape import Shape

POSITIONS = 2  # that one pass can take
_MOST_BOXES = 8
# What is read here -> the line of csrc that says it.
LINES = {
    "word": "put32(word, (tag << 16) | to_bf16(value))",
    "part": "put64(to, ((u64)tag << 32) | __float_as_uint(value))",
    "fresh": "((v[0] ^ t) | (v[1] ^ t) | (v[2] ^ t) | (v[3] ^ t)) >> 16) == 0",
    "owner": "parts[row / RPO * GROUP + c.rank][n][c.group][row % RPO]",
    "first_owned": "c.rank * (H / GROUP) + c.group * Owned<H>::RPO",
    "own": "from_bf16(c.s->residual[half][n][row]) + round_bf16(sum)",
    "mail": "put32x4(&boxes[(to + c.block) % BOXES][n][base + c.lane % (RPO / 4) * 4], w)",
    "box": "&boxes[c.block % BOXES][n][element<S>(c, g)]",
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


def parts_of(tag: int, values: np.ndarray) -> np.ndarray:
    """`send_part`: [tag:32 | fp32:32]."""
    return np.uint64(tag << 32) | np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)


def fresh(words: np.ndarray, tag: int) -> bool:
    """`poll4` and `poll64n`: whether all words are of this exchange. A word of any other is an old one."""
    bits = 16 if words.dtype == np.uint32 else 32
    return bool((words >> words.dtype.type(bits) == tag & ((1 << bits) - 1)).all())


def boxes_of(blocks: int) -> int:
    """config.cuh, BOXES: copies of the residual, each polled by as many blocks."""
    return min(blocks, _MOST_BOXES)


def layout(shape: Shape) -> np.dtype:
    """state.cuh, struct Exchange: every word of device memory that blocks meet at. Offsets are the compiler's."""
    t, p = shape.talker, shape.predictor
    blocks, group, heads, boxes = shape.blocks, shape.group, t.num_key_value_heads, boxes_of(shape.blocks)
    width = max(t.hidden_size, p.hidden_size)
    queries = t.num_attention_heads // heads
    share = queries * t.head_dim // group
    return np.dtype(
        [
            ("parts", "u8", (blocks, POSITIONS, heads, width // blocks)),
            ("h", "u4", (boxes, POSITIONS, width)),
            ("x", "u4", (boxes, POSITIONS, width)),
            ("part", "u8", (heads, group, group, share + 2)),
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
    """Who owns which rows of a residual of `width` values, where `heads` groups of blocks each have a share of it."""

    blocks: int
    heads: int
    width: int

    @property
    def group(self) -> int:
        return self.blocks // self.heads

    @property
    def owned(self) -> int:
        """Rows of a block."""
        return self.width // self.blocks

    def first_owned(self, block: int) -> int:
        """`first_owned`: rows [this, this + owned) are this block's."""
        number, rank = divmod(block, self.group)
        return rank * (self.width // self.group) + number * self.owned

    def rows_of_rank(self, block: int) -> slice:
        """The rows whose partial sums a block multiplies: those of all blocks with its rank."""
        first = block % self.group * (self.width // self.group)
        return slice(first, first + self.width // self.group)

    def new_area(self) -> dict[str, np.ndarray]:
        """`parts` and one row of `boxes` of struct Exchange, for one position: zeros, as on a new device."""
        parts = np.zeros((self.blocks, self.heads, self.owned), np.uint64)
        return {"parts": parts, "boxes": np.zeros((boxes_of(self.blocks), self.width), np.uint32)}


def sum_of_parts(parts: np.ndarray) -> np.ndarray:
    """`own_rows`: (groups, rows) fp32 -> (rows,), in the order in which the lanes of a warp add."""
    rows = parts.shape[1]
    words = parts.size
    lane = np.arange(32)
    first, at = lane % words // rows, lane % words % rows
    total = np.zeros(32, np.float32)
    for k in range(-(-words // 32)):
        total += np.where(lane < words, parts[first + k * (32 // rows), at], np.float32(0))
    step = rows
    while step < 32:
        total = total + total[lane ^ step]
        step *= 2
    return total[:rows]


Block = Generator[str, None, np.ndarray]


def add_residual(
    grid: Grid, area: dict[str, np.ndarray], block: int, tag: int, residual: np.ndarray, share: np.ndarray
) -> Block:
    """One block's way through `project_parts`, `own_rows` and `take_mail`: residual + the groups' shares, for all rows.

    residual (width,) fp32 of bf16 values. share: the partial sums of `rows_of_rank` by this block's group. Yields what
    it waits for each time it polls in vain; returns the new residual (width,).
    """
    number, rank = divmod(block, grid.group)
    parts, boxes = area["parts"], area["boxes"]
    owners = np.arange(len(share)) // grid.owned * grid.group + rank
    parts[owners, number, np.arange(len(share)) % grid.owned] = parts_of(tag, share)
    while not fresh(parts[block], tag):
        yield "partial sums"
    total = sum_of_parts(parts[block].astype(np.uint32).view(np.float32))
    mine = slice(grid.first_owned(block), grid.first_owned(block) + grid.owned)
    words = words_of(tag, residual[mine] + from_bf16(to_bf16(total)))
    for to in range(len(boxes)):
        boxes[(to + block) % len(boxes), mine] = words
    box = boxes[block % len(boxes)]
    while not fresh(box, tag):
        yield "exchange words"
    return from_bf16(box)


def run(blocks: list[Block], choose: Callable[[int], int], seen: Callable[[], None] = lambda: None) -> list[np.ndarray]:
    """Runs blocks to their ends, one step of one of them at a time, and returns what they returned.

    `choose(n)` picks one of the n that have not ended, and must come to every one of them again and again. `seen` is
    called after every step. Raises EngineError, as the kernel's watchdog does, where all that are left wait for what
    nobody will send.
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
        seen()
        if left and len(idle) == len(left):
            raise EngineError(f"block {left[0]} waits for {waits[left[0]]} that nobody sends")
    return [results[block] for block in range(len(blocks))]
