"""Buzz, click and spectrum against audio whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge import signal


def noise(seconds: float, seed: int = 0, level: float = 0.1) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(round(seconds * SAMPLE_RATE_HZ))).astype(np.float32)


def repeated(seconds: float, period_s: float) -> np.ndarray:
    piece = noise(period_s, 1)
    return np.resize(piece, round(seconds * SAMPLE_RATE_HZ))


def tone(hz: float, seconds: float, level: float) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (level * np.sin(2 * np.pi * hz * t)).astype(np.float32)


def test_a_comb_of_50_hz_repeats_itself_and_noise_does_not():
    comb = repeated(2.0, 0.020)
    assert signal.lag_correlation(comb, 0.020) > 0.99 and signal.lag_correlation(comb, 0.080) > 0.99
    assert signal.lag_correlation(comb, 0.013) < 0.3
    assert (
        abs(signal.lag_correlation(noise(2.0), 0.020)) < 0.03 and abs(signal.lag_correlation(noise(2.0), 0.080)) < 0.03
    )


def test_what_repeats_every_80_ms_only_is_told_apart():
    frames = repeated(3.0, 0.080)
    assert abs(signal.lag_correlation(frames, 0.020)) < 0.3 and signal.lag_correlation(frames, 0.080) > 0.99


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_a_mixture_correlates_by_the_share_of_its_power(share):
    mixed = np.sqrt(share) * repeated(20.0, 0.020) / 0.1 + np.sqrt(1 - share) * noise(20.0, 2) / 0.1
    assert signal.lag_correlation((0.05 * mixed).astype(np.float32), 0.020) == pytest.approx(share, abs=0.06)


def test_only_the_band_counts_and_only_where_it_sounds():
    low = np.resize(signal.band_passed(repeated(1.0, 0.020), (100, 3_000)), 48_000).astype(np.float32)
    assert abs(signal.lag_correlation(low + noise(2.0, 3, 0.01), 0.020)) < 0.05  # the buzz is below the band
    quiet = np.concatenate([noise(1.0, 4), 1e-3 * repeated(9.0, 0.020)])
    assert abs(signal.lag_correlation(quiet, 0.020)) < 0.05 and len(signal.lag_correlations(quiet, 0.020)) < 105
    assert np.isnan(signal.lag_correlation(np.zeros(48_000, np.float32), 0.020))
    assert np.isnan(signal.lag_correlation(noise(0.05), 0.020)) and np.isnan(signal.lag_correlation(noise(0), 0.020))


@pytest.mark.parametrize("hz, passed", [(1_000, 0), (3_300, 0), (4_100, 1), (7_000, 1), (7_400, 0)])
def test_the_band_pass(hz, passed):
    found = signal.band_passed(tone(hz, 1.0, 0.5), signal.NOISE_BAND_HZ)[2_400:-2_400]
    assert np.abs(found).max() == pytest.approx(0.5 * passed, abs=0.01)


@pytest.mark.parametrize("dbfs", [-70.0, -51.0, -20.0])
def test_a_click_of_known_level(dbfs):
    pcm = np.zeros(SAMPLE_RATE_HZ, np.float32)
    pcm[0] = 10 ** (dbfs / 20)
    pcm[2_400:] = noise(0.9)
    assert signal.click_dbfs(pcm) == pytest.approx(dbfs, abs=1e-3)
    assert signal.start_dbfs(pcm) == pytest.approx(dbfs - 0.8, abs=0.5)
    later = np.roll(pcm, 100)
    later[:100] = 0
    assert signal.click_dbfs(later) == -np.inf and signal.start_dbfs(later) == pytest.approx(dbfs - 0.8, abs=0.5)


def test_a_hum_at_the_start_is_no_click():
    hum = tone(60, 1.0, 0.01)
    assert signal.start_dbfs(hum) < -73 and signal.click_dbfs(hum) == -np.inf
    assert signal.start_dbfs(np.zeros(0, np.float32)) == -np.inf


@pytest.mark.parametrize("gain_db", [-6.0, 0.0, 3.0])
def test_the_distance_of_spectra_that_differ_by_a_gain_is_the_gain(gain_db):
    sound = noise(1.0)
    other = (sound * 10 ** (gain_db / 20)).astype(np.float32)
    assert signal.log_spectral_distance_db(sound, other) == pytest.approx(abs(gain_db), abs=0.02)


def test_the_distance_of_two_noises_is_that_of_two_exponential_powers():
    # 10 log10 of two independent exponential variables differ by 7.88 dB rms: 10 / ln 10 * pi / sqrt 3
    assert signal.log_spectral_distance_db(noise(4.0), noise(4.0, 1)) == pytest.approx(7.88, abs=0.15)
    assert signal.log_spectral_distance_db(np.zeros(2_000, np.float32), np.zeros(2_000, np.float32)) == 0
