"""Prompts into the frame kernel's key-value cache: prefixes kept, all rows at once, or what the kernel takes itself.

Speech has its talker's matrices on the device once, on the kernel's tape; prefill unpacks them layer by layer
(`kernel_unpack.TapeStack`). What a process holds at 0.6B with four streams of 2 000 frames, in MiB:

    896  keys and values: 4 streams x 2 048 positions x 112 KiB
    840  talker tape: 28 layers x 30
    290  predictor: tape 150, heads 66 (the talker's with it), embeddings 66; rotary tables 8
     30  one layer unpacked
    112  prefill's workspace: 1 025 positions x 112 KiB
    433  codec: packed weights 401, codebooks 32
     12  text projection
     64  prefixes, at most

Beside them: cuBLAS workspaces of 32 for each thread and stream that multiplies, working memory and nodes of the graphs
of prefill and codec, the CUDA context with its modules. Not on the device: text embeddings (594, rows are read where
the file is mapped), the codec's fp32 weights (404, for passes that only analysis makes), a second talker (840).
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from mktts.errors import CapacityError
from mktts.kernel.prefill import Prefill, deal
from mktts.kernel.prefixes import PrefixCache
from mktts.model.qwen3 import Qwen3Stack, Stack


class KernelPrefill:
    """Fills caches laid out as csrc/state.cuh has them: (layers, kv heads, group, slots, 2, head_dim)."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._prefill = Prefill(stack)
        self._prefill.warm_up()  # a graph captured while a stream waits would cost it tens of ms
        self._prefixes = PrefixCache(self._prefill)

    @property
    def capacity(self) -> int:
        """Rows of a prompt that the graphs take."""
        return self._prefill.capacity

    @torch.inference_mode()
    def prefix(self, rows: Tensor, key: Hashable | None, kv: Tensor) -> None:
        """Positions [0, P) from the prefix rows (P, H) alone, found under `key` or computed."""
        kept = self._prefixes.prefix(rows, key)
        deal(kept.keys, kept.values, kv)

    @torch.inference_mode()
    def fill(self, rows: Tensor, kv: Tensor, prefix_rows: int = 0, key: Hashable | None = None) -> Tensor:
        """All positions of a prompt (L, H) at once; returns the normed hidden state (H,) of the last one.

        A prompt beyond the graphs' capacity goes through eager PyTorch, without a kept prefix, where the stack has
        matrices of its own (a Qwen3Stack). Raises CapacityError where it has not.
        """
        capacity = self.capacity
        if len(rows) > capacity and not isinstance(self.stack, Qwen3Stack):
            raise CapacityError(
                f"a prompt may have {capacity} rows with the megakernel, this one has {len(rows)}: shorten it "
                "(instruction, reference recording and its transcript, text), or pass backend='torch'"
            )
        if len(rows) <= capacity:
            hidden = self._prefixes.run(rows, prefix_rows, key)
            deal(self._prefill.keys, self._prefill.values, kv)
            return hidden
        cache = self.stack.new_cache(len(rows))
        hidden = self.stack.forward(rows[None], cache)[0, -1]
        deal(cache.keys[:, 0, :, : len(rows)], cache.values[:, 0, :, : len(rows)], kv)
        return hidden
