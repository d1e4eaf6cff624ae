"""The codec's decoder to train: layer by layer what mktts.codec.decoder streams, with the Hub's names.

Signals are (batch, channels, time). Every layer is causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.codec.layers import CONVNEXT_EPS
from mktts.spec import CodecConfig
from mktts.training.weights import Weights, fused, rotary

_LAYER_SCALE = 0.1  # at the start; the released 0.01 suits longer training


class Decoder(nn.Module):
    """Summed codebook vectors (B, codebook_dim, T) -> PCM (B, T * samples per frame), not clamped."""

    def __init__(self, config: CodecConfig, raw: Mapping[str, Any]) -> None:
        """raw: speech_tokenizer/config.json."""
        super().__init__()
        self.config = config
        shapes = {name: spec.shape for name, spec in expected_codec_tensors(raw, encoder=False).items()}
        self.w = Weights({name: s for name, s in shapes.items() if ".quantizer." not in name}, _initial)

    def forward(self, x: Tensor) -> Tensor:
        x = self._transformer(self._conv("decoder.pre_conv", x))
        for i, rate in enumerate(self.config.upsampling_ratios):
            x = self._convnext(f"decoder.upsample.{i}.1", self._wider(f"decoder.upsample.{i}.0", x, rate))
        x = self._conv("decoder.decoder.0", x)
        rates = self.config.upsample_rates
        for i, rate in enumerate(rates[:-1], start=1):
            x = self._block(f"decoder.decoder.{i}.block", x, rate)
        with torch.autocast(x.device.type, enabled=False):  # at 24 kHz bf16's rounding would be heard as noise
            last = len(rates)
            x = self._block(f"decoder.decoder.{last}.block", x.float(), rates[-1])
            x = self._conv(f"decoder.decoder.{last + 2}", self._snake(f"decoder.decoder.{last + 1}", x))
        return x[:, 0]

    def _conv(self, name: str, x: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
        """Padded on the left only."""
        weight = self.w[f"{name}.conv.weight"]
        left = (weight.shape[2] - 1) * dilation
        return F.conv1d(F.pad(x, (left, 0)), weight, self.w[f"{name}.conv.bias"], dilation=dilation, groups=groups)

    def _wider(self, name: str, x: Tensor, stride: int) -> Tensor:
        """Transposed convolution whose right overhang is cut off."""
        y = F.conv_transpose1d(x, self.w[f"{name}.conv.weight"], self.w[f"{name}.conv.bias"], stride)
        return y[..., : x.shape[-1] * stride]

    def _snake(self, name: str, x: Tensor) -> Tensor:
        return fused(snake, x)(x, self.w[f"{name}.alpha"], self.w[f"{name}.beta"])

    def _block(self, name: str, x: Tensor, rate: int) -> Tensor:
        """Snake, up-sampling by `rate` into half the channels, three residual units."""
        x = self._wider(f"{name}.1", self._snake(f"{name}.0", x), rate)
        for i, dilation in enumerate(self.config.dilations, start=2):
            y = self._conv(f"{name}.{i}.conv1", self._snake(f"{name}.{i}.act1", x), dilation)
            x = x + self._conv(f"{name}.{i}.conv2", self._snake(f"{name}.{i}.act2", y))
        return x

    def _convnext(self, name: str, x: Tensor) -> Tensor:
        h = self._conv(f"{name}.dwconv", x, groups=x.shape[1]).transpose(1, 2)
        h = F.layer_norm(h, h.shape[-1:], self.w[f"{name}.norm.weight"], self.w[f"{name}.norm.bias"], CONVNEXT_EPS)
        h = self.w.linear(f"{name}.pwconv2", F.gelu(self.w.linear(f"{name}.pwconv1", h)))
        return x + (self.w[f"{name}.gamma"] * h).transpose(1, 2)

    def _transformer(self, x: Tensor) -> Tensor:
        """(B, latent, T) -> the same shape."""
        c, root = self.config, "decoder.pre_transformer"
        at = torch.arange(x.shape[-1], device=x.device)
        ago = at[:, None] - at
        mask = (ago >= 0) & (ago < c.sliding_window)
        turned = rotary(x.shape[-1], c.head_dim, c.rope_theta, x.device)
        h = self.w.linear(f"{root}.input_proj", x.transpose(1, 2)).float()
        for i in range(c.num_hidden_layers):
            layer, eps = f"{root}.layers.{i}", c.rms_norm_eps
            seen = self.w.norm(f"{layer}.input_layernorm", h, eps)
            seen = self.w.attention(f"{layer}.self_attn", seen, c.head_dim, turned, eps, mask)
            h = h + self.w[f"{layer}.self_attn_layer_scale.scale"] * seen
            inner = self.w.mlp(f"{layer}.mlp", self.w.norm(f"{layer}.post_attention_layernorm", h, eps))
            h = h + self.w[f"{layer}.mlp_layer_scale.scale"] * inner
        return self.w.linear(f"{root}.output_proj", self.w.norm(f"{root}.norm", h, c.rms_norm_eps)).transpose(1, 2)


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9) of x (B, channels, time); in fp32, as the phase does not survive
    bf16."""
    wide = x.float()
    return (wide + torch.sin(wide * alpha.exp()[:, None]).square() / (beta.exp()[:, None] + 1e-9)).to(x.dtype)


def _initial(name: str, parameter: Tensor) -> None:
    if name.endswith((".alpha", ".beta", ".bias")):
        parameter.zero_()
    elif name.endswith((".scale", ".gamma")):
        parameter.fill_(_LAYER_SCALE)
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        nn.init.kaiming_uniform_(parameter, 5**0.5)  # torch's own for convolutions and linear layers
