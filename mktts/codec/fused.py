"""The streaming codec decoder with few, fused kernels: the computation of `CodecDecoder`, one launch for each layer or
part of a layer, for the next frame of many streams or the next few frames of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mktts.codec import packed
from mktts.codec.decoder import CodecDecoder, CodecState, StreamingCodec
from mktts.codec.layers import CONVNEXT_EPS, AttentionLayer, SnakeBeta
from mktts.codec.packed import UNIT, CodecWeights, CodecWork, Packed, PackedBlock, ProductTile, Rows, RowsShape
from mktts.errors import CodecError
from mktts.kernel.build import require_triton
from mktts.kernel.grid import power_of_two
from mktts.kernel.triton_kernels import compiling, launch
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

MAX_FUSED_FRAMES = 8  # in a pass over one stream
_WAVEFORM_ROWS = 16

Kernels = tuple[ModuleType, ModuleType]  # `product_kernels` and `row_kernels`


@dataclass(frozen=True)
class States:
    """The state of one stream between passes, as slot 0; for many streams `RingStates` holds the same by slot.

    histories: the memory that `moves` copies from and to, `words` values a slot. positions: decoded frames of each
    slot. keys, values: as in `row_kernels.attend`. nobody: a slot for padding, whose position never advances."""

    histories: Tensor
    words: int
    positions: Tensor
    keys: Tensor
    values: Tensor
    window: int
    nobody: int = -1


class FusedLayers:
    """The pass over the layers, the same for one stream and for many.

    Every layer with memory reads history rows, copied from the states at the start, followed by new rows. Each layer
    applies the next one's SnakeBeta to its output and writes it after the next one's history; at the end the newest
    rows are copied back. Additions, biases and activations are epilogues of matrix products."""

    def __init__(
        self, decoder: CodecDecoder, what: str, kernels: Kernels | None, dtype: torch.dtype, fast: bool = False
    ) -> None:
        """what: name for error messages. kernels: replace the Triton ones in tests. dtype: of rows, fp32, or fp16 for
        stored form. fast: use fp16 operands and sums in the waveform blocks. Raises BackendUnavailable."""
        self.config, self.books, self.device = decoder.config, decoder.books, decoder.device
        if kernels is None:
            require_triton(what, self.device)
            from mktts.codec import product_kernels, row_kernels

            kernels = product_kernels, row_kernels
        self._products, self._rows = kernels
        self._stored = dtype == torch.float16
        self._split = self._stored and not fast  # for the waveform blocks; the layers before them are always split
        # with float32 here, "fast" would be 3 dB closer to fp32 and move a third more bytes
        self._raw_dtype = torch.float16 if fast else torch.float32
        self._weights = CodecWeights.pack(decoder, fast)
        front = 2 + len(self._weights.convnexts)  # layers before the waveform blocks
        layers = enumerate(zip(decoder.layout.history, packed.rows_per_frame(decoder), strict=True))
        self._inputs = [  # of one frame
            RowsShape(past, new, channels, self._stored if index < front else self._split)
            for index, ((past, channels), new) in layers
        ]
        self._work = CodecWork(self.device, dtype)

    def _tile(self, rows: int, weight: Packed, normed: bool) -> ProductTile:
        """The tile for a product of `rows` rows with `weight`. normed: whether an RMSNorm is fused in front."""
        raise NotImplementedError

    def _pass(
        self,
        codes: Tensor,
        pcm: Tensor,
        slots: Tensor,
        states: States,
        memory: Tensor,
        inputs: list[Rows],
        table: Tensor,
    ) -> None:
        """Decodes frames of the streams in `slots` (lanes,) int32, for each as many as the first of `inputs` has new
        rows: codes (rows, 16) -> `pcm`, rows * 1920 values. memory: what `table` (see `moves`) copies to and from; it
        contains `inputs`, the inputs of every layer with memory."""
        rows, queue, first = self._rows, iter(inputs), inputs[0]
        grid, sizes = (len(table), first.lanes), {"WORDS": packed.PIECE_VALUES, "FRAMES": first.new}
        moved = states.histories, memory, table, slots, states.positions, states.nobody, states.words // UNIT
        launch(rows.move, grid, *moved, SAVE=False, **sizes)
        most = max(each.lanes * each.new * each.channels for each in inputs)
        self._work.tensor("raw", most, dtype=self._raw_dtype)  # allocated at full size, so that no block outgrows it
        self._work.rows("inner", 1, RowsShape(0, 1, most, self._split))
        x = self._transform(codes, slots, next(queue), states)
        source = self._upsample(x, queue)
        snakes, weights = self._weights.snakes, self._weights
        target = next(queue)
        self._product(source, weights.widen, snake=snakes[0], act=target)
        for block, following in zip(weights.blocks, snakes[1:], strict=True):
            target = self._block(block, target, queue, following)
        taps, channels = weights.last_taps.shape
        count = target.lanes * target.new
        launch(
            rows.waveform, (-(-count // _WAVEFORM_ROWS),),
            target.memory, weights.last_taps, weights.last_bias, pcm, count, target.new,
            target.lane // UNIT, target.plane // UNIT, SPLIT=target.split, CHANNELS=channels, TAPS=taps,
            ROWS=_WAVEFORM_ROWS, BLOCK=power_of_two(channels), enable_fp_fusion=False,
        )  # fmt: skip
        launch(rows.move, grid, *moved, SAVE=True, **sizes)

    def _transform(self, codes: Tensor, slots: Tensor, first: Rows, states: States) -> Rows:
        """Runs codebooks, the convolution before the transformer, whose input is `first`, and the transformer."""
        weights, count, width = self._weights, len(codes), self.books.shape[1]
        half = self.config.head_dim // 2
        quantized = self._fresh("quantized", first, 2 * width)
        turns = self._work.tensor("turns", count, 2, half)
        launch(
            self._rows.begin, (count,),
            codes, self.books, slots, states.positions, weights.inverse_frequency, quantized.memory, turns,
            ENTRIES=len(self.books) // NUM_CODEBOOKS, GROUPS=NUM_CODEBOOKS, WIDTH=width, HALF=half, FRAMES=first.new,
            enable_fp_fusion=False,
        )  # fmt: skip
        self._product(quantized, weights.quantizer, act=first)
        latent = self._fresh("latent", first, len(weights.entry.high))
        self._product(first, weights.entry, act=latent)
        x = self._work.tensor("x", count, len(weights.enter.high))
        self._product(latent, weights.enter, raw=x)
        for index, layer in enumerate(weights.layers):
            self._layer(index, layer, x, turns, slots, first, states)
        latent = self._fresh("latent", first, len(weights.leave.high))
        self._normed_product(x, weights.leave, first, act=latent)
        return latent

    def _layer(
        self, index: int, layer: AttentionLayer, x: Tensor, turns: Tensor, slots: Tensor, like: Rows, states: States
    ) -> None:
        """Applies one transformer layer to `x` (rows, hidden) fp32 in place; its rows belong to the lanes of `like`."""
        c, count = self.config, len(x)
        qkv = self._work.tensor("qkv", count, len(layer.qkv.high))
        attended = self._fresh("attended", like, c.num_attention_heads * c.head_dim)
        self._normed_product(x, layer.qkv, like, raw=qkv)
        launch(
            self._rows.attend, (c.num_attention_heads, count),
            qkv, turns, slots, states.positions, states.keys, states.values, attended.memory, index,
            c.num_hidden_layers, c.head_dim**-0.5, HALF=c.head_dim // 2, WINDOW=states.window,
            PLACES=power_of_two(states.window), RING=self._stored, FRAMES=like.new, NEW=power_of_two(like.new),
            enable_fp_fusion=False,
        )  # fmt: skip
        self._product(attended, layer.out, scale=layer.attention_scale, residual=x, raw=x)
        gated = self._fresh("gated", like, len(layer.gate_up.high) // 2)
        self._normed_product(x, layer.gate_up, like, swiglu=True, act=gated)
        self._product(gated, layer.down, scale=layer.mlp_scale, residual=x, raw=x)

    def _normed_product(self, x: Tensor, weight: Packed, like: Rows, **end: object) -> None:
        """Multiplies the RMSNorm of `x` (rows, width) fp32 by `weight`; its rows belong to the lanes of `like`."""
        (count, width), eps = x.shape, self.config.rms_norm_eps
        if not self._stored:
            self._product(Rows(0, count, width, False, x.view(-1)), weight, eps=eps, **end)
            return
        normed = self._fresh("normed", like, width)
        launch(
            self._rows.norm, (count,), x, normed.memory, eps,
            WIDTH=width, BLOCK=power_of_two(width), enable_fp_fusion=False,
        )  # fmt: skip
        self._product(normed, weight, **end)

    def _upsample(self, x: Rows, queue: Iterator[Rows]) -> Rows:
        """Runs the ConvNeXt stages on `x`; returns the next convolution's input, whose newest rows they write."""
        source = next(queue)
        for i, (up, block) in enumerate(self._weights.convnexts, start=1):
            taps, channels = block.taps.shape
            count = source.lanes * source.new
            raw = self._work.tensor("raw", count, channels)
            self._product(x, up, raw=raw, act=source)
            normed = self._fresh("normed rows", source, channels)
            launch(
                self._rows.depthwise_norm, (count,),
                source.memory, block.taps, block.bias, *block.norm, normed.memory, source.new, source.lane // UNIT,
                source.plane // UNIT, normed.lane // UNIT, normed.plane // UNIT, CONVNEXT_EPS,
                CHANNELS=channels, TAPS=taps, BLOCK=power_of_two(channels), enable_fp_fusion=False,
            )  # fmt: skip
            wide = self._fresh("wide", source, len(block.expand.high))
            self._product(normed, block.expand, gelu=True, act=wide)
            source = next(queue)
            last = i == len(self._weights.convnexts)
            x = source if last else self._fresh("latent rows", wide, channels)
            self._product(wide, block.shrink, scale=block.gamma, residual=raw, act=x)
        return source

    def _block(self, block: PackedBlock, source: Rows, queue: Iterator[Rows], following: SnakeBeta) -> Rows:
        """Runs one waveform block on `source`, to which its first SnakeBeta has been applied; returns the next layer's
        input, whose newest rows it writes after applying `following`."""
        target = next(queue)
        raw = self._work.tensor("raw", target.lanes * target.new, block.channels, dtype=self._raw_dtype)
        self._product(source, block.up, raw=raw, snake=block.units[0].first, act=target)
        snakes = [*(unit.first for unit in block.units[1:]), following]
        for unit, snake in zip(block.units, snakes, strict=True):
            source, target = target, next(queue)
            inner = self._fresh("inner", source, block.channels, self._split)
            self._product(source, unit.conv, snake=unit.second, act=inner)
            kept = None if snake is following else raw  # in place, since each value is read before it is written
            self._product(inner, unit.mix, residual=raw, raw=kept, snake=snake, act=target)
        return target

    def _product(self, x: Rows, weight: Packed, **end: object) -> None:
        self._products.run_product(x, weight, self._tile(x.lanes * x.new, weight, "eps" in end), **end)

    def _fresh(self, name: str, like: Rows, channels: int, split: bool = True) -> Rows:
        """Memory for as many new rows as `like` has, without history. split: both halves, if in stored form."""
        return self._work.rows(name, like.lanes, RowsShape(0, like.new, channels, split and self._stored))


