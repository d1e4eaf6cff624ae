"""Rows of the text embeddings' table, brought to where prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PAGE_BYTES = 4096  # the smallest page of any system: reading more than one value of a larger one does no harm
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of so many bytes, which numpy has


class TextTable:
    """The table (V, E) stays where and as it is, normally in the mapped file: on a GPU it would take 0.6 GB, of which a
    prompt reads a few rows of 4 KB."""

    def __init__(self, table: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """device, dtype: of the rows that `rows` gives."""
        self._table, self._device, self._dtype = table, device, dtype
        self._uploads = table.device.type == "cpu" and device.type == "cuda"
        if self._uploads:
            _read_pages(table)
            self._numbers = numbers(table)

    def __len__(self) -> int:
        """V."""
        return len(self._table)

    def rows(self, ids: Sequence[int]) -> Tensor:
        """(N, E), N > 0. Raises IndexError for an id that is not in the table."""
        table = self._table
        if not self._uploads:
            x = table[torch.tensor(list(ids), dtype=torch.int64, device=table.device)]
            return x.to(self._device).to(self._dtype)
        # Through pinned memory, which torch keeps: the copy then waits for no work of other streams.
        pinned = torch.empty(len(ids), table.shape[1], dtype=table.dtype, pin_memory=True)
        gather(self._numbers, ids, numbers(pinned))
        return pinned.to(self._device, non_blocking=True).to(self._dtype)


def numbers(table: Tensor) -> np.ndarray:
    """The memory of a table on the CPU, each value as a whole number of the same bits: numpy has no bfloat16."""
    return table.view(_WHOLE[table.itemsize]).numpy()


def gather(table: np.ndarray, ids: Sequence[int], out: np.ndarray) -> None:
    """Writes rows of a table (V, E) to `out` (N, E), N > 0. Raises IndexError for an id that is not in the table.

    In the calling thread alone: torch's own operator wakes all its threads for 16 rows and more, which takes longer
    than the copy, and very long where they find no core.
    """
    if min(ids) < 0 or max(ids) >= len(table):
        raise IndexError(f"ids must be 0 to {len(table) - 1}, got {min(ids)} to {max(ids)}")
    np.take(table, np.array(ids, np.int64), axis=0, out=out, mode="clip")  # "raise" would copy twice


def _read_pages(table: Tensor) -> None:
    """Reads a value of every page of a mapped table, so that a word's first use does not wait for the disk."""
    table.flatten()[:: _PAGE_BYTES // table.itemsize].sum()
