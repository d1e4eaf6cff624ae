"""The codec encoder as a trainable module: the convolutions of a Mimi encoder, with the Hub's names.

Causal; signals are (batch, channels, time).
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from mktts.random_codec_config import Json


class StridedConv(nn.Module):
    """Causal convolution; `repeat`: the first row stands before the signal instead of zeros (Mimi's last stride)."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int, stride: int = 1, dilation: int = 1, *, repeat: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, stride, dilation=dilation, bias=not repeat)
        self.left = (kernel - 1) * dilation + 1 - stride
        self.mode = "replicate" if repeat else "constant"

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.left, 0), mode=self.mode))


class Residual(nn.Module):
    def __init__(self, width: int, inner: int, kernel: int, dilation: int) -> None:
        super().__init__()
        first = StridedConv(width, inner, kernel, dilation=dilation)
        self.block = nn.Sequential(nn.ELU(), first, nn.ELU(), StridedConv(inner, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Convolutions(nn.Module):
    def __init__(self, c: Json) -> None:
        super().__init__()
        width = c["num_filters"]
        layers: list[nn.Module] = [StridedConv(c["audio_channels"], width, c["kernel_size"])]
        for ratio in reversed(c["upsampling_ratios"]):
            for j in range(c["num_residual_layers"]):
                dilation = c["dilation_growth_rate"] ** j
                layers.append(Residual(width, width // c["compress"], c["residual_kernel_size"], dilation))
            layers += [nn.ELU(), StridedConv(width, 2 * width, 2 * ratio, ratio)]
            width *= 2
        layers += [nn.ELU(), StridedConv(width, c["hidden_size"], c["last_kernel_size"])]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Encoder(nn.Module):
    """PCM (B, T * samples per frame) -> (B, hidden_size, T). `config` is the file's encoder_config."""

    def __init__(self, config: Json) -> None:
        super().__init__()
        self.encoder = Convolutions(config)
        rate_hz = config["sampling_rate"] / math.prod(config["upsampling_ratios"])
        stride = int(rate_hz / config["_frame_rate"])
        self.downsample = StridedConv(config["hidden_size"], config["hidden_size"], 2 * stride, stride, repeat=True)

    def forward(self, pcm: Tensor) -> Tensor:
        return self.downsample(self.encoder(pcm[:, None]))
