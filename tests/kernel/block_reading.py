"""csrc's blocks, warps and lanes in numpy: what each of them takes from its tape, multiplies, and mails to whom.

Written from csrc/config.cuh, gemv.cuh, exchange.cuh, attention.cuh and layer.cuh, not from mktts.kernel: numbers come
from the same five (`CTAS`, heads, widths) as there. A word that is written twice, or polled and never written, fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mktts.spec import StackConfig

WARPS, LANES, FRAG_VALUES, STAGE_FRAGMENTS = 8, 32, 256, 4


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def power_of_two(least: int) -> int:
    return 1 if least <= 1 else 2 * power_of_two(ceil_div(least, 2))


class Mailbox:
    """Words that may be written once and are read by name: NaN until then."""

    def __init__(self, *shape: int) -> None:
        self.words = np.full(shape, np.nan)

    def put(self, at: tuple[int, ...], value: float) -> None:
        assert all(0 <= i < n for i, n in zip(at, self.words.shape, strict=True)), (at, self.words.shape)
        assert np.isnan(self.words[at]), f"{at} is written twice"
        self.words[at] = value

    def poll(self, at: tuple[int | slice, ...]) -> np.ndarray:
        found = self.words[at]
        assert not np.isnan(found).any(), f"{at} is waited for and never written"
        return found


@dataclass
class Tape:
    """One block's tape of one layer, read from its start on (ring.cuh: in the order of use)."""

    values: np.ndarray
    at: int = 0

    def matrix(self, tiles: int, steps: int) -> np.ndarray:
        """(WARPS, steps, tiles, LANES, 8): fragments as warps take them, stage by stage (take_stage)."""
        count, taken = tiles * steps, []
        for first in range(0, count, STAGE_FRAGMENTS):
            n = min(STAGE_FRAGMENTS, count - first)
            size = WARPS * n * FRAG_VALUES
            taken.append(self.values[self.at : self.at + size].reshape(WARPS, n, LANES, 8))
            self.at += size
        return np.concatenate(taken, 1).reshape(WARPS, steps, tiles, LANES, 8)


@dataclass
class Reading:
    """Four products of one layer over all blocks, one position."""

    stack: StackConfig
    blocks: int
    tapes: np.ndarray  # (blocks, elements)
    tape: dict[int, Tape] = field(init=False)

    def __post_init__(self) -> None:
        c = self.stack
        self.heads = c.num_key_value_heads
        self.group = self.blocks // self.heads
        self.outputs = c.num_attention_heads // self.heads * c.head_dim
        self.inner = c.intermediate_size // self.heads
        self.share = power_of_two(ceil_div(self.outputs, self.group))
        self.tape = {block: Tape(self.tapes[block]) for block in range(self.blocks)}

    def multiply(self, block: int, total: int, unit: int, vector: np.ndarray) -> tuple[int, dict[int, float]]:
        """gemv.cuh, `multiply`: rows of a block's share, and the sums of those that some lane holds."""
        each = unit * ceil_div(total // unit, self.group)
        chunk = ceil_div(each, 16) * 16
        if each > 128:
            chunk = min((64, 80, 96, 112, 128), key=lambda rows: ceil_div(each, rows) * rows)
        rows, sums = min(each, total - block % self.group * each), {}
        steps, tiles = ceil_div(len(vector), 128), chunk // 16
        padded = np.zeros(128 * steps)
        padded[: len(vector)] = vector
        for first in range(0, each, chunk):
            a = self.tape[block].matrix(tiles, steps)
            for warp, row, value in self._mma(a, padded.reshape(8, steps, 16)):
                at = warp * 2 * tiles + row  # held_row
                if at < rows - first:
                    sums[first + at] = value
        assert len(sums) == max(0, rows)
        return each, sums

    @staticmethod
    def _mma(a: np.ndarray, parts: np.ndarray) -> list[tuple[int, int, float]]:
        """mma.m16n8k16 (PTX ISA): lane 4 g + q holds A's rows g and g + 8, columns 2 q and 2 q + 8 and their next; of
        the vector's part g it loads four neighbours, which are those columns. The diagonal: row g of A by part g."""
        warps, steps, tiles = a.shape[:3]
        lanes = a.reshape(warps, steps, tiles, 8, 4, 2, 2, 2)  # part g, q, upper columns, row g or g + 8, of two values
        four = parts.reshape(8, steps, 4, 2, 2)  # part, step, q, upper columns, of two values
        sums = np.einsum("wstgqurv,gsquv->wtr", lanes, four)
        return [(w, 2 * t + r, sums[w, t, r]) for w in range(warps) for t in range(tiles) for r in range(2)]

    def qkv(self, x: np.ndarray) -> np.ndarray:
        """(heads, rows of a group) words."""
        total = self.outputs + 2 * self.stack.head_dim
        words = Mailbox(self.heads, total)
        for block in range(self.blocks):
            each, sums = self.multiply(block, total, 1, x)
            for row, value in sums.items():
                words.put((block // self.group, block % self.group * each + row), value)
        return words.poll((slice(None),))

    def gates(self, x: np.ndarray) -> np.ndarray:
        """(heads, activations of a group, 2): gate and up that the lane of the gate has."""
        words = Mailbox(self.heads, self.inner, 2)
        for block in range(self.blocks):
            each, sums = self.multiply(block, 2 * self.inner, 2, x)
            for row in range(0, len(sums), 2):
                at = block // self.group, block % self.group * (each // 2) + row // 2
                words.put((*at, 0), sums[row])
                words.put((*at, 1), sums[row + 1])
        return words.poll((slice(None),))

    def projection(self, inputs: np.ndarray) -> np.ndarray:
        """(H,) sums over groups: inputs (heads, k) of each group."""
        h = self.stack.hidden_size
        shares = Mailbox(self.heads, h)
        for block in range(self.blocks):
            number, rank = divmod(block, self.group)
            each, sums = self.multiply(block, h, 1, inputs[number])
            for row, value in sums.items():  # send_share
                shares.put((number, rank * each + row), value)
        return shares.poll((slice(None), slice(None))).sum(0)  # take_sums

    def attention(self, maxima: np.ndarray, sums: np.ndarray, outs: np.ndarray) -> np.ndarray:
        """talker_attention's exchange: (heads, outputs) from each block's running maxima and sums (blocks, query heads)
        and outputs (blocks, outputs)."""
        width, shares = self.stack.head_dim, self.outputs // self.share
        part = Mailbox(self.heads, shares, self.group, self.share + 2)
        words = Mailbox(self.heads, self.outputs)
        for block in range(self.blocks):
            number, rank = divmod(block, self.group)
            for i in range(self.outputs):
                to = (number, i // self.share, rank)
                part.put((*to, i % self.share), outs[block, i])
                if i % self.share == 0:
                    part.put((*to, self.share), maxima[block, i // width])
                    part.put((*to, self.share + 1), sums[block, i // width])
        for block in range(self.blocks):
            number, rank = divmod(block, self.group)
            if rank >= shares:
                continue
            assert self.share <= WARPS * LANES
            found = part.poll((number, rank))
            scale = np.exp2(found[:, self.share] - found[:, self.share].max())
            for lane in range(self.share):
                value = (found[:, lane] * scale).sum() / (found[:, self.share + 1] * scale).sum()
                words.put((number, rank * self.share + lane), value)
        return words.poll((slice(None),))

    def finish(self) -> None:
        """Every block has read its tape to the end."""
        assert {tape.at for tape in self.tape.values()} == {self.tapes.shape[1]}
