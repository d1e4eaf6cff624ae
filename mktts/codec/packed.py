"""The codec decoder's weights and activations in the layout of its fused kernels: memory for rows, the table of copies
between it and the states of streams, and tiles of products. Rows of one stream are fp32. Rows of many streams are in
stored form: a sixteenth of the value as fp16 (so that the range reaches 10^6), alone or, if split, with a second fp16
number, LOW_SCALE times the rounding error of the first (22 bits)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder
from mktts.codec.layers import AttentionLayer, CausalConv, ConvNeXt, ResidualUnit, SnakeBeta, Upsampling
from mktts.errors import CodecError
from mktts.model.qwen3 import Linear
from mktts.spec import SAMPLES_PER_FRAME

# The precision of decoding many streams on a CUDA device: "full" is nearly fp32 (the signal is 88 dB above the
# difference to it, over 300 frames at full size with random weights, H200); "fast" uses fp16 operands (57 dB) in the
# residual units and their transposed convolutions, which are 95 % of the arithmetic.
Precision = Literal["full", "fast"]
LOW_SCALE = 2048  # 2^11: scales the rounding error of fp16's 11 bits to the size of the number itself
UNIT = 8  # values; strides are multiples of it, so that rows are aligned for the widest load
INPUT_SCALE = 16  # a stored number is a sixteenth of its value
PIECE_VALUES = 2048  # values of a history that one program copies

_BUSY_PROGRAMS = 160  # enough for the multiprocessors of a large GPU (132 on an H200); with fewer, sums are split
_SPLIT_DEPTH = 512  # the smallest number of terms worth a program of its own
_PLANE_BYTES = 2  # per fp16 value


@dataclass(frozen=True)
class Packed:
    """A linear layer or causal convolution: (outs, depth), depth = taps * channels, the oldest tap first. An
    overlapping transposed convolution has two taps; its outputs are those of a whole stride, in order."""

    high: Tensor  # (outs, depth) fp16
    low: Tensor | None  # (outs, depth) fp16: LOW_SCALE times the rounding error of `high`; None: one fp16 product
    bias: Tensor | None  # (outs,) fp32
    channels: int
    dilation: int = 1


@dataclass(frozen=True)
class ProductTile:
    """The tile of one program: `rows` x (`outs` + `extra`) values, `depth` terms of their sums in a step, all powers of
    two. With `extra`, 96 = 64 + 32 and 192 = 128 + 64 columns fit without waste."""

    rows: int
    outs: int
    depth: int
    warps: int
    stages: int  # steps whose loads are in flight
    extra: int = 0
    part: int = 0  # number of terms that one program sums; 0: all

    def programs(self, rows: int, outs: int) -> int:
        return -(-rows // self.rows) * -(-outs // (self.outs + self.extra))

    def parts(self, depth: int) -> int:
        return -(-depth // (self.part or depth))

    def shared_bytes(self, split: bool) -> int:
        """Bytes of shared memory, for operands of one fp16 number or, if split, of two."""
        return self.stages * (self.rows + self.outs + self.extra) * self.depth * _PLANE_BYTES * (2 if split else 1)


def few_rows_tile(rows: int, outs: int, depth: int, channels: int, splittable: bool) -> ProductTile:
    """The tile of one stream's product (rows, depth) @ (depth, outs): small if large tiles would not fill a GPU."""

    def programs(high: int, wide: int) -> int:
        return -(-rows // high) * -(-outs // wide)

    if rows <= 16:
        high, wide = 16, 32 if programs(16, 32) >= 64 else 16
    elif rows > 32 and outs % 64 == 0 and programs(64, 64) >= 72:
        high, wide = 64, 64
    else:
        high, wide = (64, 32) if programs(64, 32) >= 240 else (32, 32)
    steps = (128, 64, 32, 16) if high == 16 else (64, 32, 16)
    step = next((size for size in steps if channels % size == 0), 16)
    part = 0
    if splittable and depth >= 4 * _SPLIT_DEPTH:
        parts = max(1, min(_BUSY_PROGRAMS // programs(high, wide), depth // _SPLIT_DEPTH))
        part = -(-depth // (parts * step)) * step if parts > 1 else 0
    stages = 3 if high * wide == 64 * 64 else 4  # fits into the 99 KB of shared memory of small GPUs
    return ProductTile(high, wide, step, 2 if wide == 16 else 4, stages, part=part)


def pack(
    linear: Linear, split: bool = True, channels: int | None = None, dilation: int = 1, norm: Tensor | None = None
) -> Packed:
    """Packs `linear`. channels: of one tap; None: there is one tap. norm: weight (in,) of the RMSNorm before it."""
    weight = linear.weight if norm is None else linear.weight * norm[:, None]
    weight = weight.t().contiguous()
    high = weight.half()
    low = ((weight - high.float()) * LOW_SCALE).half() if split else None
    return Packed(high, low, linear.bias, channels or weight.shape[1], dilation)


def pack_conv(conv: CausalConv, split: bool = True) -> Packed:
    return pack(conv.taps, split, len(conv.taps.weight) // conv.kernel, conv.dilation)


@dataclass(frozen=True)
class PackedBlock:
    """A waveform block: SnakeBeta, a transposed convolution and residual units."""

    first: SnakeBeta
    up: Packed
    channels: int  # of its output
    units: tuple[ResidualUnit, ...]


@dataclass(frozen=True)
class CodecWeights:
    """All weights of a decoder after its codebooks, in the order of their use. Layers are those of mktts.codec.layers
    with a `Packed` for each product, which includes the weight of the norm before it; SnakeBeta's frequencies are in
    half turns."""

    quantizer: Packed
    entry: Packed  # the convolution before the transformer
    enter: Packed
    layers: tuple[AttentionLayer, ...]  # outputs of gate and up alternate in `gate_up`
    inverse_frequency: Tensor
    leave: Packed
    convnexts: tuple[tuple[Packed, ConvNeXt], ...]  # each with the transposed convolution before it
    widen: Packed
    blocks: tuple[PackedBlock, ...]
    last_snake: SnakeBeta
    last_taps: Tensor  # (k, channels): the convolution to one channel
    last_bias: Tensor

    @classmethod
    def pack(cls, decoder: CodecDecoder, fast: bool) -> CodecWeights:
        """Packs copies of the weights of an fp32 `decoder`. fast: one fp16 number a weight in the waveform blocks."""
        first, rest = decoder.book_out
        stack, stages, split = decoder.transformer, decoder.stages, not fast
        count, size = 2 * len(decoder.config.upsampling_ratios), 2 + len(decoder.config.dilations)
        last = decoder.last_conv.taps  # one output channel
        return cls(
            quantizer=pack(Linear(torch.cat((first.weight, rest.weight)))),
            entry=pack_conv(decoder.pre_conv),
            enter=pack(stack.input),
            layers=tuple(map(_layer, stack.layers)),
            inverse_frequency=stack.inverse_frequency,
            leave=pack(stack.output, norm=stack.norm),
            convnexts=tuple(
                (pack(up.linear, channels=up.c_in), replace(one, expand=pack(one.expand), shrink=pack(one.shrink)))
                for up, one in zip(stages[:count:2], stages[1:count:2], strict=True)
            ),
            widen=pack_conv(stages[count]),
            blocks=tuple(_block(stages[i : i + size], split) for i in range(count + 1, len(stages), size)),
            last_snake=_half_turns(decoder.last_snake),
            last_taps=last.weight.view(-1, len(decoder.last_snake.frequency)),
            last_bias=last.bias,
        )

    @property
    def snakes(self) -> list[SnakeBeta]:
        """The first activation of each block, and the last one: each is applied by the layer before it."""
        return [*(block.first for block in self.blocks), self.last_snake]


def rows_per_frame(decoder: CodecDecoder) -> Iterator[int]:
    """Input rows per frame of every layer with memory, in the order of the state."""
    rows = 1
    yield rows  # the convolution before the transformer
    for layer in decoder.stages:
        if not isinstance(layer, SnakeBeta) and layer.history_shapes:
            yield rows
        if isinstance(layer, Upsampling):
            rows *= layer.linear.weight.shape[1] // layer.c_out
    assert rows == SAMPLES_PER_FRAME
    yield rows


def _layer(layer: AttentionLayer) -> AttentionLayer:
    by_turns = layer.gate_up.weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)  # so that a tile has both
    qkv, gate_up = pack(layer.qkv, norm=layer.input_norm), pack(Linear(by_turns), norm=layer.post_norm)
    return replace(layer, qkv=qkv, out=pack(layer.out), gate_up=gate_up, down=pack(layer.down))


def _block(stages: list, split: bool) -> PackedBlock:
    snake, up, *units = stages
    packed = []
    for unit in units:
        first, second = _half_turns(unit.first), _half_turns(unit.second)
        packed.append(ResidualUnit(first, pack_conv(unit.conv, split), second, pack(unit.mix, split)))
    return PackedBlock(_half_turns(snake), pack(up.linear, split, up.c_in), up.c_out, tuple(packed))


def _half_turns(snake: SnakeBeta) -> SnakeBeta:
    return SnakeBeta((snake.frequency.double() / math.pi).float(), snake.magnitude)


@dataclass(frozen=True)
class RowsShape:
    """The rows of one lane: `past` history rows, then `new` rows."""

    past: int
    new: int
    channels: int
    split: bool

    @property
    def plane(self) -> int:
        """The stride, in values, from a number's high part to its low part."""
        return -(-(self.past + self.new) * self.channels // UNIT) * UNIT

    @property
    def lane(self) -> int:
        """The stride, in values, from one lane to the next."""
        return self.plane * self.planes

    @property
    def planes(self) -> int:
        return 2 if self.split else 1

    def rows(self, memory: Tensor) -> Rows:
        return Rows(self.past, self.new, self.channels, self.split, memory)


@dataclass(frozen=True)
class Rows(RowsShape):
    """Rows of all lanes: (lanes, planes, past + new, channels), each plane padded to a multiple of UNIT values."""

    memory: Tensor  # (lanes * lane,) fp32, or fp16 in stored form

    @property
    def lanes(self) -> int:
        return len(self.memory) // self.lane

    @property
    def newest(self) -> Tensor:
        """The memory starting at the first lane's first new row."""
        return self.memory[self.past * self.channels :]


class CodecWork:
    """Working memory by name; a pass of fewer rows uses the front of a larger pass's memory. Memory is never freed,
    because recorded graphs hold its address: record the largest pass first."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the rows."""
        self._device, self._dtype = device, dtype
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The memory called `name`, with its previous content."""
        values, memory = math.prod(shape), self._memory.get((name, dtype))
        if memory is None or len(memory) < values:
            if memory is not None:
                self._outgrown.append(memory)
            memory = torch.zeros(values, dtype=dtype, device=self._device)
            self._memory[name, dtype] = memory
        return memory[:values].view(shape)

    def rows(self, name: str, lanes: int, shape: RowsShape) -> Rows:
        return shape.rows(self.tensor(name, lanes * shape.lane, dtype=self._dtype))

    def inputs(self, lanes: int, shapes: Sequence[RowsShape]) -> tuple[Tensor, list[Rows]]:
        """One tensor, and the consecutive parts of it that hold the rows of each of `shapes`."""
        memory = self.tensor("inputs", lanes * sum(shape.lane for shape in shapes), dtype=self._dtype)
        pieces = memory.split([lanes * shape.lane for shape in shapes])
        return memory, [shape.rows(piece) for shape, piece in zip(shapes, pieces, strict=True)]


def moves(lanes: int, shapes: Sequence[RowsShape], starts: Sequence[int], device: torch.device) -> Tensor:
    """The table for `row_kernels.move`, for `lanes` lanes of rows in the layout of `CodecWork.inputs`, in units of UNIT
    values. starts: for each of `shapes`, the offset of its history in a stream's state. Raises CodecError if the size
    of rows is not a multiple of UNIT."""
    table, input_start = [], 0
    for shape, start in zip(shapes, starts, strict=True):
        kept, new = shape.past * shape.channels, shape.new * shape.channels
        if kept % UNIT or new % UNIT:
            raise CodecError(f"rows of {shape.channels} channels cannot be moved {UNIT} values at a time")
        for plane in range(shape.planes):
            state, work = start + plane * kept, input_start + plane * shape.plane
            for i in range(0, kept, PIECE_VALUES):
                table.append((state + i, work + i, work + new + i, shape.lane, min(PIECE_VALUES, kept - i)))
        input_start += lanes * shape.lane
    return (torch.tensor(table, dtype=torch.int64) // UNIT).to(device)
