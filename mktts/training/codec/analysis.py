"""What the codec's codes stand for: a fixed analysis of every frame, made compact by principal components.

A frame of 80 ms is eight log-mel spectra 10 ms apart, and four times pitch and voicing. An encoder that is trained with
the decoder has to find such a description first; minutes of training are too few for that (LOG.md). Windows are
centred, so a frame's codes hold 16 ms of what follows it; speaking needs no analysis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.losses import mel_filters

WINDOW, BANDS = 1024, 80
SPECTRA, PITCHES = 8, 4  # a frame
WIDTH = SPECTRA * BANDS + 2 * PITCHES
# Of magnitudes, where a full-scale sine is 1: -90 dBFS. White noise has but 0.07 of its RMS in a band: of speech, three
# quarters of all bands lie below -60 dBFS, and a floor there costs words (LOG.md).
_FLOOR = 3e-5
_LOWEST_HZ, _HIGHEST_HZ, _MIDDLE_HZ = 70.0, 320.0, 130.0
_VOICED, _LOUD = 0.5, 1e-3  # of the autocorrelation at lag 0; mean power relative to full scale, at least
# Weights of an octave and of voicing beside one neper of one band: a slip of 3 % in pitch, of all four values, then
# counts like the whole frame's bands being off by 0.04 neper.
_OCTAVE, _VOICING = 15.0, 3.0
# Of a spectrum's cosine transform over its bands, what lies from here on counts half: harmonics, which follow from
# pitch and voicing. What was said lies below: a recogniser's 13 cepstra are missed by a tenth less then (LOG.md).
_RIPPLES, _RIPPLES_WEIGHT = 20, 0.5


def features(pcm: Tensor) -> Tensor:
    """PCM (B, T * samples per frame) -> (B, T, 648), fp32: natural-log mel magnitudes by time, pitch, voicing."""
    frames = pcm.shape[1] // SAMPLES_PER_FRAME
    mel = mel_filters(WINDOW, BANDS, pcm.device)
    spectra = torch.fft.rfft(_windows(pcm, SPECTRA) * _hann(pcm)).abs() * (4 / WINDOW)  # full-scale sine: 1
    bands = torch.log((spectra @ mel.T).clamp(min=_FLOOR))
    octaves, voicing = _pitch(_windows(pcm, PITCHES))
    parts = (bands.flatten(2), _OCTAVE * octaves, _VOICING * voicing)
    return torch.cat([part.reshape(len(pcm), frames, -1) for part in parts], -1)


class Analysis(nn.Module):
    """Frames to `width` principal components, the first the largest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("basis", torch.zeros(WIDTH, width))

    def fit(self, rows: Tensor) -> float:
        """From features (N, 648); the share of their weighted variance that the components keep."""
        self.mean, weights = rows.mean(0), weights_of_features(rows)
        rows = (rows - self.mean).double() @ weights
        values, vectors = torch.linalg.eigh(rows.T @ rows)  # ascending
        width = self.basis.shape[1]
        self.basis = (weights @ vectors.flip(1)[:, :width]).float()
        return float(values[-width:].sum() / values.sum())

    def forward(self, pcm: Tensor) -> Tensor:
        """PCM (B, T * samples per frame) -> (B, T, width)."""
        return self.components(features(pcm))

    def components(self, rows: Tensor) -> Tensor:
        """Features (..., 648) -> (..., width)."""
        return (rows - self.mean) @ self.basis


def weights_of_features(rows: Tensor) -> Tensor:
    """(648, 648) float64 that features are multiplied with before distances are measured."""
    every = torch.eye(BANDS, dtype=torch.float64, device=rows.device)
    place = torch.arange(BANDS, dtype=torch.float64, device=rows.device)
    ripples = torch.cos(torch.pi / BANDS * (place[:, None] + 0.5) * place[_RIPPLES:]) * (2 / BANDS) ** 0.5
    counted = every - (1 - _RIPPLES_WEIGHT) * ripples @ ripples.T
    return torch.block_diag(*[counted] * SPECTRA, every[: 2 * PITCHES, : 2 * PITCHES])


def _windows(pcm: Tensor, count: int) -> Tensor:
    """(B, n) -> (B, frames, count, window): windows centred on `count` equal parts of every frame."""
    hop = SAMPLES_PER_FRAME // count
    padded = F.pad(pcm, ((WINDOW - hop) // 2, (WINDOW - hop) // 2))
    return padded.unfold(1, WINDOW, hop).unflatten(1, (-1, count))


def _hann(pcm: Tensor) -> Tensor:
    return torch.hann_window(WINDOW, device=pcm.device)


def _pitch(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Octaves above 130 Hz (0 where unvoiced) and voicing (0 or 1) of (..., window), by autocorrelation.

    The window's own autocorrelation is divided out (Boersma 1993); of the peaks nearly as high as the highest, the one
    of the shortest lag counts: multiples of the period are as high as the period itself.
    """
    hann = _hann(windows)
    power = torch.fft.rfft((windows - windows.mean(-1, keepdim=True)) * hann, 2 * WINDOW).abs().square()
    slope = torch.fft.irfft(torch.fft.rfft(hann, 2 * WINDOW).abs().square())
    low, high = int(SAMPLE_RATE_HZ / _HIGHEST_HZ), int(SAMPLE_RATE_HZ / _LOWEST_HZ)
    found = torch.fft.irfft(power)[..., : high + 2] / slope[: high + 2]
    ratio = found[..., low:] / found[..., :1].clamp(min=1e-9)
    inner, most = ratio[..., 1:-1], ratio.amax(-1, keepdim=True)
    peak = (inner >= ratio[..., :-2]) & (inner > ratio[..., 2:]) & (inner > 0.9 * most)
    lag = low + 1 + peak.int().argmax(-1)
    voiced = (most[..., 0] > _VOICED) & (found[..., 0] > _LOUD**2) & peak.any(-1)
    octaves = torch.log2(SAMPLE_RATE_HZ / _MIDDLE_HZ / lag)
    return torch.where(voiced, octaves, 0.0), voiced.float()
