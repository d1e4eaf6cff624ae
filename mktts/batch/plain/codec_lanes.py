"""The codec decoder's layers over one frame of many streams: signals are (B, L, C), channels last, a lane a row.

The weights are those of `mktts.codec.layers`; only the shapes differ. What a lane gives does not depend on its
neighbours. Histories are views (B, P, C) of the lanes' gathered state, in the order of the decoder's own pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import CONVNEXT_EPS, CausalConv, ConvNeXt, Linear, ResidualUnit, SnakeBeta, Upsampling
from mktts.codec.transformer import AttentionLayer, CodecTransformer
from mktts.model.qwen3 import rms_norm, rotate

History = Iterator[Tensor]
Layer = Callable[[Tensor, History], Tensor]

_COLUMNS = 48  # of a product: with fewer, they are not what it costs by


class Workspace:
    """Memory for what a layer makes and is done with before the next one: fresh pages cost as much as work on them."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def extended(self, x: Tensor, history: History, made: Callable[[Tensor], object] | None = None) -> Tensor:
        """`x` (B, L, C) with the P rows before it: (B, P + L, C). The history (B, P, C) then holds the newest P rows.

        made: writes the last L rows itself, instead of a copy of `x`. The next call overwrites the result.
        """
        rows = next(history)
        before = rows.shape[1]
        whole = self._taken("extended", x, (x.shape[0], before + x.shape[1], rows.shape[2]))
        whole[:, :before] = rows
        if made is None:
            whole[:, before:] = x
        else:
            made(whole[:, before:])
        rows.copy_(whole[:, x.shape[1] :])
        return whole

    def snake(self, snake: SnakeBeta, out: Tensor, x: Tensor) -> Tensor:
        """x + sin(x * frequency)^2 * magnitude into `out`, which may be `x`; returns it."""
        wave = torch.mul(x, snake.frequency, out=self._taken("wave", x, x.shape)).sin_().square_()
        return torch.addcmul(x, wave, snake.magnitude, out=out)

    def scaled_snake(self, x: Tensor, magnitude: Tensor) -> Tensor:
        """x + sin(x)^2 * magnitude, in place."""
        wave = torch.sin(x, out=self._taken("wave", x, x.shape)).square_()
        return x.addcmul_(wave, magnitude)

    def copied(self, x: Tensor) -> Tensor:
        """`x`, contiguous; the next call overwrites it."""
        return self._taken("copied", x, x.shape).copy_(x)

    def _taken(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        values = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < values:
            memory = self._memory[name] = like.new_empty(values)
        return memory[:values].view(shape)


def lane_layers(layers: Iterable[object], work: Workspace) -> Iterator[Layer]:
    """The decoder's layers as ones that take lanes: (B, L, C in), which they may overwrite, and the histories ->
    (B, L', C out)."""
    snake = None
    for layer in layers:
        if isinstance(layer, SnakeBeta):  # one stands before every upsampling, and writes where that one reads
            snake = layer
        elif isinstance(layer, Upsampling):
            yield Up(layer, work, snake)
            snake = None
        else:
            yield _KINDS[type(layer)](layer, work)


def rowwise(linear: Linear, x: Tensor) -> Tensor:
    """`linear` over the last dimension of `x` (B, L, in) -> (B, L, out)."""
    return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Conv:
    """A causal convolution: as one of images of one line on the CPU, where oneDNN beats products of copied windows.

    On CUDA, cuDNN would round operands to TF32 by default, so there the windows are copied and multiplied.
    """

    def __init__(self, conv: CausalConv, work: Workspace) -> None:
        self._conv, self._work = conv, work
        self._kernel: Tensor | None = None
        if conv.taps.weight.device.type == "cpu":
            kernel = conv.taps.weight.unflatten(0, (conv.kernel, -1)).permute(2, 1, 0)[:, :, None]
            self._kernel = kernel.contiguous(memory_format=torch.channels_last)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        return self.over(self._work.extended(x, history))

    def over(self, whole: Tensor) -> Tensor:
        """`whole` (B, P + L, C in), contiguous -> (B, L, C out)."""
        conv, (lanes, rows, channels) = self._conv, whole.shape
        if self._kernel is not None:
            if lanes == 1:  # torch takes other routines for one image, with other last bits
                whole = whole.expand(2, -1, -1)
            image = whole.transpose(1, 2)[:, :, None]
            y = F.conv2d(image, self._kernel, conv.taps.bias, dilation=(1, conv.dilation))
            return y[:lanes, :, 0].transpose(1, 2)
        rows -= (conv.kernel - 1) * conv.dilation
        shape, strides = (lanes, rows, conv.kernel, channels), (*whole.stride()[:2], conv.dilation * channels, 1)
        return rowwise(conv.taps, whole.as_strided(shape, strides).flatten(2))


class Unit:
    """Snake, dilated convolution, Snake, 1x1 convolution, added to the input, which is overwritten.

    The convolution gives its outputs times the second Snake's frequency, and the 1x1 convolution takes that back: one
    pass over the signal less. The latter takes several rows as one where there are few channels: a product of twelve
    columns costs what one of 48 does.
    """

    def __init__(self, unit: ResidualUnit, work: Workspace) -> None:
        self._work, self._first = work, unit.first
        taps, frequency = unit.conv.taps, unit.second.frequency
        scaled = Linear(taps.weight * frequency, taps.bias * frequency)
        self._conv = Conv(replace(unit.conv, taps=scaled), work)
        self._magnitude = unit.second.magnitude * frequency
        weight = unit.mix.weight / frequency[:, None]
        rows = max(rows for rows in (1, 2, 4, 8) if rows == 1 or rows * len(weight) <= _COLUMNS)  # a frame has 32 n
        self._weight, self._bias = torch.block_diag(*[weight] * rows), unit.mix.bias.repeat(rows)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        work, columns = self._work, len(self._weight)
        h = self._conv.over(work.extended(x, history, partial(work.snake, self._first, x=x)))
        work.scaled_snake(h, self._magnitude)
        rows = x.view(-1, columns)
        rows.add_(self._bias).addmm_(h.reshape(-1, columns), self._weight)
        return x


class Up:
    """Transposed convolution of stride s, after a Snake where there is one: (B, L, C in) -> (B, s * L, C out)."""

    def __init__(self, layer: Upsampling, work: Workspace, snake: SnakeBeta | None) -> None:
        self._layer, self._work, self._snake = layer, work, snake

    def __call__(self, x: Tensor, history: History) -> Tensor:
        layer, work, lanes = self._layer, self._work, x.shape[0]
        if layer.history_shapes:
            made = None if self._snake is None else partial(work.snake, self._snake, x=x)
            whole = work.extended(x, history, made)  # a row and the one before it lie side by side
            x = work.copied(whole.as_strided((lanes, x.shape[1], 2 * layer.c_in), whole.stride()))
        elif self._snake is not None:
            x = work.snake(self._snake, x, x)
        return rowwise(layer.linear, x).view(lanes, -1, layer.c_out)


class Next:
    """ConvNeXt: depthwise convolution, LayerNorm, two linear layers with exact GELU, scale, residual."""

    def __init__(self, layer: ConvNeXt, work: Workspace) -> None:
        self._layer, self._work = layer, work

    def __call__(self, x: Tensor, history: History) -> Tensor:
        layer = self._layer
        k, channels = layer.taps.shape
        whole = self._work.extended(x, history)
        windows = whole.as_strided((*x.shape[:2], k, channels), (*whole.stride()[:2], channels, 1))
        h = (windows * layer.taps).sum(2) + layer.bias
        h = F.layer_norm(h, (channels,), *layer.norm, eps=CONVNEXT_EPS)
        return torch.addcmul(x, rowwise(layer.shrink, F.gelu(rowwise(layer.expand, h))), layer.gamma)


_KINDS: dict[type, Callable] = {CausalConv: Conv, ResidualUnit: Unit, ConvNeXt: Next}


class Last:
    """Snake and the convolution to one channel: a product for every tap at once, then a sum along the diagonals.

    A convolution kernel would leave all but one of its outputs empty.
    """

    def __init__(self, snake: SnakeBeta, conv: CausalConv, work: Workspace) -> None:
        assert conv.dilation == 1 and conv.taps.weight.shape[1] == 1
        self._snake, self._conv, self._work = snake, conv, work
        self._weight = conv.taps.weight.view(conv.kernel, -1).t().contiguous()  # (C in, k)

    def __call__(self, x: Tensor, history: History) -> Tensor:
        """(B, L, C in) -> (B, L)."""
        work, rows = self._work, x.shape[1]
        whole = work.extended(x, history, partial(work.snake, self._snake, x=x))
        taps = (whole.flatten(0, 1) @ self._weight).view(*whole.shape[:2], -1)
        y = taps[:, :rows, 0] + self._conv.taps.bias
        for j in range(1, self._conv.kernel):
            y += taps[:, j : j + rows, j]
        return y


def transformer_row(t: CodecTransformer, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """One row of every lane: `x` (B, latent) at `position` (B, 1) int64 -> (B, latent).

    `keys` and `values` (B, layers, heads, window - 1, head_dim) move on by one place, `position` by one, in place.
    """
    angle = position.float() * t.inverse_frequency
    angle = torch.cat((angle, angle), -1)
    rotary = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]  # (B, 1, head_dim) each
    window = t.config.sliding_window
    absent = (window - 1 - torch.arange(window, device=x.device) > position)[:, None, None]  # (B, 1, 1, window)
    x = t.input(x)
    for layer, layer_keys, layer_values in zip(t.layers, keys.unbind(1), values.unbind(1), strict=True):
        x = _attention_layer(layer, x, layer_keys, layer_values, rotary, absent)
    position += 1
    return t.output(rms_norm(x, t.norm, t.config.rms_norm_eps))


def _attention_layer(
    layer: AttentionLayer, x: Tensor, keys: Tensor, values: Tensor, rotary: tuple[Tensor, Tensor], absent: Tensor
) -> Tensor:
    """`x` (B, hidden); `keys` and `values` (B, heads, window - 1, head_dim)."""
    lanes, heads, _, head_dim = keys.shape
    q, k, v = layer.qkv(rms_norm(x, layer.input_norm, layer.eps)).view(lanes, 3, heads, head_dim).unbind(1)
    k = torch.cat((keys, rotate(k, *rotary)[:, :, None]), 2)
    v = torch.cat((values, v[:, :, None]), 2)
    keys.copy_(k[:, :, 1:])
    values.copy_(v[:, :, 1:])
    scores = (rotate(q, *rotary)[:, :, None] * head_dim**-0.5) @ k.transpose(2, 3)  # (B, heads, 1, window)
    attended = scores.masked_fill(absent, -torch.inf).softmax(-1) @ v
    x = torch.addcmul(x, layer.out(attended.reshape(lanes, -1)), layer.attention_scale)
    gate, up = layer.gate_up(rms_norm(x, layer.post_norm, layer.eps)).chunk(2, -1)
    return torch.addcmul(x, layer.down(F.silu(gate) * up), layer.mlp_scale)
