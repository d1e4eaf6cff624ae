"""What the codec learns from: spectra of several resolutions, what repeats in every band, discriminators."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge.signal import STEP_SAMPLES
from mktts.training.weights import fused

_FLOOR = 1e-5  # of magnitudes before the logarithm, where a full-scale sine is 1: -100 dBFS, below what 16 bits hold
_MEL_WINDOWS = ((256, 40), (512, 64), (1024, 96), (2048, 128))  # samples, bands
_DISCRIMINATOR_WINDOWS = (512, 1024, 2048)
_PERIODS = (2, 3, 5, 7, 11)
# What repeats: edges of the bands half an octave apart, windows, and the periods that are looked at: of any voice's
# pitch, and of the decoder's steps of 20 ms and twice that.
EDGES_HZ = (300, 425, 600, 850, 1200, 1700, 2400, 3400, 4800, 6800, 11_000)
_REPEATED_SAMPLES, _REPEATED_HOP, _TRANSFORM = 2560, 1280, 4096
_LAGS = slice(48, 1008)  # samples: 2 to 42 ms
_LOUD = 1e-3  # RMS of a band, of full scale: a fainter one is not compared


def mel_distance(a: Tensor, b: Tensor, window: int = 1024, bands: int = 80) -> Tensor:
    """Mean |difference| of natural-log mel magnitudes of PCM (B, n)."""
    mel = mel_filters(window, bands, a.device)
    x, y = (torch.log((mel @ spectrum(pcm, window).abs()).clamp(min=_FLOOR)) for pcm in (a, b))
    return (x - y).abs().mean()


def mel_loss(pcm: Tensor, target: Tensor) -> Tensor:
    """Mean of `mel_distance` at four resolutions, up to 12 kHz."""
    return sum(mel_distance(pcm, target, *size) for size in _MEL_WINDOWS) / len(_MEL_WINDOWS)


def repetition(pcm: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How each band of PCM (B, n) resembles itself 2 to 42 ms later, beside the target's.

    -> (), the mean squared difference of their autocorrelations in 107 ms windows of which the target's band is loud
    enough; and (bands,), how much more of `pcm` than of the target repeats after 20 ms, without a gradient.
    """
    ours, theirs = _autocorrelations(pcm), _autocorrelations(target)
    weight = (theirs[..., :1] > _LOUD**2).float()  # (B, windows, bands, 1)
    x, y = (found[..., 1:] for found in (ours, theirs))
    loss = (weight * (x - y).square()).sum() / (weight.sum() * x.shape[-1]).clamp(min=1)
    step = STEP_SAMPLES - _LAGS.start
    more = (weight[..., 0] * (x - y)[..., step]).sum((0, 1)) / weight[..., 0].sum((0, 1)).clamp(min=1)
    return loss, more.detach()


def _autocorrelations(pcm: Tensor) -> Tensor:
    """(B, windows, bands, 1 + lags): the mean square of each band, then its normalised autocorrelation."""
    shape = torch.hann_window(_REPEATED_SAMPLES, device=pcm.device)
    windows = pcm.float().unfold(1, _REPEATED_SAMPLES, _REPEATED_HOP) * shape
    power = torch.fft.rfft(windows, _TRANSFORM).abs().square()
    found = torch.fft.irfft(power[..., None, :] * _bands(pcm.device))
    level = found[..., :1] / shape.square().sum()
    return torch.cat((level, found[..., _LAGS] / (found[..., :1] + _FLOOR**2 * _REPEATED_SAMPLES)), -1)


