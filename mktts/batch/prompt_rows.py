"""Prompts of known text as rows that lie on the device already: opening a stream then takes no operator there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mktts.model.prompt import PromptBuilder


@dataclass(frozen=True, eq=False)
class PromptRows:
    """A prompt (L, H) whose rows are read where they lie.

    addresses (L,) int64. like: a tensor of the rows' width, dtype and device. kept: what they lie in.
    """

    addresses: np.ndarray
    like: Tensor
    kept: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.addresses), self.like.shape[-1]

    @classmethod
    def of(cls, rows: Tensor) -> PromptRows:
        """The rows of a tensor (L, H), each of which is contiguous."""
        return cls(addresses_of(rows), rows, (rows,))


class SpokenRows:
    """Every text id's row as whole prompts have it, (V, H): 0.3 GB at 0.6B in bfloat16."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._table = prompts.spoken_rows()
        self._first, self._stride = self._table.data_ptr(), _stride_bytes(self._table)

    def prompt(self, head: Tensor, ids: Sequence[int], end: Tensor) -> PromptRows:
        """Rows `head`, those of the text `ids`, rows `end`."""
        text = self._first + self._stride * np.array(ids, np.int64)
        addresses = np.concatenate((addresses_of(head), text, addresses_of(end)))
        return PromptRows(addresses, head, (head, self._table, end))


def addresses_of(rows: Tensor) -> np.ndarray:
    """Of rows (N, H), each of which is contiguous: (N,) int64."""
    return rows.data_ptr() + _stride_bytes(rows) * np.arange(len(rows), dtype=np.int64)


def _stride_bytes(rows: Tensor) -> int:
    return rows.stride(0) * rows.element_size()
