"""One codec frame of many streams at once on a CUDA device: rows of all lanes in one product, states by slot. A lane's
samples and state depend on its codes and its state alone, bit for bit: every sum has one order."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from mktts.batch.cuda.kernels import compiling, launch
from mktts.batch.cuda.memory import PIECE_VALUES, UNIT, CodecWork, RingStates, Rows, RowsShape
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.layers import CONVNEXT_EPS, AttentionLayer, SnakeBeta
from mktts.codec.packed import CodecWeights, Packed, PackedBlock, Precision, rows_per_frame
from mktts.errors import CodecError
from mktts.kernel.build import require_triton
from mktts.kernel.grid import power_of_two
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

LANES_AT_A_TIME = 512  # of one pass: with more, its memory (4.3 GB in full precision at full size) would only grow
_FAST_SUMS = torch.float16  # of residual units: with float32, "fast" is 3 dB closer to fp32 and moves a third more
_WAVEFORM_ROWS = 16
_THREADS = 8  # that compile


class CudaCodec:
    """Codec states by slot, and `decode`, the next frame of many of them. One thread and one CUDA stream at a time.
    "full" precision takes split operands everywhere and fp32 keys and values; "fast" takes fp16 operands in the
    waveform blocks, and fp16 keys, values and residual sums."""

    def __init__(
        self,
        plain: Callable[[], CodecDecoder],
        slots: int,
        precision: Precision,
        kernels: tuple[ModuleType, ModuleType] | None = None,
    ) -> None:
        """plain: makes the fp32 decoder whose weights are packed, on the device; it is let go. slots: the last one is
        nobody's, for padded lanes. kernels: in place of `codec_products` and `codec_rows`, for tests. Raises
        BackendUnavailable where the kernels cannot run."""
        decoder, fast = plain(), precision == "fast"
        self.name = "fused-fast" if fast else "fused"
        self.config, self.device, self._books = decoder.config, decoder.device, decoder.books
        if kernels is None:
            require_triton("the batched codec", self.device)
            from mktts.batch.cuda.kernels import codec_products, codec_rows

            kernels = codec_products, codec_rows
        self._products, self._rows = kernels
        self._split, self._raw_dtype = not fast, _FAST_SUMS if fast else torch.float32
        self._weights = _prepared(CodecWeights.pack(decoder, fast))
        front = 2 + len(self._weights.convnexts)  # layers before the waveform blocks: theirs is always split
        self._inputs = [
            RowsShape(past, new, channels, split=index < front or not fast)
            for index, ((past, channels), new) in enumerate(
                zip(decoder.layout.history, rows_per_frame(decoder), strict=True)
            )
        ]
        cached = torch.float16 if fast else torch.float32
        self._states = RingStates(slots, decoder.layout, self._inputs, cached, self.device)
        self._work = CodecWork(self.device)
        self._pieces: dict[int, Tensor] = {}

    @torch.inference_mode()
    def enter(self, slot: int, primed: CodecState | None) -> None:
        """`slot` begins with silence, or goes on from `primed`, a state of the plain or the fused decoder, copied, on
        the current CUDA stream. Raises CodecError for a slot that does not exist or is nobody's, and for a state of
        another decoder."""
        self._states.enter(slot, primed)

    @torch.inference_mode()
    def silence(self, slots: Tensor) -> None:
        """Sets many slots (n,) int64, on the device, to silence, as `enter` with None does for one."""
        self._states.silence(slots)

    @torch.inference_mode()
    def compile(self, counts: Iterable[int]) -> None:
        """Compiles the kernels of `decode` for these numbers of lanes, side by side, and takes its working memory. Runs
        nothing."""
        with compiling(_THREADS):
            for count in sorted(counts, reverse=True):
                nobody = torch.full((count,), self._states.nobody, dtype=torch.int32, device=self.device)
                self.decode(nobody.new_zeros(count, NUM_CODEBOOKS), nobody)

    @torch.inference_mode()
    def decode(self, codes: Tensor, lanes: Tensor) -> Tensor:
        """The next frame of each lane's slot: codes (B, 16) int32, lanes (B,) int32, the slots -> PCM (B, 1920) float32
        in [-1, 1], all on the device. Codes that are no entry of their book (end of speech) give sound that means
        nothing.

        Queues kernels only, so that a CUDA graph can hold it, once the same number of lanes was decoded. Raises
        CodecError for other shapes and dtypes.
        """
        if codes.shape != (len(lanes), NUM_CODEBOOKS) or {codes.dtype, lanes.dtype} != {torch.int32}:
            raise CodecError(
                f"codes must be (lanes, {NUM_CODEBOOKS}) int32 and lanes (lanes,) int32, got {tuple(codes.shape)} "
                f"{codes.dtype} and {tuple(lanes.shape)} {lanes.dtype}"
            )
        codes, lanes = codes.contiguous(), lanes.contiguous()
        pcm = torch.empty(len(lanes), SAMPLES_PER_FRAME, device=self.device)
        for start in range(0, len(lanes), LANES_AT_A_TIME):
            some = slice(start, start + LANES_AT_A_TIME)
            self._pass(codes[some], lanes[some], pcm[some])
        return pcm

    def _pass(self, codes: Tensor, lanes: Tensor, pcm: Tensor) -> None:
        count, rows, states = len(lanes), self._rows, self._states
        memory, inputs = self._work.inputs(count, self._inputs)
        if count not in self._pieces:
            self._pieces[count] = states.pieces(count)
        pieces = self._pieces[count]
        grid = len(pieces), count
        moved = memory, pieces, lanes, states.positions, states.nobody, states.words // UNIT
        launch(rows.move, grid, states.histories, *moved, SAVE=False, WORDS=PIECE_VALUES)
        queue = iter(inputs)
        x = self._transform(codes, lanes, next(queue))
        source = self._upsample(x, queue)
        snakes, weights = self._weights.snakes, self._weights
        target = next(queue)
        self._product(source, weights.widen, snake=snakes[0], act=target)
        for block, following in zip(weights.blocks, snakes[1:], strict=True):
            target = self._block(block, target, queue, following)
        taps, channels = weights.last_taps.shape
        launch(
            rows.waveform, (-(-count * target.new // _WAVEFORM_ROWS),),
            target.memory, weights.last_taps, weights.last_bias, pcm, count * target.new, target.new,
            target.lane // UNIT, target.plane // UNIT, SPLIT=target.split, CHANNELS=channels, TAPS=taps,
            ROWS=_WAVEFORM_ROWS, BLOCK=power_of_two(channels), enable_fp_fusion=False,
        )  # fmt: skip
        launch(rows.move, grid, states.histories, *moved, SAVE=True, WORDS=PIECE_VALUES)

    def _transform(self, codes: Tensor, lanes: Tensor, first: Rows) -> Rows:
        """The codebooks, the convolution before the transformer, whose input is `first`, and the transformer."""
        weights, count, width = self._weights, len(lanes), self._books.shape[1]
        half = self.config.head_dim // 2
        quantized = self._fresh("quantized", count, 1, 2 * width)
        turns = self._work.tensor("turns", count, 2, half)
        launch(
            self._rows.begin, (count,),
            codes, self._books, lanes, self._states.positions, weights.inverse_frequency, quantized.memory, turns,
            ENTRIES=len(self._books) // NUM_CODEBOOKS, GROUPS=NUM_CODEBOOKS, WIDTH=width, HALF=half,
            enable_fp_fusion=False,
        )  # fmt: skip
        self._product(quantized, weights.quantizer, act=first)
        latent = self._fresh("latent", count, 1, len(weights.entry.high))
        self._product(first, weights.entry, act=latent)
        x = self._work.tensor("x", count, len(weights.enter.high))
        self._product(latent, weights.enter, raw=x)
        for index, layer in enumerate(weights.layers):
            self._layer(index, layer, x, turns, lanes)
        latent = self._fresh("latent", count, 1, len(weights.leave.high))
        self._product(self._normed(x), weights.leave, act=latent)
        return latent

    def _layer(self, index: int, layer: AttentionLayer, x: Tensor, turns: Tensor, lanes: Tensor) -> None:
        """`x` (lanes, hidden) fp32, in place."""
        c, states, count = self.config, self._states, len(lanes)
        qkv = self._work.tensor("qkv", count, len(layer.qkv.high))
        attended = self._fresh("attended", count, 1, c.num_attention_heads * c.head_dim)
        self._product(self._normed(x), layer.qkv, raw=qkv)
        launch(
            self._rows.attend, (c.num_attention_heads, count),
            qkv, turns, lanes, states.positions, states.keys, states.values, attended.memory, index,
            c.num_hidden_layers, c.head_dim**-0.5, HALF=c.head_dim // 2, WINDOW=states.window,
            PLACES=power_of_two(states.window), enable_fp_fusion=False,
        )  # fmt: skip
        self._product(attended, layer.out, scale=layer.attention_scale, residual=x, raw=x)
        gated = self._fresh("gated", count, 1, len(layer.gate_up.high) // 2)
        self._product(self._normed(x), layer.gate_up, swiglu=True, act=gated)
        self._product(gated, layer.down, scale=layer.mlp_scale, residual=x, raw=x)

    def _normed(self, x: Tensor) -> Rows:
        count, width = x.shape
        normed = self._fresh("normed", count, 1, width)
        launch(
            self._rows.norm, (count,), x, normed.memory, self.config.rms_norm_eps,
            WIDTH=width, BLOCK=power_of_two(width), enable_fp_fusion=False,
        )  # fmt: skip
        return normed

    def _upsample(self, x: Rows, queue: Iterator[Rows]) -> Rows:
        """The ConvNeXt stages behind `x`: the input of the convolution behind them, whose newest rows they fill."""
        source = next(queue)
        for i, (up, block) in enumerate(self._weights.convnexts, start=1):
            count, (taps, channels) = len(x.memory) // x.lane, block.taps.shape
            new = source.new
            raw = self._work.tensor("raw", count * new, channels)
            self._product(x, up, raw=raw, act=source)
            normed = self._fresh("normed rows", count, new, channels)
            launch(
                self._rows.depthwise_norm, (count * new,),
                source.memory, block.taps, block.bias, *block.norm, normed.memory, new, source.lane // UNIT,
                source.plane // UNIT, normed.lane // UNIT, normed.plane // UNIT, CONVNEXT_EPS,
                CHANNELS=channels, TAPS=taps, BLOCK=power_of_two(channels), enable_fp_fusion=False,
            )  # fmt: skip
            wide = self._fresh("wide", count, new, len(block.expand.high))
            self._product(normed, block.expand, gelu=True, act=wide)
            source = next(queue)
            last = i == len(self._weights.convnexts)
            x = source if last else self._fresh("latent rows", count, new, channels)
            self._product(wide, block.shrink, scale=block.gamma, residual=raw, act=x)
        return source

    def _block(self, block: PackedBlock, source: Rows, queue: Iterator[Rows], following: SnakeBeta) -> Rows:
        """One waveform block behind `source`, which is through its SnakeBeta already: the input of the layer behind it,
        whose newest rows it fills through `following`."""
        count, target = len(source.memory) // source.lane, next(queue)
        new = target.new
        raw = self._work.tensor("raw", count * new, block.channels, dtype=self._raw_dtype, least=count * self._widest)
        self._product(source, block.up, raw=raw, snake=block.units[0].first, act=target)
        snakes = [*(unit.first for unit in block.units[1:]), following]
        for unit, snake in zip(block.units, snakes, strict=True):
            source, target = target, next(queue)
            inner = self._fresh("inner", count, new, block.channels, self._split, least=self._widest)
            self._product(source, unit.conv, snake=unit.second, act=inner)
            kept = None if snake is following else raw  # in place: each value is read before it is written
            self._product(inner, unit.mix, residual=raw, raw=kept, snake=snake, act=target)
        return target

    @property
    def _widest(self) -> int:
        """Values of the widest layer's rows of one lane."""
        return max(shape.new * shape.channels for shape in self._inputs)

    def _product(self, x: Rows, weight: Packed, **end: object) -> None:
        self._products.run_product(x, weight, len(x.memory) // x.lane, **end)

    def _fresh(self, name: str, lanes: int, new: int, channels: int, split: bool = True, least: int = 0) -> Rows:
        """Memory for rows without older ones. least: values of a lane, as of `CodecWork.tensor`."""
        shape = RowsShape(0, new, channels, split)
        return self._work.rows(name, lanes, shape, lanes * least * shape.planes)


def _prepared(weights: CodecWeights) -> CodecWeights:
    """Converts the sines' frequencies to half turns, which the batched products take."""

    def half_turns(snake: SnakeBeta) -> SnakeBeta:
        return SnakeBeta((snake.frequency.double() / math.pi).float(), snake.magnitude)

    blocks = []
    for block in weights.blocks:
        units = tuple(replace(u, first=half_turns(u.first), second=half_turns(u.second)) for u in block.units)
        blocks.append(replace(block, first=half_turns(block.first), units=units))
    return replace(weights, blocks=tuple(blocks), last_snake=half_turns(weights.last_snake))
