"""The host's side of a launched tick: what goes to the device, one block of 64-bit words of which every kernel reads
its part, and what comes back. The block has text rows and prompt rows by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.engine.lanes import Made
from mktts.engine.scheduler import Tick
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

SETTINGS = 12  # 32-bit words of a lane's settings, see `packed`
PENALTY = 10  # the word of the repetition penalty
_CHOICES = (2, 6)  # the first words of the talker's and of the predictor's `Choice`
_OF_LANES = ("slots", "fresh", "ends", "selected", "text")  # parts of a block, followed by the settings
_OF_ROWS = ("row_slots", "row_positions", "row_addresses")
_MOST_WHOLE = 2**31 - 1


@dataclass(frozen=True)
class BlockLayout:
    """The layout of one bucket's block, for `lanes` and `prompt_rows`."""

    lanes: int
    prompt_rows: int

    @property
    def words(self) -> int:
        """Words of 64 bits in the block."""
        return (len(_OF_LANES) + SETTINGS // 2) * self.lanes + len(_OF_ROWS) * self.prompt_rows

    def parts(self, block: np.ndarray | Tensor) -> SimpleNamespace:
        """Views of `block` (at least `words`,) int64, on the host or on the device, of B lanes and P prompt rows.

        Of lanes (B,): slots; fresh: 1 at the first frame behind a prompt; ends: rows of that prompt; selected: the
        talker's row whose hidden state counts, a lane's own (its number) or, from B on, the last of its prompt; text:
        the address of the text row, 0 for none. settings (B, 12) int32: `packed`. Of prompt rows (P,): row_slots,
        row_positions, row_addresses (0: a row that only fills the bucket)."""
        sizes = {**dict.fromkeys(_OF_LANES, self.lanes), "settings": SETTINGS // 2 * self.lanes}
        parts, at = SimpleNamespace(), 0
        for name, size in (sizes | dict.fromkeys(_OF_ROWS, self.prompt_rows)).items():
            setattr(parts, name, block[at : at + size])
            at += size
        words = parts.settings.view(torch.int32 if isinstance(block, Tensor) else np.int32)
        parts.settings = words.reshape(self.lanes, SETTINGS)
        return parts

    def padded(self, nobody: int) -> np.ndarray:
        """The block (words,) of a tick without lanes: all work on the padding slot `nobody`, at a first frame."""
        block = np.zeros(self.words, np.int64)
        parts = self.parts(block)
        parts.slots[:] = parts.row_slots[:] = nobody
        parts.fresh[:] = 1
        parts.selected[:] = np.arange(self.lanes)
        parts.settings[:] = packed(Sampling().greedy(), 0)
        return block

    def fill(
        self, block: np.ndarray, tick: Tick, text: Sequence[int], settings: np.ndarray, prompts: Sequence[np.ndarray]
    ) -> None:
        """Writes `tick` into `block`, which is `padded`. text: addresses of the text rows of all but the new lanes.
        settings (slots, 12) int32. prompts: for each of the tick's pieces the addresses (L,) int64 of its prompt."""
        parts, count, new = self.parts(block), len(tick.lanes), tick.new_lanes
        parts.slots[:count] = tick.lanes
        parts.settings[:count] = settings[tick.lanes]
        parts.fresh[new:count] = 0
        parts.text[new:count] = text
        at = lane = 0
        for piece, addresses in zip(tick.pieces, prompts, strict=True):
            end, behind = at + piece.rows, piece.start + piece.rows
            parts.row_slots[at:end] = piece.slot
            parts.row_positions[at:end] = np.arange(piece.start, behind)
            parts.row_addresses[at:end] = addresses[piece.start : behind]
            if piece.last:
                parts.ends[lane] = behind
                parts.selected[lane] = self.lanes + end - 1
                lane += 1
            at = end


def packed(sampling: Sampling, seed: int) -> np.ndarray:
    """The settings of a lane (12,) int32: the seed's low and high word; the fields of the talker's and of the
    predictor's `Choice`; the repetition penalty; 0. Floats by their bits."""
    row = np.zeros(SETTINGS, np.int32)
    floats = row.view(np.float32)
    row[:2] = np.array((seed & 0xFFFFFFFF, seed >> 32), np.uint32).view(np.int32)
    for at, choice in zip(_CHOICES, (sampling.talker, sampling.predictor), strict=True):
        for word, value in enumerate(astuple(choice), at):
            if isinstance(value, float):
                floats[word] = value
            else:
                row[word] = min(value, _MOST_WHOLE)
    floats[PENALTY] = sampling.repetition_penalty
    return row


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, queued on the current CUDA stream; the host does not wait for it."""
    return torch.from_numpy(numbers).pin_memory().to(device, non_blocking=True)


class Stage:
    """Buffers of one tick at a time: `begin`, the tick's work, then `end`, all on one CUDA stream; later `collect`.
    block: (words,) int64, which goes to the device. kept: what must stay in memory until the tick is over."""

    def __init__(self, words: int, lanes: int) -> None:
        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)

        self.block = pinned(words, dtype=torch.int64)
        self.numbers = self.block.numpy()
        self.kept: list[Any] = []
        self._made = pinned((NUM_CODEBOOKS + 1) * lanes, dtype=torch.int32)
        self._pcm = pinned(lanes, SAMPLES_PER_FRAME, dtype=torch.float32)
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._lanes = self._count = 0
        self._before: Stage | None = None

    def begin(self, before: Stage | None = None) -> None:
        """Starts the tick's clock, in the current stream's order. before: the stage of the newest tick in flight, from
        whose end `idle_s` counts."""
        self._before = before
        self._began.record()

    def end(self, made: Tensor, pcm: Tensor, count: int) -> None:
        """Queues the copies to the host. made (17 B,) int32, pcm (B, 1920) fp32: see `memory.space_shapes`; `count`
        lanes are filled."""
        self._lanes, self._count = len(made) // (NUM_CODEBOOKS + 1), count
        self._made[: len(made)].copy_(made, non_blocking=True)
        self._pcm[:count].copy_(pcm[:count], non_blocking=True)
        self._ended.record()

    def collect(self) -> Made:
        """Waits, without the interpreter's lock, until the tick is over."""
        self._ended.synchronize()
        took_s = 1e-3 * self._began.elapsed_time(self._ended)
        idle_s = 0.0 if self._before is None else 1e-3 * self._before._ended.elapsed_time(self._began)
        self._before = None
        self.kept = []
        made, count = self._made.numpy(), self._count
        codes = made[: NUM_CODEBOOKS * self._lanes].reshape(-1, NUM_CODEBOOKS)[:count].astype(np.int64)
        state = made[NUM_CODEBOOKS * self._lanes :][:count]
        codes[state > 1, 0] = -1
        return Made(codes, state == 1, self._pcm.numpy()[:count], took_s, idle_s)
