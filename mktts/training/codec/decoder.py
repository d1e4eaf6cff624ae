"""The codec decoder as a trainable module: layer by layer what mktts.codec.decoder streams, with the Hub's names.

Signals are (batch, channels, time). Every layer is causal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.codec.layers import CONVNEXT_EPS
from mktts.model.qwen3 import inverse_frequency, rotate
from mktts.spec import CodecConfig

_LAYER_SCALE = 0.1  # at the start; the released 0.01 suits longer training


class TrainableConv(nn.Module):
    """Convolution padded on the left only, or of the left neighbours only."""

    def __init__(self, c_in: int, c_out: int, kernel: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation, groups=groups)
        self.left = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.left, 0)))


class TrainableUpsampling(nn.Module):
    """Transposed convolution whose right overhang is cut off."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(c_in, c_out, kernel, stride)
        self.overhang = kernel - stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y[..., : y.shape[-1] - self.overhang]


class TrainableSnake(nn.Module):
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9), in fp32: the phase does not survive bf16."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        wave = torch.sin(x * self.alpha.exp()[:, None]).square()
        return x + wave / (self.beta.exp()[:, None] + 1e-9)


class TrainableResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = TrainableSnake(channels)
        self.conv1 = TrainableConv(channels, channels, 7, dilation)
        self.act2 = TrainableSnake(channels)
        self.conv2 = TrainableConv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class Block(nn.Module):
    """Snake, up-sampling by `rate` into half the channels, three residual units."""

    def __init__(self, c_in: int, rate: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        c_out = c_in // 2
        units = [TrainableResidualUnit(c_out, dilation) for dilation in dilations]
        self.block = nn.Sequential(TrainableSnake(c_in), TrainableUpsampling(c_in, c_out, 2 * rate, rate), *units)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class TrainableConvNeXt(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = TrainableConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=CONVNEXT_EPS)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), _LAYER_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).transpose(1, 2))
        h = self.pwconv2(F.gelu(self.pwconv1(h)))
        return x + (self.gamma * h).transpose(1, 2)


class WindowAttention(nn.Module):
    def __init__(self, c: CodecConfig) -> None:
        super().__init__()
        inner = c.num_attention_heads * c.head_dim
        self.heads = c.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(c.hidden_size, inner, bias=False))
        self.o_proj = nn.Linear(inner, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rotary).to(v.dtype), rotate(k, *rotary).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), _LAYER_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class TransformerLayer(nn.Module):
    def __init__(self, c: CodecConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = WindowAttention(c)
        self.self_attn_layer_scale = LayerScale(c.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size)
        self.mlp_layer_scale = LayerScale(c.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary, mask))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    def __init__(self, c: CodecConfig) -> None:
        super().__init__()
        self.config = c
        self.input_proj = nn.Linear(c.latent_dim, c.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.output_proj = nn.Linear(c.hidden_size, c.latent_dim)
        self.register_buffer("frequency", inverse_frequency(c.head_dim, c.rope_theta), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, latent, T) -> the same shape."""
        position = torch.arange(x.shape[-1], device=x.device)
        angle = torch.outer(position.float(), self.frequency)
        angle = torch.cat((angle, angle), -1)
        ago = position[:, None] - position
        mask = (ago >= 0) & (ago < self.config.sliding_window)
        h = self.input_proj(x.transpose(1, 2)).float()
        for layer in self.layers:
            h = layer(h, (angle.cos(), angle.sin()), mask)
        return self.output_proj(self.norm(h)).transpose(1, 2)


class Decoder(nn.Module):
    """Summed codebook vectors (B, codebook_dim, T) -> PCM (B, T * samples per frame), not clamped."""

    def __init__(self, c: CodecConfig) -> None:
        super().__init__()
        self.pre_conv = TrainableConv(c.codebook_dim, c.latent_dim, 3)
        self.pre_transformer = Transformer(c)
        stages = [
            nn.Sequential(TrainableUpsampling(c.latent_dim, c.latent_dim, r, r), TrainableConvNeXt(c.latent_dim))
            for r in c.upsampling_ratios
        ]
        self.upsample = nn.ModuleList(stages)
        width, layers = c.decoder_dim, [TrainableConv(c.latent_dim, c.decoder_dim, 7)]
        for rate in c.upsample_rates:
            layers.append(Block(width, rate, c.dilations))
            width //= 2
        self.decoder = nn.ModuleList([*layers, TrainableSnake(width), TrainableConv(width, 1, 7)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre_transformer(self.pre_conv(x))
        for stage in (*self.upsample, *self.decoder[:-3]):
            x = stage(x)
        with torch.autocast(x.device.type, enabled=False):  # at 24 kHz bf16's rounding would be heard as noise
            x = x.float()
            for stage in self.decoder[-3:]:
                x = stage(x)
        return x[:, 0]
