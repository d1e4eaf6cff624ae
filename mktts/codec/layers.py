"""Layers of the streaming codec decoder, on channels-last signals (L, C) of one stream.

Every layer is causal. One that looks back takes `history`, an iterator over the state's tensors: it takes the next
one, reads the rows that came before `x`, and writes the newest rows back in place, so addresses never change and
nothing depends on data: the whole pass can be captured in a CUDA graph.
Convolutions are matrix products: no layout copies on CPU, and no TF32 on CUDA, where cuDNN would use it by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import inverse_frequency, rms_norm, rotate
from mktts.spec import CodecConfig

History = Iterator[Tensor]
Shape = tuple[int, int]

CONVNEXT_EPS = 1e-6  # of its LayerNorm, upstream
# Below, MKL sums in another order: one row on all processors, two and three on some (AMD, with AVX-512).
LEAST_ROWS = 4
_LONGEST_SUM = 768  # terms


def extended(x: Tensor, history: History) -> Tensor:
    """`x` (L, C) with the P rows before it: (P + L, C). The history (P, C) then holds the newest P rows."""
    rows = next(history)
    whole = torch.cat((rows, x))
    rows.copy_(whole[len(x) :])
    return whole


def filled_up(x: Tensor) -> Tensor:
    """Rows (R, n), and the first one again up to `LEAST_ROWS`, so that a BLAS makes the same of each of them."""
    missing = LEAST_ROWS - len(x)
    return x if missing <= 0 else torch.cat((x, x[:1].expand(missing, -1)))


@dataclass(frozen=True)
class Linear:
    """x @ weight + bias, whose rows do not depend on how many there are.

    A BLAS cuts long sums by the number of rows and treats a single row in its own way, so a row's last bits depend
    on its company, and this decoder amplifies them. On CPU, sums are therefore cut here, short enough for MKL to
    leave alone, and few rows are filled up to `LEAST_ROWS`: a frame then rounds alike in every chunk it can come in.
    """

    weight: Tensor  # (in, out)
    bias: Tensor | None

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, bias: bool = True) -> Linear:
        """From a linear layer or a convolution of kernel 1."""
        weight = tensors[f"{name}.weight"]
        return cls(weight.flatten(1).t().contiguous(), tensors[f"{name}.bias"] if bias else None)

    def __call__(self, *parts: Tensor) -> Tensor:
        """`parts` (L, n each, `in` in all) -> (L, out)."""
        if parts[0].device.type != "cpu" or parts[0].dtype == torch.bfloat16:
            return self._product(torch.cat(parts, 1) if len(parts) > 1 else parts[0], self.weight)
        rows, y, row = len(parts[0]), None, 0
        for x in (piece for part in parts for piece in part.split(_LONGEST_SUM, 1)):
            x = filled_up(x)
            weight = self.weight[row : row + x.shape[1]]
            row += x.shape[1]
            y = self._product(x, weight) if y is None else y.addmm_(x, weight)
        return y[:rows]

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight if self.bias is None else torch.addmm(self.bias, x, weight)


@dataclass(frozen=True)
class CausalConv:
    """y[t] = bias + sum over j of x[t - (k - 1 - j) * dilation] @ W[j]."""

    taps: Linear  # (k * C in, C out)
    kernel: int
    dilation: int

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, dilation: int = 1) -> CausalConv:
        weight = tensors[f"{name}.conv.weight"]  # (C out, C in, k)
        taps = weight.permute(2, 1, 0).reshape(-1, len(weight))
        return cls(Linear(taps.contiguous(), tensors[f"{name}.conv.bias"]), weight.shape[2], dilation)

    @property
    def history_shapes(self) -> list[Shape]:
        return [((self.kernel - 1) * self.dilation, len(self.taps.weight) // self.kernel)]

    def __call__(self, x: Tensor, history: History) -> Tensor:
        whole = extended(x, history)
        return self.taps(*(whole[j * self.dilation :][: len(x)] for j in range(self.kernel)))


@dataclass(frozen=True)
class Upsampling:
    """Transposed convolution of stride s and kernel s or 2s, right side trimmed: no look-ahead.

    y[n * s : (n + 1) * s] = bias + x[n] @ W[:s] + x[n - 1] @ W[s:], the second term only for kernel 2s.
    """

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
        if self.history_shapes:
            whole = extended(x, history)
            y = self.linear(whole[:-1], whole[1:])
        else:
            y = self.linear(x)
        return y.view(-1, self.c_out)


@dataclass(frozen=True)
class SnakeBeta:
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9), per channel (upstream's SnakeBeta; Ziyin et al. 2020)."""

    frequency: Tensor  # (C,)
    magnitude: Tensor  # (C,)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str) -> SnakeBeta:
        return cls(tensors[f"{name}.alpha"].exp(), 1.0 / (tensors[f"{name}.beta"].exp() + 1e-9))

    def __call__(self, x: Tensor) -> Tensor:
        wave = (x * self.frequency).sin_().square_()
        return torch.addcmul(x, wave, self.magnitude)


