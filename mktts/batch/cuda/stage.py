"""Where a launched tick meets the host, and the pages of keys and values: what goes to the device and comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.batch.cuda.kernels import rows as kernels
from mktts.batch.cuda.kernels.launching import launch
from mktts.engine.lanes import Made
from mktts.engine.pages import NO_OWNER, PAGE_ROWS, Copy, Pages
from mktts.errors import CapacityError
from mktts.kernel.grid import power_of_two
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, StackConfig


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, which is queued on the current CUDA stream: the host does not wait for it."""
    return torch.from_numpy(numbers).pin_memory().to(device, non_blocking=True)


class Stage:
    """One tick at a time: `begin`, its work, then `end`, all on one CUDA stream; later `collect`. block (words,) int64
    goes to the device. kept: what must stay in memory until the tick is over."""

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
        """The tick's clock starts here, in the current stream's order. before: the stage of the tick that was launched
        last, until this one is collected."""
        self._before = before
        self._began.record()

    def end(self, made: Tensor, pcm: Tensor | None, count: int) -> None:
        """Queues the way back. made (17 B,) int32, pcm (B, 1920) fp32: see `memory.space_shapes`; `count` lanes are
        filled. pcm None: silence."""
        self._lanes, self._count = len(made) // (NUM_CODEBOOKS + 1), count
        self._made[: len(made)].copy_(made, non_blocking=True)
        if pcm is not None:
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


class PagedMemory:
    """`memory` (pages, layers, kv heads, 2, 64, D) and `table` (slots + 1, pages a slot) int32, both on the device.
    Changes of the book and copies wait for `push`, which queues them on the current CUDA stream."""

    def __init__(self, book: Pages, talker: StackConfig, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        """Raises CapacityError where the device has no room for `pages`."""
        shape = (pages, talker.num_hidden_layers, talker.num_key_value_heads, 2, PAGE_ROWS, talker.head_dim)
        try:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            size = math.prod(shape) * dtype.itemsize
            raise CapacityError(
                f"{pages} pages of keys and values take {size / 2**30:.1f} GiB, which are not free: take fewer pages "
                "(see LaneMemory), or end what else runs on the device"
            ) from error
        self.table = torch.full(book.table.shape, NO_OWNER, dtype=torch.int32, device=device)
        self._book, self._device = book, device
        self._waves: list[list[Copy]] = []
        self._written: set[int] = set()  # pages that the last wave writes
        self._touched: set[int] = set()  # and those that it reads or writes

    @property
    def positions(self) -> int:
        """Rows that the table has room for, of one slot."""
        return self.table.shape[1] * PAGE_ROWS

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copies of one wave run at the same time, so one that needs another's page waits for the next wave."""
        for one in copies:
            if not self._waves or one.source in self._written or one.target in self._touched:
                self._waves.append([])
                self._written, self._touched = set(), set()
            self._waves[-1].append(one)
            self._written.add(one.target)
            self._touched |= {one.source, one.target}

    def push(self) -> None:
        """Queues the copies, then what changed in the table."""
        for wave in self._waves:
            _, layers, heads, two, rows, width = self.memory.shape
            launch(
                kernels.copy_rows,
                (len(wave), layers * heads * two),
                uploaded(np.array(wave, np.int32), self._device),
                self.memory,
                D=width,
                PAGE=rows,
            )
        self._waves, self._written, self._touched = [], set(), set()
        changed = self._book.changes()
        if len(changed):
            columns = self.table.shape[1]
            rows = np.concatenate((changed[:, None].astype(np.int32), self._book.table[changed]), 1)
            launch(
                kernels.set_table,
                (len(changed),),
                uploaded(rows, self._device),
                self.table,
                columns,
                COLUMNS=power_of_two(columns),
                num_warps=1,
            )
