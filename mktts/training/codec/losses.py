"""What the codec learns from: log-mel and STFT distances at several resolutions, waveform, discriminators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.spec import SAMPLE_RATE_HZ

_CPU = torch.device("cpu")
# Of magnitudes before the logarithm, where a full-scale sine is 1: -100 dBFS. White noise has 2.2 / sqrt(window) of its
# RMS there, so 16 bits hold still less, and quiet consonants lie at 1e-4.
_FLOOR = 1e-5
_MEL_WINDOWS = ((256, 32), (512, 64), (1024, 80), (2048, 80))  # samples, bands
_NOISE_HZ = (3_000.0, 4_500.0)
_STFT_WINDOWS = (384, 768, 1536)
_DISCRIMINATOR_WINDOWS = (512, 1024, 2048)
_PERIODS = (2, 3, 5, 7, 11)


def magnitudes(pcm: Tensor, window: int) -> Tensor:
    """Short-time magnitudes at a hop of a quarter window: (B, n) -> (B, window // 2 + 1, frames), fp32."""
    return _spectrum(pcm, window).abs()


def mel_distance(a: Tensor, b: Tensor, window: int = 1024, bands: int = 80) -> Tensor:
    """Mean |difference| of natural-log mel magnitudes of PCM (B, n)."""
    mel = mel_filters(window, bands, a.device)
    x, y = (torch.log((mel @ magnitudes(pcm, window)).clamp(min=_FLOOR)) for pcm in (a, b))
    return (x - y).abs().mean()


def spectral_losses(renderings: Sequence[Tensor], target: Tensor) -> dict[str, Tensor]:
    """`mel`, `stft` (convergence plus log magnitude; Yamamoto et al. 2020), `wave`: scalars, of PCM (B, n) each.

    Two renderings of the same codes, of independent noise: of what lies above 3 to 4.5 kHz, the mean distance to the
    target less half the distance between the two, the energy distance (Gritsenko et al. 2020). Of one rendering it asks
    for the middle of all sounds that the codes may stand for, of which noise is not one; of two it is least where they
    vary as the targets do. Below, speech is hardly noise, and what the codes leave open would become a quaver, which
    costs words: there half the distance between the two is added. One rendering: the plain distance.
    """
    goal, found = _views(target), [_views(rendering) for rendering in renderings]
    size = [magnitude.norm().clamp(min=_FLOOR) for magnitude in goal.magnitudes]
    fits = [_distances(views, goal, size) for views in found]
    losses = {name: sum(fit[name] for fit in fits) / len(fits) for name in fits[0]}
    if len(found) > 1:
        first, second = found[:2]
        losses["mel"] = losses["mel"] - 0.5 * _apart(first.mels, second.mels, _MEL_WINDOWS)
        losses["stft"] = losses["stft"] - 0.5 * _apart(first.logs, second.logs, [(w, None) for w in _STFT_WINDOWS])
    return losses


class _Views(NamedTuple):
    pcm: Tensor
    mels: list[Tensor]
    magnitudes: list[Tensor]
    logs: list[Tensor]


def _views(pcm: Tensor) -> _Views:
    mels = [
        torch.log((mel_filters(window, bands, pcm.device) @ magnitudes(pcm, window)).clamp(min=_FLOOR))
        for window, bands in _MEL_WINDOWS
    ]
    found = [magnitudes(pcm, window) for window in _STFT_WINDOWS]
    return _Views(pcm, mels, found, [x.clamp(min=_FLOOR).log() for x in found])


def _apart(a: list[Tensor], b: list[Tensor], sizes: Sequence[tuple[int, int | None]]) -> Tensor:
    """Mean |difference| of log spectra where they are to vary, less that where they are not. sizes: window, bands."""
    distances = [
        ((x - y).abs() * _noise_share(window, bands, x.device)).mean()
        for x, y, (window, bands) in zip(a, b, sizes, strict=True)
    ]
    return sum(distances) / len(distances)


@cache
@torch.inference_mode(False)
def _noise_share(window: int, bands: int | None, device: torch.device) -> Tensor:
    """Of a bin, or a mel band, (bins or bands, 1): -1 below 3 kHz, where it is not to vary, 1 from 4.5 kHz on."""
    hz = torch.linspace(0, SAMPLE_RATE_HZ / 2, window // 2 + 1)
    share = 2 * ((hz - _NOISE_HZ[0]) / (_NOISE_HZ[1] - _NOISE_HZ[0])).clamp(0, 1)[:, None] - 1
    return (share if bands is None else mel_filters(window, bands) @ share).to(device)


def _distances(a: _Views, b: _Views, size: Sequence[Tensor]) -> dict[str, Tensor]:
    """size: of the target's magnitudes, which convergence is relative to."""
    mel = sum((x - y).abs().mean() for x, y in zip(a.mels, b.mels, strict=True)) / len(a.mels)
    # equal renderings have no gradient of their norm; the smallest of numbers gives them one of zero
    norms = [(x - y).square().sum().add(1e-12).sqrt() for x, y in zip(a.magnitudes, b.magnitudes, strict=True)]
    convergence = sum(norm / whole for norm, whole in zip(norms, size, strict=True))
    log = sum((x - y).abs().mean() for x, y in zip(a.logs, b.logs, strict=True))
    return {"mel": mel, "stft": (convergence + log) / len(size), "wave": (a.pcm - b.pcm).abs().mean()}


class Discriminators(nn.Module):
    """Small judges of spectrograms at three resolutions and of the waveform folded by five periods."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.spectral = nn.ModuleList(_judge(2, channels, (3, 9), (1, 2)) for _ in _DISCRIMINATOR_WINDOWS)
        self.periodic = nn.ModuleList(_judge(1, channels, (5, 1), (3, 1)) for _ in _PERIODS)

    def forward(self, pcm: Tensor) -> list[list[Tensor]]:
        """Of PCM (B, n): every layer's output of every judge, the verdict last."""
        seen = []
        for window, judge in zip(_DISCRIMINATOR_WINDOWS, self.spectral, strict=True):
            spectrum = _spectrum(pcm, window).transpose(1, 2)
            seen.append(_layers(judge, torch.stack((spectrum.real, spectrum.imag), 1)))
        for period, judge in zip(_PERIODS, self.periodic, strict=True):
            folded = F.pad(pcm, (0, -pcm.shape[1] % period)).unflatten(1, (-1, period))
            seen.append(_layers(judge, folded[:, None]))
        return seen


def judges_loss(real: list[list[Tensor]], fake: list[list[Tensor]]) -> Tensor:
    """Least squares: 1 for the teacher's audio, 0 for the decoder's (Mao et al. 2017)."""
    pairs = zip(real, fake, strict=True)
    return sum((1 - r[-1].float()).square().mean() + f[-1].float().square().mean() for r, f in pairs) / len(real)


def deceiving_losses(real: list[list[Tensor]], fake: list[list[Tensor]]) -> dict[str, Tensor]:
    """`adversarial`, and `features`: distance of the judges' inner layers, relative to their size."""
    adversarial = sum((1 - f[-1].float()).square().mean() for f in fake) / len(fake)
    distances = [
        (x.float().detach() - y.float()).abs().mean() / x.float().detach().abs().mean().clamp(min=_FLOOR)
        for r, f in zip(real, fake, strict=True)
        for x, y in zip(r[:-1], f[:-1], strict=True)
    ]
    return {"adversarial": adversarial, "features": sum(distances) / len(distances)}


def _judge(c_in: int, channels: int, kernel: tuple[int, int], stride: tuple[int, int]) -> nn.ModuleList:
    widths = (c_in, channels, 2 * channels, 4 * channels, 4 * channels)
    padding = tuple(k // 2 for k in kernel)
    layers = [nn.Conv2d(a, b, kernel, stride, padding) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.ModuleList(nn.utils.parametrizations.weight_norm(c) for c in (*layers, nn.Conv2d(widths[-1], 1, 3, 1, 1)))


def _layers(judge: nn.ModuleList, x: Tensor) -> list[Tensor]:
    seen = []
    for layer in judge[:-1]:
        x = F.leaky_relu(layer(x), 0.1)
        seen.append(x)
    return [*seen, judge[-1](x)]


def _spectrum(pcm: Tensor, window: int) -> Tensor:
    shape = torch.hann_window(window, device=pcm.device)
    # 2 / window / mean(hann) = 4 / window: a full-scale sine has magnitude 1 in every resolution
    return torch.stft(pcm.float(), window, window // 4, window=shape, return_complex=True) * (4 / window)


@cache
@torch.inference_mode(False)  # kept for training, even where an analysis asks first
def mel_filters(window: int, bands: int, device: torch.device = _CPU) -> Tensor:
    """Triangular filters equally spaced on the mel scale, each summing to 1: (bands, window // 2 + 1).

    Kept on every device that asks: a copy to the device waits for all that was launched before it.
    """
    if device != _CPU:
        return mel_filters(window, bands).to(device)

    def mel(hz: Tensor) -> Tensor:
        return 2595 * torch.log10(1 + hz / 700)

    edges_mel = torch.linspace(0, float(mel(torch.tensor(SAMPLE_RATE_HZ / 2))), bands + 2)
    bins_mel = mel(torch.linspace(0, SAMPLE_RATE_HZ / 2, window // 2 + 1))
    low, centre, high = (edges_mel[i : i + bands, None] for i in range(3))
    weights = torch.minimum((bins_mel - low) / (centre - low), (high - bins_mel) / (high - centre)).clamp(min=0)
    # low bands of short windows fall between two bins: they take the nearer one
    nearest = F.one_hot((bins_mel - centre).abs().argmin(1), window // 2 + 1)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, nearest.float())
    return weights / weights.sum(1, keepdim=True)