@cache
@torch.inference_mode(False)
def _bands(device: torch.device) -> Tensor:
    hz = torch.linspace(0, SAMPLE_RATE_HZ / 2, _TRANSFORM // 2 + 1)
    bands = [((hz >= a) & (hz < b)).float() for a, b in zip(EDGES_HZ, EDGES_HZ[1:], strict=False)]
    return torch.stack(bands).to(device)


class Discriminators(nn.Module):
    """Judges of spectra at three resolutions and of the waveform folded by five periods (Kong et al. 2020).

    Spectra have many more places than a folded wave: their judges stay narrow.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow, wide = (channels,) * 4, (channels, 4 * channels, 8 * channels, 8 * channels)
        self.spectral = nn.ModuleList(_judge((2, *narrow), (3, 9), (1, 2)) for _ in _DISCRIMINATOR_WINDOWS)
        self.periodic = nn.ModuleList(_judge((1, *wide), (5, 1), (3, 1)) for _ in _PERIODS)

    def forward(self, pcm: Tensor) -> list[list[Tensor]]:
        """Of PCM (B, n): every layer's output of every judge, the verdict last."""
        seen = []
        for window, judge in zip(_DISCRIMINATOR_WINDOWS, self.spectral, strict=True):
            seen_by = spectrum(pcm, window).transpose(1, 2) * (window / 4)  # or biases would drown faint bands
            seen.append(_layers(judge, torch.stack((seen_by.real, seen_by.imag), 1)))
        for period, judge in zip(_PERIODS, self.periodic, strict=True):
            folded = F.pad(pcm, (0, -pcm.shape[1] % period)).unflatten(1, (-1, period))
            seen.append(_layers(judge, folded[:, None]))
        return seen


def adversarial_losses(real: list[list[Tensor]], fake: list[list[Tensor]]) -> dict[str, Tensor]:
    """`judges`: least squares, 1 for the teacher's audio and 0 for the decoder's (Mao et al. 2017); `adversarial`, what
    the decoder wants; and `features`: distance of the judges' inner layers, relative to their size."""
    pairs = list(zip(real, fake, strict=True))
    judged = sum((1 - r[-1].float()).square().mean() + f[-1].float().square().mean() for r, f in pairs) / len(pairs)
    adversarial = sum((1 - f[-1].float()).square().mean() for f in fake) / len(fake)
    inner = [layers for r, f in pairs for layers in zip(r[:-1], f[:-1], strict=True)]
    distances = [fused(_relative_distance, x)(x.detach(), y) for x, y in inner]
    return {"judges": judged, "adversarial": adversarial, "features": sum(distances) / len(distances)}


def _relative_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() - y.float()).abs().mean() / x.float().abs().mean().clamp(min=_FLOOR)


def _judge(widths: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int]) -> nn.ModuleList:
    padding = tuple(k // 2 for k in kernel)
    layers = [nn.Conv2d(a, b, kernel, stride, padding) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.ModuleList(nn.utils.parametrizations.weight_norm(c) for c in (*layers, nn.Conv2d(widths[-1], 1, 3, 1, 1)))


def _layers(judge: nn.ModuleList, x: Tensor) -> list[Tensor]:
    seen = []
    for layer in judge:
        # as bf16 convolutions want it; their input then becomes so too
        weight = layer.weight.contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, weight, layer.bias, layer.stride, layer.padding)
        if layer is not judge[-1]:
            x = F.leaky_relu(x, 0.1)
        seen.append(x)
    return seen


def spectrum(pcm: Tensor, window: int) -> Tensor:
    """Short-time spectra at a hop of a quarter window: (B, n) -> (B, window // 2 + 1, frames), complex."""
    shape = torch.hann_window(window, device=pcm.device)
    # 2 / window / mean(hann) = 4 / window: a full-scale sine has magnitude 1 in every resolution
    return torch.stft(pcm.float(), window, window // 4, window=shape, return_complex=True) * (4 / window)


@cache  # on the device: a copy to it waits for all that was launched before
@torch.inference_mode(False)
def mel_filters(window: int, bands: int, device: torch.device) -> Tensor:
    """Triangular filters equally spaced on the mel scale, each summing to 1: (bands, window // 2 + 1)."""
    bins_mel = 2595 * torch.log10(1 + torch.linspace(0, SAMPLE_RATE_HZ / 2, window // 2 + 1) / 700)
    edges_mel = torch.linspace(0, float(bins_mel[-1]), bands + 2)
    low, centre, high = (edges_mel[i : i + bands, None] for i in range(3))
    weights = torch.minimum((bins_mel - low) / (centre - low), (high - bins_mel) / (high - centre)).clamp(min=0)
    # low bands of short windows fall between two bins: they take the nearer one
    nearest = F.one_hot((bins_mel - centre).abs().argmin(1), window // 2 + 1)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, nearest.float())
    return (weights / weights.sum(1, keepdim=True)).to(device)