@dataclass(frozen=True)
class ResidualUnit:
    """Snake, dilated causal convolution, Snake, 1x1 convolution, added to the input."""

    first: SnakeBeta
    conv: CausalConv
    second: SnakeBeta
    mix: Linear

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, dilation: int) -> ResidualUnit:
        return cls(
            SnakeBeta.load(tensors, f"{name}.act1"),
            CausalConv.load(tensors, f"{name}.conv1", dilation),
            SnakeBeta.load(tensors, f"{name}.act2"),
            Linear.load(tensors, f"{name}.conv2.conv"),
        )

    @property
    def history_shapes(self) -> list[Shape]:
        return self.conv.history_shapes

    def __call__(self, x: Tensor, history: History) -> Tensor:
        return self.mix(self.second(self.conv(self.first(x), history))).add_(x)


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
        windows = extended(x, history).as_strided((len(x), k, channels), (channels, channels, 1))
        h = (windows * self.taps).sum(1) + self.bias
        h = F.layer_norm(h, (channels,), *self.norm, eps=CONVNEXT_EPS)
        return torch.addcmul(x, self.shrink(F.gelu(self.expand(h))), self.gamma)


_QUERY_BLOCK = 32  # queries whose windows are copied out at a time: 19 MB at full size


class CodecTransformer:
    """Eight layers (at full size) between two projections; weights only."""

    def __init__(self, config: CodecConfig, tensors: Mapping[str, Tensor], name: str) -> None:
        self.config = config
        self.input = Linear.load(tensors, f"{name}.input_proj")
        self.output = Linear.load(tensors, f"{name}.output_proj")
        self.norm = tensors[f"{name}.norm.weight"]
        layers = range(config.num_hidden_layers)
        self.layers = [AttentionLayer.load(tensors, f"{name}.layers.{i}", config.rms_norm_eps) for i in layers]
        self.inverse_frequency = inverse_frequency(config.head_dim, config.rope_theta).to(self.norm.device)

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys, and of the values, that a stream carries: (layers, heads, window - 1, head_dim)."""
        c = self.config
        return c.num_hidden_layers, c.num_attention_heads, c.sliding_window - 1, c.head_dim

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """`x` (n, latent), the first row at `position` (). Updates keys, values and position in place."""
        steps = torch.arange(len(x), device=x.device)
        angle = torch.outer((steps + position).float(), self.inverse_frequency)  # fp32, as upstream
        angle = torch.cat((angle, angle), -1)
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        window = self.config.sliding_window
        before = window - 1 - torch.arange(window, device=x.device)  # how far back each place of the window lies
        absent = before > (steps + position)[:, None]  # (n, window): places before the first frame
        x = self.input(x)
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            x = layer(x, layer_keys, layer_values, rotary, absent)
        position += len(x)
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
        """`x` (n, hidden); `keys` and `values` (heads, window - 1, head_dim) move on by n places."""
        n, (heads, _, head_dim) = len(x), keys.shape
        q, k, v = self.qkv(rms_norm(x, self.input_norm, self.eps)).view(n, 3, heads, head_dim).permute(1, 2, 0, 3)
        k, v = torch.cat((keys, rotate(k, *rotary)), 1), torch.cat((values, v), 1)
        keys.copy_(k[:, n:])
        values.copy_(v[:, n:])
        attended = window_attention(rotate(q, *rotary), k, v, absent)
        x = torch.addcmul(x, self.out(attended.transpose(0, 1).reshape(n, -1)), self.attention_scale)
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, -1)
        return torch.addcmul(x, self.down(F.silu(gate) * up), self.mlp_scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, absent: Tensor) -> Tensor:
    """Attention of query t to keys t .. t + window - 1: (heads, n, head_dim).

    `q` (heads, n, head_dim); `k`, `v` (heads, window - 1 + n, head_dim); `absent` (n, window) is True before frame 0.
    Every query sees its own copy of its window, so its sums do not depend on how many queries come with it.
    """
    window = absent.shape[1]
    blocks = []
    for start in range(0, q.shape[1], _QUERY_BLOCK):
        block = slice(start, start + _QUERY_BLOCK)
        keys, values = (t.unfold(1, window, 1)[:, block].transpose(2, 3).contiguous() for t in (k, v))
        scores = (q[:, block, None] * q.shape[-1] ** -0.5) @ keys.transpose(2, 3)  # (heads, n, 1, window)
        scores = scores.masked_fill(absent[block, None], -torch.inf).softmax(-1)
        blocks.append((scores @ values)[:, :, 0])
    return torch.cat(blocks, 1)
