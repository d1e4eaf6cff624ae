"""Keys and values of all streams on the device, in pages; the book of who holds which page is the host's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from mktts.batch.cuda.kernels import pages as kernels
from mktts.batch.cuda.kernels.launching import launch
from mktts.batch.cuda.stage import uploaded
from mktts.batch.pages import NOBODY, PAGE_ROWS, Copy, Pages
from mktts.errors import CapacityError
from mktts.spec import StackConfig


class PagedMemory:
    """`memory` (pages, layers, kv heads, 2, 64, D) and `table` (slots + 1, pages a slot) int32, both on the device.

    Changes of the book and copies wait for `push`, which queues them on the current CUDA stream.
    """

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
        self.table = torch.full(book.table.shape, NOBODY, dtype=torch.int32, device=device)
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
                COLUMNS=1 << (columns - 1).bit_length(),
                num_warps=1,
            )
