"""Runs many prompt rows at once through a decoder stack: one launch of a captured CUDA graph for each piece.

Graphs have fixed shapes, so rows are padded to a bucket and keys are read up to an extent, both static; the position
is a device tensor. Rounding is that of `Qwen3Stack.advance`, with q, k, v and gate, up as one product each. Between
products, Triton kernels of this project are used where they fit, and PyTorch operators elsewhere. A few rows can
instead be computed directly from the frame kernel's tape (`TapeStack.run_few`)."""

import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mktts.errors import BackendUnavailable, CapacityError
from mktts.kernel.build import require_triton
from mktts.kernel.tape import MOST_POSITIONS, ROWS, TapeStack
from mktts.model.cuda_graph import record
from mktts.model.prompt import is_of_voice
from mktts.model.qwen3 import Qwen3Stack, Stack, rms_norm, rotate
from mktts.model.voice import Voice
from mktts.spec import StackConfig

_SILU_BLOCK = 1024
_HEADS = 4  # most key-value heads of one program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the kernels compute in fp32


def row_kernels(config: StackConfig, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Returns `mktts.kernel.rows` if its kernels support the stack: on CUDA, in fp32 or less, with widths that are
    powers of two; otherwise None, with a warning if triton is missing or cannot build them."""
    widths = (config.hidden_size, config.head_dim)
    if device.type != "cuda" or dtype not in _DTYPES or any(width.bit_count() != 1 for width in widths):
        return None
    try:
        require_triton("prefill", device)
    except BackendUnavailable as reason:
        logging.getLogger(__name__).warning("prompt rows take plain operators: %s", reason)
        return None
    from mktts.kernel import rows

    return rows


CAPACITY = 1024  # positions; a multiple of 16, because attention kernels otherwise copy the mask
# Up to 64 rows, a product takes as long as reading its weights, so finer buckets would only add graphs.
ROW_BUCKETS = (16, 64, 128, 256)
# Keys and values of 1,024 positions are 4 MiB a layer, an eighth of a layer's weights at 0.6B, so their size hardly
# matters. But a masked attention kernel iterates over its whole extent, which takes time when rows are few.
EXTENTS = (128, 512, CAPACITY)
_MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # flash has no masks; cuDNN plans every shape


class Prefill:
    """Prefills prompts into caches in the layout of csrc/state.cuh: (layers, kv heads, group, slots, 2, head_dim); up
    to CAPACITY positions, through a workspace of 112 KiB a position at the released sizes. The stack must not change
    afterwards. One thread and one CUDA stream at a time.

    Keys and values of prefixes are cached by `Prompt.prefix_key`; the least recently used ones are dropped when they
    take more than `max_bytes` of device memory."""

    capacity, max_bytes = CAPACITY, 64 << 20

    def __init__(self, stack: Stack) -> None:
        """A TapeStack computes passes of up to ROWS rows within MOST_POSITIONS positions without unpacking."""
        c, self.stack, self._few = stack.config, stack, isinstance(stack, TapeStack)
        shape = (2, c.num_hidden_layers, c.num_key_value_heads, CAPACITY + 1, c.head_dim)  # the last row is for padding
        self._kv = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self.device = self._kv.device
        self.graphs = self.device.type == "cuda"
        self._there = torch.cuda.device(self.device) if self.graphs else contextlib.nullcontext()
        self.length = 0  # number of filled positions
        self._input = torch.zeros(ROW_BUCKETS[-1], c.hidden_size, dtype=stack.dtype, device=self.device)
        self._hidden = torch.zeros(c.hidden_size, dtype=stack.dtype, device=self.device)
        self._past, self._end = torch.zeros(2, dtype=torch.int64, device=self.device).unbind()
        self._counts = torch.arange(CAPACITY, device=self.device)
        cos, sin = stack.rotary(CAPACITY + 1)
        half = c.head_dim // 2
        self._rotary = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), -1)), 1)  # (positions, 2, head_dim)
        self._cos, self._sin = self._rotary[:, 0], self._rotary[:, 1, half:]
        self._kernels = row_kernels(c, self.device, stack.dtype)
        for layer in range(c.num_hidden_layers):
            stack.layer_weights(layer)  # fuses the weights here, because a pass may run on another CUDA stream
        self._passes: dict[tuple[int, int], Callable[[], None]] = {}
        self._prefixes: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.prefix_bytes = 0  # total of the cached prefixes
        if self.graphs:
            self._side, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        self.warm_up()  # capturing a graph while a stream waits would delay it by tens of ms

    @property
    def keys_values(self) -> Tensor:
        """Keys (rotated) and values of the filled positions, (2, layers, kv heads, length, head_dim): a view, valid
        until the next call."""
        return self._kv[:, :, :, : self.length]

    @torch.inference_mode()
    def run(self, rows: Tensor, past: int = 0) -> Tensor:
        """Prefills `rows` (L, H) after the first `past` positions, up to the capacity; returns the normed hidden state
        (H,) of the last row, without waiting. A restored prefix gives the same bits as one just computed."""
        with self._there:
            for piece in rows.split(ROW_BUCKETS[-1]):
                self._advance(piece, past)
                past += len(piece)
        self.length = past
        return self._hidden.clone()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every graph that a prompt can need."""
        with self._there:
            self._past.fill_(0)
            self._end.fill_(1)
            # The largest first, so that the others fit into its working memory.
            for bucket, least in zip(ROW_BUCKETS[::-1], (*ROW_BUCKETS[-2::-1], 0), strict=True):
                for extent in self._extents_of(bucket)[::-1]:
                    if extent > least:  # otherwise the rows fit into a smaller bucket
                        self._pass(bucket, extent)

    def forget(self, voice: Voice) -> None:
        """Drops the cached prefixes with this voice."""
        for key in [key for key in self._prefixes if is_of_voice(key, voice)]:
            self.prefix_bytes -= self._prefixes.pop(key).nbytes

    @torch.inference_mode()
    def fill(self, rows: Tensor, kv: Tensor, prefix_rows: int = 0, key: Hashable | None = None) -> Tensor:
        """Prefills a prompt (L, H), whose first `prefix_rows`, fewer than L, are identified by `key`; returns the
        normed hidden state (H,) of its last row. The prefix is always computed separately, so that the bits do not
        depend on whether it was cached. Raises CapacityError as `go_on`."""
        apart = prefix_rows and len(rows) <= CAPACITY
        return self.go_on(rows, kv, self.prefix(rows[:prefix_rows], key) if apart else None)

    @torch.inference_mode()
    def go_on(self, rows: Tensor, kv: Tensor, kept: Tensor | None) -> Tensor:
        """As `fill`, for a prompt (L, H) whose first positions, fewer than L, have the keys and values `kept`. A prompt
        longer than the graphs' capacity is computed as a whole in eager PyTorch if the stack is a Qwen3Stack, which has
        plain matrices; otherwise raises CapacityError."""
        if len(rows) > CAPACITY:
            if not isinstance(self.stack, Qwen3Stack):
                why = f"a prompt may have {CAPACITY} rows with the megakernel, this one has {len(rows)}"
                parts = "(instruction, reference recording and its transcript, text)"
                raise CapacityError(f"{why}: shorten it {parts}, or pass backend='torch'")
            cache = self.stack.new_cache(len(rows))
            hidden = self.stack.advance(rows, [cache], [len(rows)])[-1]
            copy_into_cache(cache.memory[:, :, 0].transpose(0, 1), kv)
            return hidden
        past = 0 if kept is None else kept.shape[3]
        if past:
            self._kv[:, :, :, :past].copy_(kept)
        hidden = self.run(rows[past:], past)
        copy_into_cache(self.keys_values, kv)
        return hidden

    @torch.inference_mode()
    def prefix(self, rows: Tensor, key: Hashable | None) -> Tensor:
        """Keys and values of the prefix rows (P, H), shaped as `keys_values`: cached under `key`, or computed."""
        kept = None if key is None else self._prefixes.get(key)
        if kept is not None:
            self._prefixes.move_to_end(key)
            return kept
        self.run(rows)
        kept = self.keys_values.clone()
        if key is not None and kept.nbytes <= self.max_bytes:
            self._prefixes[key] = kept
            self.prefix_bytes += kept.nbytes
            while self.prefix_bytes > self.max_bytes:
                self.prefix_bytes -= self._prefixes.popitem(last=False)[1].nbytes
        return kept

    def _advance(self, rows: Tensor, past: int) -> None:
        end = past + len(rows)
        bucket = next(b for b in ROW_BUCKETS if b >= len(rows))
        extent = next(e for e in self._extents_of(bucket) if e >= end)
        self._past.fill_(past)
        self._end.fill_(end)
        if not self._takes(bucket, extent):
            # Masked positions are multiplied by zero, but NaN or infinity from an earlier prompt would survive that.
            self._kv[:, :, :, end:extent].zero_()
        run = self._pass(bucket, extent)  # before copying the rows: a capture runs once, and may change them in place
        self._input[: len(rows)].copy_(rows)
        run()

    def _takes(self, bucket: int, extent: int) -> bool:
        return self._few and bucket <= ROWS and extent <= MOST_POSITIONS

    def _extents_of(self, bucket: int) -> tuple[int, ...]:
        """The extents for which graphs are needed: `run_few`, which reads only filled positions, needs just one."""
        taken = [extent for extent in EXTENTS if self._takes(bucket, extent)]
        return EXTENTS[max(0, len(taken) - 1) :]

    def _pass(self, bucket: int, extent: int) -> Callable[[], None]:
        if (bucket, extent) not in self._passes:
            work = partial(self._forward, bucket, extent)
            self._passes[bucket, extent] = record(work, self._pool, self._side).replay if self.graphs else work
        return self._passes[bucket, extent]

    def _forward(self, bucket: int, extent: int) -> None:
        """Computes from static inputs to static outputs; the position is read on the device."""
        last = (self._end - self._past - 1)[None]
        if self._takes(bucket, extent):
            self.stack.run_few(self._input[:ROWS], self._past, self._end, self._kv, self._rotary)
            row = self._input.index_select(0, last)[0]
            self._hidden.copy_(rms_norm(row, self.stack.norm, self.stack.config.rms_norm_eps))
            return
        positions = self._past + self._counts[:bucket]
        index = positions.masked_fill(positions >= self._end, CAPACITY)  # padding is written to the spare row
        mask = torch.zeros(1, 1, bucket, extent, dtype=self._kv.dtype, device=self.device)
        mask.masked_fill_(self._counts[:extent] > positions[:, None], -torch.inf)
        x = self._input[:bucket]
        backends = sdpa_kernel(_MASKED_BACKENDS) if self.device.type == "cuda" else contextlib.nullcontext()
        with backends:
            rows = self._layers(x, index, mask)
        self._hidden.copy_(rows.index_select(0, last)[0])

    def _layers(self, rows: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        """rows (R, H) at positions index (R,) int64 -> their hidden states (R, H) after the final norm, rounded as in
        `Qwen3Stack.layer`. mask: added to the scores, (1, 1, R, extent) in the stack's dtype."""
        stack, layers = self.stack, self.stack.config.num_hidden_layers
        x, normed = rows.clone(), torch.empty_like(rows)
        w = stack.layer_weights(0)
        self._add_norm(x, None, w.input_norm, normed)
        for layer, (keys, values) in enumerate(self._kv.unbind(1), 1):
            q = self._turned(F.linear(normed, w.qkv), w.q_norm, w.k_norm, index, keys, values)
            # expanded to the query heads that share them, without copying
            k, v = (part[:, None, : mask.shape[-1]].expand(-1, q.shape[1], -1, -1) for part in (keys, values))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(2, 0, 1, 3).flatten(1)
            self._add_norm(x, F.linear(attended, w.o), w.post_norm, normed)
            delta = F.linear(self._gated(F.linear(normed, w.gate_up)), w.down)
            if layer < layers:
                w = stack.layer_weights(layer)  # may overwrite the matrices, whose products have all been queued
            self._add_norm(x, delta, w.input_norm if layer < layers else stack.norm, normed)
        return normed

    def _add_norm(self, x: Tensor, delta: Tensor | None, norm: Tensor, out: Tensor) -> None:
        """x (R, H) += delta (R, H) unless it is None, then out (R, H) = RMSNorm(x) * norm (H,)."""
        adds, eps = delta is not None, self.stack.config.rms_norm_eps
        if self._kernels is not None:
            self._kernels.add_norm[(len(x),)](
                x, delta if adds else x, norm, out, eps, N=x.shape[1], ADDS=adds, num_warps=4
            )  # fmt: skip
            return
        if adds:
            x += delta
        out.copy_(rms_norm(x, norm, eps))

    def _gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up (R, I) of gate_up (R, 2 I)."""
        gate, up = gate_up.chunk(2, 1)
        if self._kernels is None:
            return F.silu(gate) * up
        out = gate_up.new_empty(gate.shape)
        grid = len(out), -(-out.shape[1] // _SILU_BLOCK)
        self._kernels.silu_mul[grid](gate_up, out, N=out.shape[1], BLOCK=_SILU_BLOCK)
        return out

    def _turned(
        self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, index: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """qkv (R, (heads + 2 kv heads) head_dim) -> queries (kv heads, queries of each, R, head_dim); caches k, v."""
        c, rows = self.stack.config, len(qkv)
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        if self._kernels is not None:
            tile = math.gcd(kv_heads, _HEADS)
            q = qkv.new_empty(kv_heads, heads // kv_heads, rows, c.head_dim)
            turns = self._cos, self._sin, self._cos.stride(0)
            self._kernels.turn_heads[rows, kv_heads // tile](
                qkv, q_norm, k_norm, *turns, index, q, keys, values, c.rms_norm_eps, len(self._cos),
                HEADS=heads, KV_HEADS=kv_heads, D=c.head_dim, TILE=tile, num_warps=1,
            )  # fmt: skip
            return q
        q, k, v = qkv.view(rows, -1, c.head_dim).transpose(0, 1).split((heads, kv_heads, kv_heads))
        turns = self._cos[index], self._sin[index].repeat(1, 2)
        keys.index_copy_(1, index, rotate(rms_norm(k, k_norm, c.rms_norm_eps), *turns))
        values.index_copy_(1, index, v)
        return rotate(rms_norm(q, q_norm, c.rms_norm_eps), *turns).unflatten(0, (kv_heads, -1))


@torch.inference_mode()
def copy_into_cache(keys_values: Tensor, kv: Tensor) -> None:
    """Copies keys and values (2, layers, kv heads, n, head_dim) to the first n positions of the kernel's cache `kv`
    (layers, kv heads, group, slots, 2, head_dim), where position p is in block p % group, slot p // group."""
    group, count = kv.shape[2], keys_values.shape[3]
    whole, rest = divmod(count, group)
    target = kv.permute(4, 0, 1, 3, 2, 5)  # (2, layers, kv heads, slots, group, head_dim)
    target[:, :, :, :whole] = keys_values[:, :, :, : whole * group].unflatten(3, (whole, group))
    if rest:
        target[:, :, :, whole, :rest] = keys_values[:, :, :, count - rest :]


@torch.inference_mode()
def kept_of_cache(kv: Tensor, length: int) -> Tensor:
    """A copy of positions [0, length) of the kernel's cache: the inverse of `copy_into_cache`."""
    in_order = kv[:, :, :, : -(-length // kv.shape[2])].permute(4, 0, 1, 3, 2, 5).flatten(3, 4)
    return in_order[:, :, :, :length].contiguous()
