"""Prompts into the frame kernel's key-value cache: prefixes kept, all rows at once, or what the kernel takes itself."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from mktts.prefill import Prefill, deal
from mktts.prefix import PrefixCache
from mktts.qwen3 import Qwen3Stack


class KernelPrefill:
    """Fills caches laid out as csrc/state.cuh has them: (layers, kv heads, group, slots, 2, head_dim)."""

    def __init__(self, stack: Qwen3Stack) -> None:
        self.stack = stack
        self._prefill = Prefill(stack)
        self._prefill.warm_up()  # a graph captured while a stream waits would cost it tens of ms
        self._prefixes = PrefixCache(self._prefill)

    @torch.inference_mode()
    def prefix(self, rows: Tensor, key: Hashable | None, kv: Tensor) -> None:
        """Positions [0, P) from the prefix rows (P, H) alone, found under `key` or computed."""
        kept = self._prefixes.prefix(rows, key)
        deal(kept.keys, kept.values, kv)

    @torch.inference_mode()
    def fill(self, rows: Tensor, kv: Tensor, prefix_rows: int = 0, key: Hashable | None = None) -> Tensor:
        """All positions of a prompt (L, H) at once; returns the normed hidden state (H,) of the last one.

        A prompt beyond the graphs' capacity goes through eager PyTorch, without a kept prefix.
        """
        if len(rows) <= self._prefill.capacity:
            hidden = self._prefixes.run(rows, prefix_rows, key)
            deal(self._prefill.keys, self._prefill.values, kv)
            return hidden
        cache = self.stack.new_cache(len(rows))
        hidden = self.stack.forward(rows[None], cache)[0, -1]
        deal(cache.keys[:, 0, :, : len(rows)], cache.values[:, 0, :, : len(rows)], kv)
        return hidden
