"""Prompts whose prefix (instruction, language, speaker or voice) was prefilled before: only the rest is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

from mktts.errors import CapacityError, PromptError
from mktts.kernel.prefill import Kept, Prefill


class PrefixCache:
    """Keys and values of prefixes, by the key that the prompt's builder gives (`Prompt.prefix_key`).

    Looking one up asks nothing of the device. The least recently used ones go first when there are more than
    `max_entries` or they take more than `max_bytes` of device memory (a row is 112 KiB at the released sizes).
    One thread at a time, as its Prefill.
    """

    def __init__(self, prefill: Prefill, max_entries: int = 64, max_bytes: int = 64 << 20) -> None:
        """Raises CapacityError for negative limits; 0 keeps nothing."""
        if max_entries < 0 or max_bytes < 0:
            raise CapacityError(f"limits must not be negative, got {max_entries} entries and {max_bytes} bytes")
        self.prefill = prefill
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.nbytes = 0
        self.hits = self.misses = 0
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, rows: Tensor, prefix_rows: int, key: Hashable | None) -> Tensor:
        """As `Prefill.run` of a whole prompt (L, H) whose first `prefix_rows` (< L) rows are known by `key`.

        The prefix is a piece of its own even when it is new or `key` is None (never kept): the bits are the same
        whether it was kept or not.
        """
        if not 0 <= prefix_rows < len(rows):
            raise PromptError(
                f"prefix_rows must be in 0..{len(rows) - 1} of {len(rows)} prompt rows, got {prefix_rows}"
            )
        if prefix_rows:
            kept = self.find(key, prefix_rows)
            if kept is None:
                self._make(rows[:prefix_rows], key)
            else:
                self.prefill.restore(kept)
        return self.prefill.run(rows[prefix_rows:], prefix_rows)

    def prefix(self, rows: Tensor, key: Hashable | None) -> Kept:
        """Keys and values of the prefix rows (P, H) alone, found or made; where made, they are also in the workspace.

        For a caller that computes the rest of the prompt by other means.
        """
        return self.find(key, len(rows)) or self._make(rows, key)

    def find(self, key: Hashable | None, rows: int) -> Kept | None:
        """What is kept under `key`, counted as a hit or a miss. Raises PromptError where it has not `rows` rows."""
        kept = None if key is None else self._kept.get(key)
        if kept is None:
            self.misses += 1
            return None
        if kept.length != rows:
            raise PromptError(f"prefix_key names a prefix of {kept.length} rows, this one has {rows}: keys must differ")
        self.hits += 1
        self._kept.move_to_end(key)
        return kept

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def _make(self, rows: Tensor, key: Hashable | None) -> Kept:
        self.prefill.run(rows)
        kept = self.prefill.keep(len(rows))
        if key is not None and self.max_entries and kept.nbytes <= self.max_bytes:
            self._kept[key] = kept
            self.nbytes += kept.nbytes
            while len(self._kept) > self.max_entries or self.nbytes > self.max_bytes:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return kept
