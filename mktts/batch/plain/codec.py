"""One codec frame of many streams at once, in plain PyTorch: a lane's state is a row, and a tick gathers rows.

At these sizes an operator costs by the call: the same operators that decode one frame of one stream decode one of
sixteen. Streams may be at different positions; what one gives does not depend on which others come with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.layers import (
    CONVNEXT_EPS,
    AttentionLayer,
    CausalConv,
    CodecTransformer,
    ConvNeXt,
    Linear,
    ResidualUnit,
    SnakeBeta,
    Upsampling,
)
from mktts.errors import CodecError
from mktts.model.qwen3 import rms_norm, rotate
from mktts.spec import NUM_CODEBOOKS

History = Iterator[Tensor]
Layer = Callable[[Tensor, History], Tensor]

_COLUMNS = 48  # of a product: with fewer, they are not what it costs by
_WIDTH = 96  # of rows that elementwise operators take: twelve columns would leave their vectors half empty


class CodecBuffers:
    """Memory for what a layer makes and is done with before the next one: fresh pages cost as much as work on them.

    It grows with the number of lanes, and views of it are then made anew.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[object, int], tuple[Tensor, ...]] = {}

    def views(self, layer: object, lanes: int, made: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `made` gives: a layer's views of the memory for so many lanes, made once."""
        if (layer, lanes) not in self._views:
            fresh = made()  # which may clear the others
            self._views[layer, lanes] = fresh
        return self._views[layer, lanes]

    def taken(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory of this name as `shape`, of the dtype of `like`; who takes it next overwrites it."""
        values = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < values:
            memory = self._memory[name] = like.new_empty(values)
            self._views.clear()
        return memory[:values].view(shape)

    def extended(self, x: Tensor, history: History) -> Tensor:
        """`x` (B, L, C) with the P rows before it: (B, P + L, C). The history (B, P, C) then holds the newest P rows.

        The next call overwrites the result.
        """
        rows = next(history)
        before = rows.shape[1]
        whole = self.taken("extended", x, (x.shape[0], before + x.shape[1], rows.shape[2]))
        whole[:, :before] = rows
        whole[:, before:] = x
        rows.copy_(whole[:, x.shape[1] :])
        return whole


class LaneSnake:
    """x + sin(x f)^2 m = x - cos(2 f x) m / 2 + m / 2, a `SnakeBeta`, but for the constant: two operators less.

    What comes in may lack a constant as well, `missing` (C,); what comes out then lacks `constant` (C,), which the
    layers behind have in their biases. Rows of few channels are taken several at a time.
    """

    def __init__(self, snake: SnakeBeta, missing: Tensor, rows: int, work: CodecBuffers) -> None:
        """rows: L of the signal."""
        self._work, times = work, _at_once(rows, len(missing), _WIDTH)
        self.width = times * len(missing)
        self._twice, self._shift = (2 * snake.frequency).repeat(times), (2 * snake.frequency * missing).repeat(times)
        self._depth = (-snake.magnitude / 2).repeat(times)
        self.constant = missing + snake.magnitude / 2

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """`x` (B, L, C), contiguous -> (B, L * C / width, width), into `out` of that shape, which may be `x`."""
        wide = x.view(len(x), -1, self.width)
        wave = self._work.taken("wave", x, wide.shape)
        torch.addcmul(self._shift, wide, self._twice, out=wave).cos_()
        return torch.addcmul(wide, wave, self._depth, out=out)

    def extended(self, layer: object, x: Tensor, history: History) -> Tensor:
        """As `CodecBuffers.extended` of the LaneSnake of `x` (B, L, C), less the constant, which the history has."""
        rows = next(history)
        lanes, before, channels = rows.shape

        def made() -> tuple[Tensor, ...]:
            whole = self._work.taken("extended", x, (lanes, before + x.shape[1], channels))
            return (
                whole,
                whole[:, :before],
                whole[:, before:].unflatten(1, (-1, self.width // channels)).flatten(2),
                (whole[:, x.shape[1] :]),
            )

        whole, old, new, newest = self._work.views(layer, lanes, made)
        torch.sub(rows, self.constant, out=old)
        self(x, new)
        torch.add(newest, self.constant, out=rows)
        return whole


def lane_layers(decoder: CodecDecoder, work: CodecBuffers) -> Iterator[Layer]:
    """The decoder's stages, and what comes behind them, as layers that take lanes: (B, L, C in), which they may
    overwrite, and the histories -> (B, L', C out), of the last one (B, L')."""
    rows, missing, snake = 1, None, None
    for layer in decoder.stages:
        if isinstance(layer, SnakeBeta):  # one stands before every upsampling
            snake = layer
        elif isinstance(layer, Upsampling):
            yield Up(layer, snake, missing, rows, work)
            rows *= layer.linear.weight.shape[1] // layer.c_out
            snake = missing = None
        elif isinstance(layer, ResidualUnit):
            unit = Unit(layer, torch.zeros_like(layer.mix.bias) if missing is None else missing, rows, work)
            missing = unit.missing
            yield unit
        else:
            yield _KINDS[type(layer)](layer, work)
    yield Last(decoder.last_snake, decoder.last_conv, missing, rows, work)


def rowwise(linear: Linear, x: Tensor) -> Tensor:
    """`linear` over the last dimension of `x` (B, L, in) -> (B, L, out)."""
    return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _at_once(rows: int, channels: int, most: int) -> int:
    """How many of `rows` of so many channels are taken as one, of at most `most` columns."""
    return max(times for times in (1, 2, 4, 8) if times == 1 or (times * channels <= most and rows % times == 0))


class Conv:
    """A causal convolution, as one of images of one line: oneDNN beats products of copied windows."""

    def __init__(self, conv: CausalConv, work: CodecBuffers) -> None:
        self._conv, self._work = conv, work
        kernel = conv.taps.weight.unflatten(0, (conv.kernel, -1)).permute(2, 1, 0)[:, :, None]
        self._kernel = kernel.contiguous(memory_format=torch.channels_last)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        return self.over(self._work.extended(x, history))

    def over(self, whole: Tensor) -> Tensor:
        """`whole` (B, P + L, C in), contiguous -> (B, L, C out), contiguous."""
        conv, lanes = self._conv, len(whole)
        if lanes == 1:  # torch takes other routines for one image, with other last bits
            whole = whole.expand(2, -1, -1)
        image = whole.transpose(1, 2)[:, :, None]
        y = F.conv2d(image, self._kernel, conv.taps.bias, dilation=(1, conv.dilation))
        return y[:lanes, :, 0].transpose(1, 2)


class Unit:
    """LaneSnake, dilated convolution, LaneSnake, 1x1 convolution, added to the input, which is overwritten.

    The convolution gives its outputs times twice the second LaneSnake's frequency, and the 1x1 convolution takes that
    back: one pass over the signal less. The latter takes several rows as one where there are few channels: a product
    of twelve columns costs what one of 48 does. Constants of the channels are left out of what comes, by `missing`
    (C,), and of what is given, then by `self.missing`.
    """

    def __init__(self, unit: ResidualUnit, missing: Tensor, rows: int, work: CodecBuffers) -> None:
        self._work = work
        self._first = LaneSnake(unit.first, missing, rows, work)
        taps, twice = unit.conv.taps, 2 * unit.second.frequency
        bias = taps.bias + self._first.constant.repeat(unit.conv.kernel) @ taps.weight
        self._conv = Conv(replace(unit.conv, taps=Linear(taps.weight * twice, bias * twice)), work)
        self._depth = (-unit.second.magnitude / 2 * twice).repeat(self._first.width // len(missing))
        weight = unit.mix.weight / twice[:, None]
        self._weight = torch.block_diag(*[weight] * _at_once(rows, len(weight), _COLUMNS))
        self.missing = missing + unit.mix.bias + (unit.second.magnitude / 2) @ unit.mix.weight

    def __call__(self, x: Tensor, history: History) -> Tensor:
        h = self._conv.over(self._first.extended(self, x, history))
        wide = h.reshape(len(x), -1, len(self._depth))
        wide.addcmul_(torch.cos(wide, out=self._work.taken("wave", x, wide.shape)), self._depth)
        columns = len(self._weight)
        x.view(-1, columns).addmm_(wide.view(-1, columns), self._weight)
        return x


class Up:
    """Transposed convolution of stride s, after a LaneSnake where there is one: (B, L, C in) -> (B, s * L, C out)."""

    def __init__(
        self, layer: Upsampling, snake: SnakeBeta | None, missing: Tensor | None, rows: int, work: CodecBuffers
    ) -> None:
        """missing: see `LaneSnake`."""
        self._layer, self._work, self._snake, self._linear = layer, work, None, layer.linear
        if snake is not None:
            missing = torch.zeros_like(snake.frequency) if missing is None else missing
            self._snake = LaneSnake(snake, missing, rows, work)
            weight, bias = layer.linear.weight, layer.linear.bias
            taps = len(weight) // layer.c_in
            self._linear = Linear(weight, bias + self._snake.constant.repeat(taps) @ weight)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        layer, snake, lanes = self._layer, self._snake, len(x)
        if layer.history_shapes:
            whole = self._work.extended(x, history) if snake is None else snake.extended(self, x, history)
            # a row and the one before it lie side by side
            pairs = whole.as_strided((lanes, x.shape[1], 2 * layer.c_in), whole.stride())
            x = self._work.taken("pairs", x, pairs.shape).copy_(pairs)
        elif snake is not None:
            snake(x, x.view(lanes, -1, snake.width))
        return rowwise(self._linear, x).view(lanes, -1, layer.c_out)


class Next:
    """ConvNeXt: depthwise convolution, LayerNorm, two linear layers with exact GELU, scale, residual."""

    def __init__(self, layer: ConvNeXt, work: CodecBuffers) -> None:
        self._layer, self._work = layer, work

    def __call__(self, x: Tensor, history: History) -> Tensor:
        layer = self._layer
        k, channels = layer.taps.shape
        whole = self._work.extended(x, history)
        windows = whole.as_strided((*x.shape[:2], k, channels), (*whole.stride()[:2], channels, 1))
        h = (windows * layer.taps).sum(2) + layer.bias
        h = F.layer_norm(h, (channels,), *layer.norm, eps=CONVNEXT_EPS)
        return torch.addcmul(x, rowwise(layer.shrink, F.gelu(rowwise(layer.expand, h))), layer.gamma)


_KINDS: dict[type, Callable] = {CausalConv: Conv, ConvNeXt: Next}


class Last:
    """LaneSnake and the convolution to one channel: a product for every tap at once, then a sum along the diagonals.

    A convolution kernel would leave all but one of its outputs empty.
    """

    def __init__(self, snake: SnakeBeta, conv: CausalConv, missing: Tensor, rows: int, work: CodecBuffers) -> None:
        """missing: see `LaneSnake`."""
        assert conv.dilation == 1 and conv.taps.weight.shape[1] == 1
        self._snake = LaneSnake(snake, missing, rows, work)
        weight = conv.taps.weight
        self._kernel, self._bias = conv.kernel, conv.taps.bias + self._snake.constant.repeat(conv.kernel) @ weight
        self._weight = weight.view(conv.kernel, -1).t().contiguous()  # (C in, k)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        """(B, L, C in) -> (B, L)."""
        rows = x.shape[1]
        whole = self._snake.extended(self, x, history)
        taps = (whole.flatten(0, 1) @ self._weight).view(*whole.shape[:2], -1)
        y = taps[:, :rows, 0] + self._bias
        for j in range(1, self._kernel):
            y += taps[:, j : j + rows, j]
        return y


class LaneTransformer:
    """One row of every lane: `x` (B, latent) at `position` (B, 1) int64 -> (B, latent)."""

    def __init__(self, transformer: CodecTransformer) -> None:
        self._transformer = transformer
        norm, config = transformer.norm, transformer.config
        window = config.sliding_window
        self._before = window - 1 - torch.arange(window)  # how far back each place lies
        self._root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(self._root * math.sqrt(config.rms_norm_eps)).to(norm)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """`keys` and `values` (B, layers, heads, window - 1, head_dim) move on by one place, `position` by one, in
        place."""
        t = self._transformer
        angle = position.float() * t.inverse_frequency
        angle = torch.cat((angle, angle), -1)[:, None, None]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # (B, 1, 1, head_dim) each
        absent = (self._before > position)[:, None, None]  # (B, 1, 1, window): places before the first frame
        x = t.input(x)
        for layer, layer_keys, layer_values in zip(t.layers, keys.unbind(1), values.unbind(1), strict=True):
            x = self._layer(layer, x, layer_keys, layer_values, rotary, absent)
        position += 1
        return t.output(self._normed(x, t.norm))

    def _layer(
        self,
        layer: AttentionLayer,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rotary: tuple[Tensor, Tensor],
        absent: Tensor,
    ) -> Tensor:
        """`x` (B, hidden); `keys` and `values` (B, heads, window - 1, head_dim)."""
        lanes, heads, _, head_dim = keys.shape
        qkv = layer.qkv(self._normed(x, layer.input_norm)).view(lanes, 3, heads, head_dim)
        q, k = rotate(qkv[:, :2], *rotary).unbind(1)
        k = torch.cat((keys, k[:, :, None]), 2)
        v = torch.cat((values, qkv[:, 2, :, None]), 2)
        keys.copy_(k[:, :, 1:])
        values.copy_(v[:, :, 1:])
        scores = (q[:, :, None] * head_dim**-0.5) @ k.transpose(2, 3)  # (B, heads, 1, window)
        attended = scores.masked_fill_(absent, -torch.inf).softmax(-1) @ v
        x = torch.addcmul(x, layer.out(attended.reshape(lanes, -1)), layer.attention_scale)
        gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, -1)
        return torch.addcmul(x, layer.down(F.silu(gate) * up), layer.mlp_scale)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm; in fp32 of half as many operators, the root of the width apart."""
        if x.dtype != torch.float32:
            return rms_norm(x, weight, self._transformer.config.rms_norm_eps)
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return (x / length).mul_(weight * self._root)


_State = tuple[Tensor, Tensor, list[Tensor], Tensor]  # see `CodecLanes._views`

_SLOTS_AT_A_TIME = 8  # that memory is taken for
_LANES_AT_A_TIME = 16  # beyond, an operator gains nothing and its results leave the cache


class CodecLanes:
    """Codec states by slot, and `decode`: the next frame of any of them. One thread at a time.

    A slot's row has the bytes of a `CodecState` of the decoder, so that a primed state is copied in as it is.
    """

    def __init__(self, decoder: CodecDecoder, slots: int) -> None:
        """The weights stay the decoder's. Memory is taken for a few slots at a time, up to `slots`."""
        self.config, self.slots = decoder.config, slots
        self._decoder = decoder
        self._silence = _words(decoder.start())
        self._rows = self._silence.new_empty(0, len(self._silence))  # (slots, words of a state): wide ones move fast
        self._memory = self._rows  # of those that a tick decodes
        self._states: dict[int, _State] = {}  # by lanes
        work = CodecBuffers()
        self._pre_conv = Conv(decoder.pre_conv, work)
        self._transformer = LaneTransformer(decoder.transformer)
        self._layers = list(lane_layers(decoder, work))

    @torch.inference_mode()
    def enter(self, slot: int, primed: CodecState | None) -> None:
        """`slot` begins with silence, or goes on from `primed`, which is copied.

        Raises CodecError for a slot that does not exist, and for a state of another decoder.
        """
        if not 0 <= slot < self.slots:
            raise CodecError(f"slots are 0 to {self.slots - 1}, got {slot}")
        if primed is not None and primed.layout != self._decoder.layout:
            raise CodecError("the state belongs to another decoder: use one that start() of this decoder returned")
        more = min(-(-(slot + 1) // _SLOTS_AT_A_TIME) * _SLOTS_AT_A_TIME, self.slots) - len(self._rows)
        if more > 0:
            self._rows = torch.cat((self._rows, self._rows.new_empty(more, self._rows.shape[1])))
        self._rows[slot] = self._silence if primed is None else _words(primed)

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Sequence[int]) -> Tensor:
        """The next frame of each slot, once each: codes (B, 16) integer -> PCM (B, 1920) float32 in [-1, 1].

        Raises CodecError, before anything is changed, for codes of another shape, dtype or range.
        """
        shape, size = (len(slots), NUM_CODEBOOKS), self.config.codebook_size
        if codes.shape != shape or codes.is_floating_point() or codes.min() < 0 or codes.max() >= size:
            raise CodecError(f"codes must be {shape} whole numbers in 0..{size - 1}, got {codes}")
        lanes = torch.tensor(list(slots))
        codes = codes.to(torch.int64)
        pcm = []
        for some, their_codes in zip(lanes.split(_LANES_AT_A_TIME), codes.split(_LANES_AT_A_TIME), strict=True):
            rows, state = self._gathered(len(some))
            torch.index_select(self._rows, 0, some, out=rows)
            pcm.append(self._advance(their_codes, state))
            self._rows.index_copy_(0, some, rows)
        return torch.cat(pcm)

    def _advance(self, codes: Tensor, state: _State) -> Tensor:
        """`codes` (B, 16) int64; `state`: the lanes', updated in place."""
        decoder, (keys, values, histories, position) = self._decoder, state
        history = iter(histories)
        x = F.embedding(codes + decoder.first_row, decoder.books)  # (B, 16, codebook_dim / 2)
        x = decoder.book_out[0](x[:, 0]) + decoder.book_out[1](x[:, 1:].sum(1))
        x = self._pre_conv(x[:, None], history)[:, 0]
        x = self._transformer(x, keys, values, position)[:, None]
        for layer in self._layers:
            x = layer(x, history)
        return x.float().clamp_(-1.0, 1.0)

    def _gathered(self, lanes: int) -> tuple[Tensor, _State]:
        """Memory for the states of so many lanes, (B, words), and its views: made once, as they cost what work does."""
        if len(self._memory) < lanes:
            self._memory = self._rows.new_empty(lanes, self._rows.shape[1])
            self._states.clear()
        if lanes not in self._states:
            self._states[lanes] = self._views(self._memory[:lanes])
        return self._memory[:lanes], self._states[lanes]

    def _views(self, rows: Tensor) -> _State:
        """Keys, values (B, layers, heads, window - 1, head_dim), histories (B, P, C) and position (B, 1) in `rows`."""
        layout, rows = self._decoder.layout, rows.view(torch.uint8)
        shapes = (layout.cache, layout.cache, *layout.history, (1,))
        keys, values, *history, position = (
            rows[:, start : start + count * dtype.itemsize].view(dtype).unflatten(1, shape)
            for (start, count, dtype), shape in zip(layout.places, shapes, strict=True)
        )
        return keys, values, history, position


def _words(state: CodecState) -> Tensor:
    """The memory of a state as int64 words: its parts start at multiples of 16 bytes, and the last is an int64."""
    return state.flat.view(torch.int64)
