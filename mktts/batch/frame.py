"""One frame of many streams: a talker step over the rows of lanes and prompts together, then sixteen draws.

A `Frame` is one bucket, lanes x prompt rows: its tensors have that size, so that its work can be recorded as a CUDA
graph. Padded lanes and rows work on the slot that is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mktts.batch.kernels import attention, draws, rows
from mktts.batch.products import Products
from mktts.batch.slots import Slots
from mktts.batch.weights import FrameWeights, StackWeights
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL

PAGE_ROWS = 64  # positions of a page
_BUSY_PROGRAMS = 264  # with fewer, each part of attention has its own: two for each multiprocessor of a large card
_PARTS = 8  # of a row's positions at most; its length alone decides them, see mktts.batch.kernels.attention
_QUERIES = 16  # the least that a matrix product takes


class Frame:
    """`run` makes one frame for the lanes in `lanes`; see the module.

    Inputs, all on the device: lanes (B,) int32, the slot of each lane; fresh (B,) int32, 1 at a slot's first frame;
    start_rows (B,) int32, rows of a fresh lane's prompt; selected (B,) int64, the row whose hidden state counts, a
    lane's own or the last of its prompt; prompt_slot, prompt_pos (P,) int32; text (B, H), the row that is added to the
    codes' embeddings; prompt (P, H).
    """

    def __init__(
        self, weights: FrameWeights, slots: Slots, pages: Tensor, lanes: int, prompt_rows: int, products: Products
    ) -> None:
        self._products = products
        self._weights, self._slots, self._pages = weights, slots, pages
        self.lane_count, self.prompt_rows = lanes, prompt_rows
        talker, predictor = weights.talker.config, weights.predictor.config
        device, dtype = weights.talker.norm.device, weights.talker.norm.dtype
        count = lanes + prompt_rows

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.lanes = torch.full((lanes,), slots.nobody, dtype=torch.int32, device=device)
        self.fresh = torch.ones(lanes, dtype=torch.int32, device=device)
        self.start_rows = empty(lanes, dtype=torch.int32)
        self.selected = torch.arange(lanes, device=device)
        self.row_slot = torch.full((count,), slots.nobody, dtype=torch.int32, device=device)
        self.row_pos = empty(count, dtype=torch.int32)
        self.text = empty(lanes, talker.hidden_size)
        self.prompt = empty(prompt_rows, talker.hidden_size)
        self.prompt_slot, self.prompt_pos = self.row_slot[lanes:], self.row_pos[lanes:]
        self._x, self._h = empty(count, talker.hidden_size), empty(count, talker.hidden_size)
        width = talker.num_attention_heads * talker.head_dim
        self._queries, self._attended = empty(count, width), empty(count, width)
        self._programs = _PARTS if lanes * talker.num_key_value_heads < _BUSY_PROGRAMS else 1
        heads = (count if self._programs > 1 else 1, talker.num_attention_heads, _PARTS)
        self._part = empty(*heads, talker.head_dim, dtype=torch.float32)
        self._bounds = empty(*heads, 2, dtype=torch.float32)
        self._hidden = empty(lanes, talker.hidden_size)
        self._px, self._ph = empty(2 * lanes, talker.hidden_size), empty(2 * lanes, predictor.hidden_size)
        kv = (lanes, predictor.num_key_value_heads, 2, NUM_CODEBOOKS, predictor.head_dim)
        self._cache = empty(predictor.num_hidden_layers, *kv)

    def run(self) -> None:
        """Codes go to `Slots.codes`. Queues kernels only: nothing waits for the device."""
        self._talk()
        self._predict()

    # ---- talker

    def _talk(self) -> None:
        stack, slots, eps = self._weights.talker, self._slots, self._weights.talker.config.rms_norm_eps
        width = stack.config.hidden_size
        draws.next_input[(self.lane_count,)](
            self.lanes, self.fresh, self.start_rows, slots.positions, slots.frames, slots.seen, self.row_slot,
            self.row_pos, slots.nobody, slots.embedding_sum, self.text, self._x, self._h, stack.input_norm[0], eps,
            H=width, V=slots.seen.shape[1], SIZE=_power_of_two(slots.seen.shape[1]),
        )  # fmt: skip
        if self.prompt_rows:
            x, h = self._x[self.lane_count :], self._h[self.lane_count :]
            x.copy_(self.prompt)
            self._normed(x, stack.input_norm[0], h, eps)
        for index in range(stack.config.num_hidden_layers):
            self._layer(stack, index, self._x, self._h, lambda qkv, index=index: self._attend(index, qkv))
        torch.index_select(self._h, 0, self.selected, out=self._hidden)

    def _attend(self, layer: int, qkv: Tensor) -> Tensor:
        stack, slots, c = self._weights.talker, self._slots, self._weights.talker.config
        shape = {"HEADS": c.num_attention_heads, "KV_HEADS": c.num_key_value_heads, "D": c.head_dim, "PAGE": PAGE_ROWS}
        count, stride = len(qkv), slots.table.shape[1]
        rows.place_heads[(count, c.num_key_value_heads)](
            qkv, stack.q_norm[layer], stack.k_norm[layer], stack.cos, stack.sin, self.row_slot, self.row_pos,
            slots.table, self._pages, self._queries, c.rms_norm_eps, stride, layer, c.num_hidden_layers,
            **shape, num_warps=1,
        )  # fmt: skip
        attention.attend[(count, c.num_key_value_heads, self._programs)](
            self._queries, self.row_slot, self.row_pos, slots.table, self._pages, self._attended, self._part,
            self._bounds, stride, layer, c.num_hidden_layers, c.head_dim**-0.5, self._programs,
            **shape, PARTS=_PARTS, QUERIES=_QUERIES, num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        if self._programs > 1:
            attention.combine[(count, c.num_attention_heads)](
                self.row_pos, self._part, self._bounds, self._attended, HEADS=c.num_attention_heads, D=c.head_dim,
                PAGE=PAGE_ROWS, PARTS=_PARTS, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return self._attended

    # ---- predictor

    def _predict(self) -> None:
        weights, stack, c = self._weights, self._weights.predictor, self._weights.predictor.config
        logits = self._products.linear(self._hidden, weights.heads[0])
        self._px.view(self.lane_count, 2, -1)[:, 0].copy_(self._hidden)
        self._draw(logits, 0)
        for book in range(1, NUM_CODEBOOKS):
            new = 2 if book == 1 else 1  # the first pass takes the hidden state and the embedding of code 0
            x, h = self._px[: self.lane_count * new], self._ph[: self.lane_count * new]
            if weights.projection is not None:
                x = self._products.linear(x, *weights.projection)
            if weights.projection is not None or new == 2:
                self._normed(x, stack.input_norm[0], h, c.rms_norm_eps)
            for index in range(c.num_hidden_layers):
                start = 0 if new == 2 else book
                self._layer(stack, index, x, h, lambda qkv, i=index, s=start, n=new: self._attend_few(i, qkv, s, n))
            self._draw(self._products.linear(h.view(self.lane_count, new, -1)[:, -1], weights.heads[book]), book)

    def _attend_few(self, layer: int, qkv: Tensor, start: int, new: int) -> Tensor:
        stack, c = self._weights.predictor, self._weights.predictor.config
        out = qkv.new_empty(len(qkv), c.num_attention_heads * c.head_dim)
        rows.attend_predictor[(self.lane_count, c.num_key_value_heads)](
            qkv, stack.q_norm[layer], stack.k_norm[layer], stack.cos, stack.sin, self._cache[layer], out,
            c.rms_norm_eps, c.head_dim**-0.5, start, HEADS=c.num_attention_heads, KV_HEADS=c.num_key_value_heads,
            D=c.head_dim, POSITIONS=NUM_CODEBOOKS, NEW=new, num_warps=1,
        )  # fmt: skip
        return out

    def _draw(self, logits: Tensor, book: int) -> None:
        weights, slots, first = self._weights, self._slots, book == 0
        which, vocabulary = 0 if first else 1, logits.shape[1]
        draws.draw[(self.lane_count,)](
            self.lanes, logits, slots.seeds, slots.frames, slots.greedy[which], slots.temperature[which],
            slots.top_k[which], slots.top_p[which], slots.penalty, slots.seen, slots.codes, weights.embeddings[book],
            slots.embedding_sum, self._px, self._ph, weights.predictor.input_norm[0],
            weights.predictor.config.rms_norm_eps, book, logits.stride(0), weights.eos,
            weights.heads[0].shape[0] - SUPPRESSED_TAIL, MIN_NEW_FRAMES, V=vocabulary, SIZE=_power_of_two(vocabulary),
            H=weights.talker.config.hidden_size, FIRST=first, LAST=book == NUM_CODEBOOKS - 1,
            NORM=weights.projection is None, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    # ---- what both stacks share

    def _layer(self, stack: StackWeights, index: int, x: Tensor, h: Tensor, attend: Callable[[Tensor], Tensor]) -> None:
        """x (R, H), the residual stream, is updated; h (R, H), its norm for this layer, becomes that for the next."""
        eps, last = stack.config.rms_norm_eps, index + 1 == stack.config.num_hidden_layers
        products = self._products
        attended = attend(products.linear(h, stack.qkv[index]))
        products.add_norm(x, attended, stack.o[index], stack.post_norm[index], h, eps)
        following = stack.norm if last else stack.input_norm[index + 1]
        products.add_norm(x, products.gated(h, stack.gate_up[index]), stack.down[index], following, h, eps)

    def _normed(self, x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
        rows.add_norm[(len(x),)](x, x, weight, out, eps, N=x.shape[1], ADDS=False, num_warps=4)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