class FusedCodec(FusedLayers, StreamingCodec):
    """A decoder (fp32 state) for up to MAX_FUSED_FRAMES frames of a stream at a time with fused kernels, on fp16 tensor
    cores with split operands; nearly as exact as fp32 (the signal is 88 dB above the difference to it, over 300 frames
    at full size with random weights, H200). Only packed weights stay on the device (433 MiB at full size)."""

    name = "fused"

    def __init__(self, plain: Callable[[], CodecDecoder], kernels: Kernels | None = None) -> None:
        """plain: creates the fp32 decoder, released once its weights are packed. kernels, errors: as `FusedLayers`."""
        decoder = plain()
        StreamingCodec.__init__(self, decoder.config, decoder.books, decoder.layout, decoder.device)
        if self.config.sliding_window <= MAX_FUSED_FRAMES:
            raise CodecError(f"fused kernels need a window above {MAX_FUSED_FRAMES}, got {self.config.sliding_window}")
        FusedLayers.__init__(self, decoder, "the fused codec", kernels, torch.float32)
        self._slot = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._plans = {frames: self._plan(frames) for frames in range(1, MAX_FUSED_FRAMES + 1)}

    @torch.inference_mode()
    def compile(self, sizes: Iterable[int]) -> None:
        with compiling():
            for frames in sorted(sizes, reverse=True):
                codes = torch.zeros(frames, NUM_CODEBOOKS, dtype=torch.int64, device=self.device)
                self.advance(codes, self.start())

    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        frames, c = len(codes), self.config
        if frames > MAX_FUSED_FRAMES:
            raise CodecError(f"a fused pass decodes at most {MAX_FUSED_FRAMES} frames, got {frames}")
        shapes, table = self._plans[frames]
        memory, inputs = self._work.inputs(1, shapes)
        shape = c.num_hidden_layers, c.num_attention_heads, c.sliding_window - 1 + frames, c.head_dim
        keys, values = (memory[i * math.prod(shape) :][: math.prod(shape)].view(shape) for i in (0, 1))
        states = States(state.flat.view(torch.float32), 0, state.views[-1], keys, values, c.sliding_window)
        pcm = torch.empty(frames * SAMPLES_PER_FRAME, device=self.device)
        self._pass(codes, pcm, self._slot, states, memory, inputs[-len(self._inputs) :], table)
        return pcm

    def _plan(self, frames: int) -> tuple[list[RowsShape], Tensor]:
        """The layout of a pass's memory (keys and values of each head, then the layers' rows), and its `moves`."""
        c, (keys, values, *histories) = self.config, self.layout.words()
        cache = RowsShape(c.sliding_window - 1, frames, c.head_dim, split=False)
        heads = range(c.num_hidden_layers * c.num_attention_heads)
        starts = [start + head * cache.past * cache.channels for start in (keys, values) for head in heads]
        shapes = [cache] * len(starts)
        shapes += [RowsShape(shape.past, frames * shape.new, shape.channels, split=False) for shape in self._inputs]
        return shapes, packed.moves(1, shapes, starts + histories, self.device)

    def _tile(self, rows: int, weight: Packed, normed: bool) -> ProductTile:
        return packed.few_rows_tile(rows, *weight.high.shape, weight.channels, splittable=not normed)
