"""What spectra do not say of a decoder that works in steps: noise that repeats, and a click before all sound."""

from __future__ import annotations

import torch
from torch import Tensor

from mktts.spec import SAMPLE_RATE_HZ

LAGS_S = (0.020, 0.040, 0.060, 0.080)  # the decoder's step before its last up-sampling, its multiples up to a frame
_BAND_HZ = (3_500.0, 7_200.0)  # where speech is mostly noise
_WINDOW_S, _HOP_S = 0.040, 0.020
_LOUD = 10 ** (-60 / 20)  # RMS of the band in the target, of full scale
_FLOOR = 1e-4  # of levels: -80 dBFS
_DOUBLINGS = 9
_START_SAMPLES = 2**_DOUBLINGS


def repetition(pcm: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How a band of noise resembles itself one step, two, three and four steps later, beside the target's.

    PCM (B, n) each -> (), the mean squared difference of their normalised correlations in 40 ms windows of which the
    target is loud enough; and (4,), the mean correlation of `pcm` at each lag, without a gradient.
    """
    ours, theirs = _band(pcm), _band(target)
    loss, found = pcm.new_zeros(()), []
    for lag_s in LAGS_S:
        x, _ = _correlation(ours, lag_s)
        y, level = _correlation(theirs, lag_s)
        weight = (level > _LOUD).float()
        count = weight.sum().clamp(min=1)
        loss = loss + (weight * (x - y).square()).sum() / count / len(LAGS_S)
        found.append((weight * x.detach()).sum() / count)
    return loss, torch.stack(found)


def onset(pcm: Tensor, target: Tensor) -> Tensor:
    """Mean |difference| of levels (natural log, down to -80 dBFS) of parts of the first 21 ms of PCM (B, n).

    The parts are sample 0, sample 1, and from there each as long as all before it. The first samples count for
    themselves: layers that begin with a history of zeros, and not of what silence is to them, make a click of one.
    """
    heads = torch.stack((pcm, target))[..., :_START_SAMPLES].float().square()
    parts = [heads[..., :1], *(heads[..., n : 2 * n] for n in map((2).__pow__, range(_DOUBLINGS)))]
    x, y = ((torch.stack([part.mean(-1) for part in parts]) + _FLOOR**2).log() / 2).unbind(1)
    return (x - y).abs().mean()


def _band(pcm: Tensor) -> Tensor:
    n = pcm.shape[1]
    hz = torch.arange(n // 2 + 1, device=pcm.device) * (SAMPLE_RATE_HZ / n)
    kept = ((hz >= _BAND_HZ[0]) & (hz <= _BAND_HZ[1])).float()
    return torch.fft.irfft(torch.fft.rfft(pcm.float()) * kept, n)


def _correlation(band: Tensor, lag_s: float) -> tuple[Tensor, Tensor]:
    """Normalised correlation of windows with those `lag_s` later, and the smaller RMS of both: (B, windows) each."""
    lag, window, hop = (round(s * SAMPLE_RATE_HZ) for s in (lag_s, _WINDOW_S, _HOP_S))
    now, later = (part.unfold(1, window, hop) for part in (band[:, :-lag], band[:, lag:]))
    a, b = now.square().mean(-1), later.square().mean(-1)
    return (now * later).mean(-1) / (a * b + _FLOOR**4).sqrt(), torch.minimum(a, b).sqrt()
