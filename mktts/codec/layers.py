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
