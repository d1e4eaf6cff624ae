"""The resampler against sines, whose samples at any rate are known, and against what must not be there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mktts.audio import resample

BOTH_WAYS = [
    (16_000, 24_000, 0.96, 144),
    (24_000, 16_000, 0.95, 96),
    (24_000, 24_000, 0.95, 96),
    (8_000, 24_000, 0.9, 90),
]
SECONDS = 0.5
EDGE_S = 0.012  # at both ends, where the low pass reaches into the silence around


def sine(hz: float, rate_hz: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(SECONDS * rate_hz)) / rate_hz + 0.3)).astype(np.float32)


def inner(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    return pcm[round(EDGE_S * rate_hz) : -round(EDGE_S * rate_hz)]


@pytest.mark.parametrize(("from_hz", "to_hz", "cutoff", "half_taps"), BOTH_WAYS)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
def test_a_sine_below_the_cut_off_is_the_same_sine(from_hz, to_hz, cutoff, half_taps, share):
    hz = share * min(from_hz, to_hz) / 2
    found = resample(sine(hz, from_hz), from_hz, to_hz, cutoff, half_taps)
    assert found.dtype == np.float32 and found.shape == (SECONDS * to_hz,)
    assert np.abs(inner(found - sine(hz, to_hz), to_hz)).max() < 1e-4


@pytest.mark.parametrize("hz", [8_300, 9_000, 11_500])
def test_a_sine_above_the_lower_rates_nyquist_frequency_is_gone(hz):
    found = resample(sine(hz, 24_000), 24_000, 16_000, 0.95, 96)
    assert np.abs(inner(found, 16_000)).max() < 1e-4


def test_a_higher_rate_has_nothing_above_the_lower_rates_nyquist_frequency():
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 8_000).astype(np.float32)
    found = inner(resample(noise, 16_000, 24_000, 0.96, 144), 24_000)
    power = np.abs(np.fft.rfft(found * np.blackman(len(found)))) ** 2
    hz = np.fft.rfftfreq(len(found), 1 / 24_000)
    assert power[hz > 8_200].mean() < 1e-8 * power[hz < 7_000].mean()


@pytest.mark.parametrize(("from_hz", "to_hz", "cutoff", "half_taps"), BOTH_WAYS)
def test_any_length_has_its_samples_in_silence(from_hz, to_hz, cutoff, half_taps):
    """Few samples are what many with silence behind them are, to the end of their own time."""
    for samples in (0, 1, 2, 3, 101):
        few = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
        found = resample(few, from_hz, to_hz, cutoff, half_taps)
        assert found.shape == (math.ceil(samples * to_hz / from_hz),)
        more = resample(np.concatenate([few, np.zeros(2_000, np.float32)]), from_hz, to_hz, cutoff, half_taps)
        np.testing.assert_allclose(found, more[: len(found)], atol=1e-6)
