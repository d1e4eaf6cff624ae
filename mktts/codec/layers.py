"""Layers of the streaming codec decoder, on channels-last signals (B, L, C) of B streams.

A layer with memory takes the next tensor of `history`, an iterator over the state's histories (B, P, C), and writes the
newest rows back in place: addresses never change, so that a CUDA graph can record the pass. In fp32 on a CPU, the bits
of a frame depend neither on the streams nor on the number of frames it is decoded with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import Linear, inverse_frequency, rms_norm, rotate
from mktts.spec import CodecConfig

History = Iterator[Tensor]
Shape = tuple[int, int]

CONVNEXT_EPS = 1e-6  # of the LayerNorm in upstream's ConvNeXt block
_LONG_ROWS = 64  # rows per frame from which copied windows cost more than a convolution
_WIDTH = 96  # target width of rows for elementwise operators


def extended(x: Tensor, history: History, snake: SnakeBeta | None = None) -> Tensor:
    """The P history rows followed by `x` (B, L, C) or `snake(x)`: (B, P + L, C). Updates the history."""
    rows = next(history)
    before = rows.shape[1]
    whole = x.new_empty(x.shape[0], before + x.shape[1], x.shape[2])
    whole[:, :before] = rows
    if snake is None:
        whole[:, before:] = x
    else:
        snake(x, whole[:, before:])
    rows.copy_(whole[:, x.shape[1] :])
    return whole


@dataclass(frozen=True)
class CausalConv:
    """y[t] = bias + sum over j of x[t - (k - 1 - j) * dilation] @ W[j], as a product of copied windows; on a CPU, for
    many rows, as oneDNN's convolution, which is faster and whose order of sums does not depend on the length."""

    taps: Linear  # (k * C in, C out)
    kernel: int
    dilation: int
    long: bool  # whether a frame has at least _LONG_ROWS rows

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, rows: int, dilation: int = 1) -> CausalConv:
        """rows: input rows per frame."""
        weight = tensors[f"{name}.conv.weight"]  # (C out, C in, k)
        taps = weight.permute(2, 1, 0).reshape(-1, len(weight))
        bias = tensors[f"{name}.conv.bias"]
        return cls(Linear(taps.contiguous(), bias), weight.shape[2], dilation, rows >= _LONG_ROWS)

    @property
    def history_shapes(self) -> list[Shape]:
        return [((self.kernel - 1) * self.dilation, len(self.taps.weight) // self.kernel)]

    def __call__(self, x: Tensor, history: History, snake: SnakeBeta | None = None) -> Tensor:
        """Convolves `x` or `snake(x)`."""
        whole = extended(x, history, snake)
        if self.long and whole.device.type == "cpu" and whole.dtype == torch.float32:
            image, dilation = whole.transpose(1, 2)[:, :, None], (1, self.dilation)
            y = torch.mkldnn_convolution(image, self._image, self.taps.bias, (0, 0), (1, 1), dilation, 1)
            return y[:, :, 0].transpose(1, 2)
        channels = x.shape[2]
        strides = whole.stride(0), channels, self.dilation * channels, 1
        return self.taps(whole.as_strided((*x.shape[:2], self.kernel, channels), strides).flatten(2))

    @cached_property
    def _image(self) -> Tensor:
        """The weights as a convolution of images of height 1: (C out, C in, 1, k)."""
        image = self.taps.weight.unflatten(0, (self.kernel, -1)).permute(2, 1, 0)[:, :, None]
        return image.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Upsampling:
    """Transposed convolution of stride s and kernel s or 2s, right side trimmed: y[n * s : (n + 1) * s] = bias + x[n] @
    W[:s] + x[n - 1] @ W[s:], the second term only for kernel 2s."""

    linear: Linear  # (C in or 2 C in, s * C out); rows ordered (previous, current)
    c_in: int
    c_out: int

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, stride: int) -> Upsampling:
        weight = tensors[f"{name}.conv.weight"]  # (C in, C out, k)
        c_in, c_out, k = weight.shape
        assert k in (stride, 2 * stride), f"{name}: kernel {k} is neither the stride {stride} nor twice it"
        blocks = [block.transpose(1, 2).reshape(c_in, -1) for block in weight.split(stride, 2)]
        bias = tensors[f"{name}.conv.bias"].repeat(stride)
        return cls(Linear(torch.cat(blocks[::-1]).contiguous(), bias), c_in, c_out)

    @property
    def history_shapes(self) -> list[Shape]:
        return [(1, self.c_in)] if len(self.linear.weight) > self.c_in else []

    def __call__(self, x: Tensor, history: History) -> Tensor:
        if len(self.linear.weight) > self.c_in:  # kernel 2s
            whole = extended(x, history)
            # a view of each row together with the one before it
            x = whole.as_strided((*x.shape[:2], 2 * self.c_in), whole.stride())
        return self.linear(x).view(len(x), -1, self.c_out)


@dataclass(frozen=True)
class SnakeBeta:
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9), per channel (upstream's SnakeBeta; Ziyin et al. 2020)."""

    frequency: Tensor  # (C,)
    magnitude: Tensor  # (C,)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str) -> SnakeBeta:
        return cls(tensors[f"{name}.alpha"].exp(), 1.0 / (tensors[f"{name}.beta"].exp() + 1e-9))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`x` (..., L, C), contiguous -> (..., L, C). out: takes the result, may be `x`; None: a new tensor."""
        frequency, magnitude = self._wide
        if x.shape[-2] * x.shape[-1] % len(frequency):
            frequency, magnitude = self.frequency, self.magnitude
        out = torch.empty_like(x) if out is None else out
        wide, wide_out = (signal.view(*x.shape[:-2], -1, len(frequency)) for signal in (x, out))
        wave = (wide * frequency).sin_().square_()
        torch.addcmul(wide, wave, magnitude, out=wide_out)
        return out

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor]:
        """The parameters, repeated to process several rows as one: with twelve channels CPU vectors are half empty."""
        times = max(1, min(8, _WIDTH // len(self.frequency)))
        return self.frequency.repeat(times), self.magnitude.repeat(times)


@dataclass(frozen=True)
class ResidualUnit:
    """Snake, dilated causal convolution, Snake, 1x1 convolution, added to the input."""

    first: SnakeBeta
    conv: CausalConv
    second: SnakeBeta
    mix: Linear

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, rows: int, dilation: int) -> ResidualUnit:
        """rows: input rows per frame."""
        return cls(
            SnakeBeta.load(tensors, f"{name}.act1"),
            CausalConv.load(tensors, f"{name}.conv1", rows, dilation),
            SnakeBeta.load(tensors, f"{name}.act2"),
            Linear.load(tensors, f"{name}.conv2.conv"),
        )

    @property
    def history_shapes(self) -> list[Shape]:
        return self.conv.history_shapes

    def __call__(self, x: Tensor, history: History) -> Tensor:
        h = self.conv(x, history, self.first)
        return self.mix(self.second(h, h)).add_(x)


@dataclass(frozen=True)
class ConvNeXt:
    """Depthwise causal convolution, LayerNorm, two linear layers with exact GELU, scale, residual."""

    taps: Tensor  # (k, C)
    bias: Tensor
    norm: tuple[Tensor, Tensor]
    expand: Linear
    shrink: Linear
    gamma: Tensor

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str) -> ConvNeXt:
        return cls(
            taps=tensors[f"{name}.dwconv.conv.weight"][:, 0].t().contiguous(),
            bias=tensors[f"{name}.dwconv.conv.bias"],
            norm=(tensors[f"{name}.norm.weight"], tensors[f"{name}.norm.bias"]),
            expand=Linear.load(tensors, f"{name}.pwconv1"),
            shrink=Linear.load(tensors, f"{name}.pwconv2"),
            gamma=tensors[f"{name}.gamma"],
        )

    @property
    def history_shapes(self) -> list[Shape]:
        k, channels = self.taps.shape
        return [(k - 1, channels)]

    def __call__(self, x: Tensor, history: History) -> Tensor:
        k, channels = self.taps.shape
        whole = extended(x, history)
        windows = whole.as_strided((*x.shape[:2], k, channels), (*whole.stride()[:2], channels, 1))
        h = (windows * self.taps).sum(2) + self.bias
        h = F.layer_norm(h, (channels,), *self.norm, eps=CONVNEXT_EPS)
        return torch.addcmul(x, self.shrink(F.gelu(self.expand(h))), self.gamma)


_QUERY_BLOCK = 32  # queries whose windows are copied at a time: 19 MB at full size


class CodecTransformer:
    """Eight attention layers (at full size) between two projections; holds weights only."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor], name: str) -> None:
        self.config = config
        self.input = Linear.load(tensors, f"{name}.input_proj")
        self.output = Linear.load(tensors, f"{name}.output_proj")
        self.norm = tensors[f"{name}.norm.weight"]
        layers = range(config.num_hidden_layers)
        self.layers = [AttentionLayer.load(tensors, f"{name}.layers.{i}", config.rms_norm_eps) for i in layers]
        self.inverse_frequency = inverse_frequency(config.head_dim, config.rope_theta).to(self.norm.device)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """`x` (B, n, latent), whose first rows are at `position` (B,) -> (B, n, latent). Updates keys and values (B,
        layers, heads, window - 1, head_dim) and the position in place."""
        at = position[:, None] + torch.arange(x.shape[1], device=x.device)
        angle = at[..., None].float() * self.inverse_frequency  # fp32, as upstream
        angle = torch.cat((angle, angle), -1)[:, :, None, None]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # (B, n, 1, 1, head_dim)
        window = self.config.sliding_window
        before = window - 1 - torch.arange(window, device=x.device)  # distance of each place of the window, in frames
        absent = (before > at[..., None])[:, None, :, None]  # (B, 1, n, 1, window): places before the first frame
        x = self.input(x)
        for layer, layer_keys, layer_values in zip(self.layers, keys.unbind(1), values.unbind(1), strict=True):
            x = layer(x, layer_keys, layer_values, rotary, absent)
        position += x.shape[1]
        return self.output(rms_norm(x, self.norm, self.config.rms_norm_eps))


@dataclass(frozen=True)
class AttentionLayer:
    """One pre-norm layer with layer scale: attention, then a SwiGLU MLP."""

    input_norm: Tensor
    qkv: Linear
    out: Linear
    attention_scale: Tensor
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_scale: Tensor
    eps: float

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, eps: float) -> AttentionLayer:
        def get(part: str) -> Tensor:
            return tensors[f"{name}.{part}"]

        def linear(*parts: str) -> Linear:
            return Linear(torch.cat([get(f"{part}_proj.weight") for part in parts]).t().contiguous(), None)

        return cls(
            input_norm=get("input_layernorm.weight"),
            qkv=linear("self_attn.q", "self_attn.k", "self_attn.v"),
            out=linear("self_attn.o"),
            attention_scale=get("self_attn_layer_scale.scale"),
            post_norm=get("post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate", "mlp.up"),
            down=linear("mlp.down"),
            mlp_scale=get("mlp_layer_scale.scale"),
            eps=eps,
        )

    def __call__(
        self, x: Tensor, keys: Tensor, values: Tensor, rotary: tuple[Tensor, Tensor], absent: Tensor
    ) -> Tensor:
        """`x` (B, n, hidden). Shifts keys and values (B, heads, window - 1, head_dim) by n places. absent: (B, 1, n, 1,
        window), True before frame 0. Every query attends to its own copy of its window of keys, so that its sums do not
        depend on the number of queries."""
        (streams, n, _), (heads, before, head_dim) = x.shape, keys.shape[1:]
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps)).view(streams, n, 3, heads, head_dim)
        q, k = rotate(qkv[:, :, :2], *rotary).permute(2, 0, 3, 1, 4)
        k, v = torch.cat((keys, k), 2), torch.cat((values, qkv[:, :, 2].transpose(1, 2)), 2)
        keys.copy_(k[:, :, n:])
        values.copy_(v[:, :, n:])
        blocks = []
        for start in range(0, n, _QUERY_BLOCK):
            block = slice(start, start + _QUERY_BLOCK)
            near_k, near_v = (t.unfold(2, before + 1, 1)[:, :, block].transpose(3, 4).contiguous() for t in (k, v))
            scores = (q[:, :, block, None] * head_dim**-0.5) @ near_k.transpose(3, 4)  # (B, heads, n, 1, window)
            scores = scores.masked_fill_(absent[:, :, block], -torch.inf).softmax(-1)
            blocks.append((scores @ near_v)[:, :, :, 0])
        attended = torch.cat(blocks, 2).transpose(1, 2).reshape(streams, n, -1)
        x = torch.addcmul(x, self.out(attended), self.attention_scale)
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, -1)
        return torch.addcmul(x, self.down(F.silu(gate) * up), self.mlp_scale)
