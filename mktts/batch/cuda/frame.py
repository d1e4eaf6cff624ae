"""One frame of many streams: a talker step over the rows of lanes and prompts together, sixteen draws, and the codec.
Padded lanes and rows work on a slot of their own, `nobody`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.cuda.kernels import attention, draws, rows
from mktts.batch.cuda.kernels.products import CublasProducts
from mktts.batch.cuda.memory import ATTENTION_PARTS
from mktts.batch.cuda.stage import PENALTY, SETTINGS, BlockLayout, uploaded
from mktts.engine.pages import NO_OWNER, PAGE_ROWS, Copy, Pages
from mktts.errors import CapacityError
from mktts.kernel.grid import power_of_two
from mktts.kernel.rows import add_norm
from mktts.kernel.triton_kernels import launch
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.model.qwen3 import Qwen3Stack
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig, StackConfig


class PagedMemory:
    """Pages of keys and values on the device. memory: (pages, layers, kv heads, 2, 64, D). table: (slots + 1, pages a
    slot) int32. It follows the host's `Pages`, whose changes `push` queues on the current CUDA stream."""

    def __init__(self, host: Pages, talker: StackConfig, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        """host: the table's original. Raises CapacityError where the device has no memory for `pages`."""
        shape = (pages, talker.num_hidden_layers, talker.num_key_value_heads, 2, PAGE_ROWS, talker.head_dim)
        try:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            size = math.prod(shape) * dtype.itemsize
            raise CapacityError(
                f"{pages} pages of keys and values take {size / 2**30:.1f} GiB, which are not free: take fewer pages "
                "(see LaneMemory), or end what else runs on the device"
            ) from error
        self.table = torch.full(host.table.shape, NO_OWNER, dtype=torch.int32, device=device)
        self._host, self._device = host, device
        self.positions = self.table.shape[1] * PAGE_ROWS  # the most of one slot

    def push(self) -> None:
        """Queues the copies, and then the changed rows of the table."""
        copies, changed = self._host.changes()
        for wave in _waves(copies):
            table = uploaded(np.array(wave, np.int32), self._device)
            _, layers, heads, two, page_rows, width = self.memory.shape
            launch(rows.copy_rows, (len(wave), layers * heads * two), table, self.memory, D=width, PAGE=page_rows)
        if len(changed):
            columns = self.table.shape[1]
            numbers = np.concatenate((changed[:, None].astype(np.int32), self._host.table[changed]), 1)
            lines, size = uploaded(numbers, self._device), power_of_two(columns)
            launch(rows.set_table, (len(changed),), lines, self.table, columns, COLUMNS=size, num_warps=1)


def _waves(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Groups copies into waves, which each run at once: one that needs a page of another waits for the next wave."""
    waves: list[list[Copy]] = []
    written: set[int] = set()  # pages that the last wave writes
    touched: set[int] = set()  # pages that it reads or writes
    for one in copies:
        if not waves or one.source in written or one.target in touched:
            waves.append([])
            written, touched = set(), set()
        waves[-1].append(one)
        written.add(one.target)
        touched |= {one.source, one.target}
    return waves


class FrameStack(Qwen3Stack):
    """A `Qwen3Stack` with fused layers. cos, sin (positions, head_dim / 2): by which a head's halves are rotated."""

    def __init__(self, positions: int, config: StackConfig, *of: Any) -> None:
        """of: the other arguments of Qwen3Stack."""
        super().__init__(config, *of)
        for index in range(config.num_hidden_layers):
            self.layer_weights(index)
        self.cos, self.sin = (part[:, : config.head_dim // 2].contiguous() for part in self.rotary(positions))


class FrameWeights:
    """The weights that a frame reads. embeddings[g]: the rows of codebook g. heads[g]: gives the logits of codebook g,
    head 0 being the talker's. tensors: by Hub name. positions: of the longest stream."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        positions: int,
    ) -> None:
        def get(name: str) -> Tensor:
            return tensors[name].to(device, dtype)

        predictor = "talker.code_predictor."
        self.talker = FrameStack(positions, config.talker, tensors, "talker.model.", device, dtype)
        self.predictor = FrameStack(NUM_CODEBOOKS, config.predictor, tensors, f"{predictor}model.", device, dtype)
        heads = (f"{predictor}lm_head.{group}.weight" for group in range(NUM_CODEBOOKS - 1))
        self.heads = [get("talker.codec_head.weight"), *map(get, heads)]
        self.embeddings = [get(name) for name in CODE_EMBEDDINGS]
        projection = [f"{predictor}small_to_mtp_projection.{part}" for part in ("weight", "bias")]
        self.projection = tuple(map(get, projection)) if projection[0] in tensors else None
        self.eos = config.codec_ids.eos


_QUERIES = 8  # the fewest columns of a matrix product
# The same for all buckets, as they decide the order of sums. With 128 registers four programs share a multiprocessor.
_ATTENTION = {"num_warps": 4, "num_stages": 3, "maxnreg": 128}
_PLACED_HEADS = 4  # the most key-value heads of a program in `place_heads`
_PREDICTED_HEADS = 2  # and in `attend_predictor`
_OLD_POSITIONS = 4  # the predictor's attention is compiled for multiples of so many


class BatchFrame:
    """`run` makes one frame of a bucket, for the lanes and prompt rows described in `block` (words,) int64 on the
    device. space: what it works in, of `memory.space_shapes`; `made` and `pcm` hold the result until the next tick.
    slots: of `memory.slot_shapes`. padded (words,) int64: the block of a tick without lanes."""

    def __init__(
        self,
        weights: FrameWeights,
        slots: SimpleNamespace,
        pages: PagedMemory,
        layout: BlockLayout,
        block: Tensor,
        space: SimpleNamespace,
        products: CublasProducts,
        codec: CudaCodec,
    ) -> None:
        self._weights, self._slots, self._pages, self._codec = weights, slots, pages, codec
        self._products, self._nobody = products, len(slots.positions) - 1
        self.layout, self.lane_count, self.padded = layout, layout.lanes, layout.padded(self._nobody)
        self._numbers, self.space = layout.parts(block), space
        self._programs = space.part.shape[2]  # of attention, for one row and key-value head
        self.replay: Callable[[], None] | None = None  # its CUDA graph

    def run(self) -> None:
        """Queues kernels only: nothing waits for the device."""
        self._talk()
        self._predict()
        codes = self.space.made[: NUM_CODEBOOKS * self.lane_count].view(-1, NUM_CODEBOOKS)
        self.space.pcm.copy_(self._codec.decode(codes, self.space.codec_slots))

    # ---- talker

    def _talk(self) -> None:
        stack, slots, space, of = self._weights.talker, self._slots, self.space, self._numbers
        width, vocabulary = stack.config.hidden_size, slots.seen.shape[1]
        launch(rows.inputs, (len(space.x),),
            of.slots, of.fresh, of.ends, of.text, of.row_slots, of.row_positions, of.row_addresses, slots.positions,
            slots.frames, slots.ended, slots.seen, slots.embedding_sum, space.row_slot, space.row_pos, space.x, space.h,
            stack.layers[0].input_norm, stack.config.rms_norm_eps, self.lane_count, self._nobody, self._pages.positions,
            H=width, V=vocabulary, SIZE=power_of_two(vocabulary),
        )  # fmt: skip
        for index in range(stack.config.num_hidden_layers):
            self._layer(stack, index, space.x, space.h, lambda qkv, index=index: self._attend(index, qkv))
        torch.index_select(space.h, 0, of.selected, out=space.hidden)

    def _attend(self, layer: int, qkv: Tensor) -> Tensor:
        stack, space, c = self._weights.talker, self.space, self._weights.talker.config
        w = stack.layers[layer]
        table, pages = self._pages.table, self._pages.memory
        kv_heads = c.num_key_value_heads
        shape = {"HEADS": c.num_attention_heads, "KV_HEADS": kv_heads, "D": c.head_dim, "PAGE": PAGE_ROWS}
        count, stride, tile = len(qkv), table.shape[1], math.gcd(kv_heads, _PLACED_HEADS)
        launch(rows.place_heads, (count, kv_heads // tile),
            qkv, w.q_norm, w.k_norm, stack.cos, stack.sin, space.row_slot, space.row_pos,
            table, pages, space.queries, c.rms_norm_eps, stride, layer, c.num_hidden_layers, **shape, TILE=tile,
            num_warps=1,
        )  # fmt: skip
        launch(attention.attend, (kv_heads, count, self._programs),
            space.queries, space.row_slot, space.row_pos, table, pages, space.attended, space.part,
            space.bounds, stride, layer, c.num_hidden_layers, c.head_dim**-0.5, self._programs,
            **shape, PARTS=ATTENTION_PARTS, QUERIES=max(_QUERIES, power_of_two(c.num_attention_heads // kv_heads)),
            **_ATTENTION, enable_fp_fusion=False,
        )  # fmt: skip
        if self._programs > 1:
            launch(attention.combine, (count, c.num_attention_heads),
                space.row_pos, space.part, space.bounds, space.attended, HEADS=c.num_attention_heads, D=c.head_dim,
                PAGE=PAGE_ROWS, PARTS=ATTENTION_PARTS, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return space.attended

    # ---- predictor

    def _predict(self) -> None:
        weights, stack, c = self._weights, self._weights.predictor, self._weights.predictor.config
        space = self.space
        logits = self._products.linear(space.hidden, weights.heads[0])
        space.px.view(self.lane_count, 2, -1)[:, 0].copy_(space.hidden)
        self._draw(logits, 0)
        for book in range(1, NUM_CODEBOOKS):
            new = 2 if book == 1 else 1  # the first pass takes the hidden state and the embedding of code 0
            x, h = space.px[: self.lane_count * new], space.ph[: self.lane_count * new]
            if weights.projection is not None:
                x = self._products.linear(x, *weights.projection)
            if weights.projection is not None or new == 2:
                norm = stack.layers[0].input_norm
                launch(add_norm, (len(x),), x, x, norm, h, c.rms_norm_eps, N=x.shape[1], ADDS=False, num_warps=4)
            for index in range(c.num_hidden_layers):
                start = 0 if new == 2 else book
                self._layer(stack, index, x, h, lambda qkv, i=index, s=start, n=new: self._attend_few(i, qkv, s, n))
            self._draw(self._products.linear(h.view(self.lane_count, new, -1)[:, -1], weights.heads[book]), book)

    def _attend_few(self, layer: int, qkv: Tensor, start: int, new: int) -> Tensor:
        stack, c = self._weights.predictor, self._weights.predictor.config
        w = stack.layers[layer]
        out = qkv.new_empty(len(qkv), c.num_attention_heads * c.head_dim)
        tile = math.gcd(c.num_key_value_heads, _PREDICTED_HEADS)
        launch(rows.attend_predictor, (self.lane_count, c.num_key_value_heads // tile),
            qkv, w.q_norm, w.k_norm, stack.cos, stack.sin, self.space.cache[layer], out,
            c.rms_norm_eps, c.head_dim**-0.5, start, HEADS=c.num_attention_heads, KV_HEADS=c.num_key_value_heads,
            D=c.head_dim, POSITIONS=NUM_CODEBOOKS, TILE=tile, OLD=-(-start // _OLD_POSITIONS) * _OLD_POSITIONS, NEW=new,
            num_warps=1,
        )  # fmt: skip
        return out

    def _draw(self, logits: Tensor, book: int) -> None:
        weights, slots, space, first = self._weights, self._slots, self.space, book == 0
        vocabulary = logits.shape[1]
        launch(draws.draw, (self.lane_count,),
            self._numbers.slots, logits, self._numbers.settings, slots.frames, slots.ended, slots.seen, space.made,
            space.made[NUM_CODEBOOKS * self.lane_count :], space.codec_slots, weights.embeddings[book],
            slots.embedding_sum, space.px, space.ph, weights.predictor.layers[0].input_norm,
            weights.predictor.config.rms_norm_eps, book, logits.stride(0), weights.eos,
            weights.heads[0].shape[0] - SUPPRESSED_TAIL, MIN_NEW_FRAMES, self._nobody, V=vocabulary,
            SIZE=power_of_two(vocabulary), H=weights.talker.config.hidden_size, FIRST=first,
            LAST=book == NUM_CODEBOOKS - 1, NORM=weights.projection is None, SETTINGS=SETTINGS, PENALTY=PENALTY,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    # ---- what both stacks share

    def _layer(self, stack: FrameStack, index: int, x: Tensor, h: Tensor, attend: Callable[[Tensor], Tensor]) -> None:
        """x (R, H), the residual stream, is updated; h (R, H), its norm for this layer, becomes that for the next."""
        eps, last = stack.config.rms_norm_eps, index + 1 == stack.config.num_hidden_layers
        products, w = self._products, stack.layers[index]
        attended = attend(products.linear(h, w.qkv))
        products.add_norm(x, attended, w.o, w.post_norm, h, eps)
        following = stack.norm if last else stack.layers[index + 1].input_norm
        products.add_norm(x, products.gated(h, w.gate_up), w.down, following, h, eps)
