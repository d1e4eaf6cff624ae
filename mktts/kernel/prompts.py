"""Prompts into the frame kernel's key-value cache: prefixes (instruction, language, speaker or voice) that were
prefilled before are kept, the rest of a prompt is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import Tensor

from mktts.errors import CapacityError, PromptError
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape_stack import TapeRows
from mktts.model.prompt import is_of_voice
from mktts.model.qwen3 import Qwen3Stack, Stack
from mktts.model.voice import Voice


class KernelPrefill:
    """Fills caches laid out as csrc/state.cuh has them: (layers, kv heads, group, slots, 2, head_dim)."""

    def __init__(self, stack: Stack, few: TapeRows | None = None) -> None:
        self.stack = stack
        self._prefill = Prefill(stack, few=few)
        self._prefill.warm_up()  # a graph that is captured while a stream waits delays it by tens of ms
        self._prefixes = PrefixCache(self._prefill)
        self.capacity = self._prefill.capacity  # rows of a prompt that the graphs take

    @torch.inference_mode()
    def prefix(self, rows: Tensor, key: Hashable | None, kv: Tensor) -> None:
        """Positions [0, P) from the prefix rows (P, H) alone, found under `key` or computed."""
        copy_into_cache(self._prefixes.prefix(rows, key), kv)

    def forget(self, voice: Voice) -> None:
        self._prefixes.forget(voice)

    @torch.inference_mode()
    def fill(self, rows: Tensor, kv: Tensor, prefix_rows: int = 0, key: Hashable | None = None) -> Tensor:
        """All positions of a prompt (L, H) at once; returns the normed hidden state (H,) of the last one. A prompt
        beyond the graphs' capacity goes through eager PyTorch where the stack has matrices of its own (a Qwen3Stack).
        Raises CapacityError where it has not."""
        capacity = self.capacity
        if len(rows) > capacity and not isinstance(self.stack, Qwen3Stack):
            raise CapacityError(
                f"a prompt may have {capacity} rows with the megakernel, this one has {len(rows)}: shorten it "
                "(instruction, reference recording and its transcript, text), or pass backend='torch'"
            )
        if len(rows) <= capacity:
            hidden = self._prefixes.run(rows, prefix_rows, key)
            copy_into_cache(self._prefill.keys_values, kv)
            return hidden
        cache = self.stack.new_cache(len(rows))
        hidden = self.stack.forward(rows[None], cache)[0, -1]
        copy_into_cache(torch.stack((cache.keys, cache.values))[:, :, 0, :, : len(rows)], kv)
        return hidden

    @torch.inference_mode()
    def go_on(self, rows: Tensor, kv: Tensor, kept: Tensor) -> Tensor:
        """As `fill`, of a prompt (L, H) whose first positions, fewer than L, are `kept`; beyond the graphs' capacity it
        is all computed."""
        if len(rows) > self.capacity:
            return self.fill(rows, kv)
        self._prefill.restore(kept)
        hidden = self._prefill.run(rows[self._prefill.length :], self._prefill.length)
        copy_into_cache(self._prefill.keys_values, kv)
        return hidden


class PrefixCache:
    """Keys and values of prefixes, by `Prompt.prefix_key`. The least recently used ones go first when they take more
    than `max_bytes` of device memory (a row is 112 KiB at the released sizes). One thread at a time, as its Prefill."""

    def __init__(self, prefill: Prefill, max_bytes: int = 64 << 20) -> None:
        self.prefill, self.max_bytes = prefill, max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, rows: Tensor, prefix_rows: int, key: Hashable | None) -> Tensor:
        """As `Prefill.run` of a whole prompt (L, H) whose first `prefix_rows` (< L) rows are known by `key`. The prefix
        is always computed apart from the rest, so that the bits are the same whether it was kept or not."""
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

    def prefix(self, rows: Tensor, key: Hashable | None) -> Tensor:
        """Keys and values of the prefix rows (P, H) alone, found or made, for a caller that computes the rest by other
        means."""
        kept = self.find(key, len(rows))
        return self._make(rows, key) if kept is None else kept

    def find(self, key: Hashable | None, rows: int) -> Tensor | None:
        """What is kept under `key`. Raises PromptError where it has not `rows` rows."""
        kept = None if key is None else self._kept.get(key)
        if kept is None:
            return None
        if kept.shape[3] != rows:
            raise PromptError(
                f"prefix_key names a prefix of {kept.shape[3]} rows, this one has {rows}: keys must differ"
            )
        self._kept.move_to_end(key)
        return kept

    def forget(self, voice: Voice) -> None:
        """Lets go of the prefixes with this voice."""
        for key in [key for key in self._kept if is_of_voice(key, voice)]:
            self.nbytes -= self._kept.pop(key).nbytes

    def _make(self, rows: Tensor, key: Hashable | None) -> Tensor:
        self.prefill.run(rows)
        kept = self.prefill.keep(len(rows))
        if key is not None and kept.nbytes <= self.max_bytes:
            self._kept[key] = kept
            self.nbytes += kept.nbytes
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return kept


@torch.inference_mode()
def copy_into_cache(keys_values: Tensor, kv: Tensor) -> None:
    """Writes keys and values (2, layers, kv heads, n, head_dim) to the first n positions of the kernel's cache `kv`
    (layers, kv heads, group, slots, 2, head_dim): position p is in block p % group, slot p // group. Raises
    CapacityError."""
    group, slots, count = kv.shape[2], kv.shape[3], keys_values.shape[3]
    if count > group * slots:
        raise CapacityError(f"the cache holds {group * slots} positions, got {count}")
    whole, rest = divmod(count, group)
    target = kv.permute(4, 0, 1, 3, 2, 5)  # (2, layers, kv heads, slots, group, head_dim)
    target[:, :, :, :whole] = keys_values[:, :, :, : whole * group].unflatten(3, (whole, group))
    if rest:
        target[:, :, :, whole, :rest] = keys_values[:, :, :, count - rest :]


@torch.inference_mode()
def kept_of_cache(kv: Tensor, length: int) -> Tensor:
    """A copy of positions [0, length) of the kernel's cache; what `copy_into_cache` wrote comes back."""
    group, slots = kv.shape[2], kv.shape[3]
    if not 0 < length <= group * slots:
        raise CapacityError(f"the cache holds {group * slots} positions, {length} were asked for")
    used = kv[:, :, :, : -(-length // group)]  # (layers, kv heads, group, slots, 2, head_dim)
    in_order = used.permute(4, 0, 1, 3, 2, 5).flatten(3, 4)  # position p is in block p % group, slot p // group
    return in_order[:, :, :, :length].contiguous()
