"""Sounds to train on."""

from __future__ import annotations

import numpy as np

from mktts.audio import to_pcm16
from mktts.spec import SAMPLE_RATE_HZ


def vowels(seconds: float, seed: int = 0) -> np.ndarray:
    """Synthetic vowels, int16 24 kHz: a pulse train of gliding pitch through three changing resonances."""
    generator = np.random.default_rng(seed)
    n = int(seconds * SAMPLE_RATE_HZ)
    knots = max(2, int(5 * seconds))
    time = np.linspace(0, knots - 1, n)

    def curve(low: float, high: float) -> np.ndarray:
        return np.interp(time, np.arange(knots), generator.uniform(low, high, knots))

    phase = 2 * np.pi * np.cumsum(curve(90, 220)) / SAMPLE_RATE_HZ
    formants = [curve(300, 800), curve(900, 2300), curve(2400, 3200)]
    hz = np.gradient(phase) * SAMPLE_RATE_HZ / (2 * np.pi)
    wave = np.zeros(n)
    for harmonic in range(1, 30):
        gain = sum(1 / (1 + ((harmonic * hz - f) / 120) ** 2) for f in formants)
        wave += gain * np.sin(harmonic * phase) / harmonic**0.5
    wave *= curve(0.0, 1.0)
    return np.frombuffer(to_pcm16((0.5 * wave / np.abs(wave).max()).astype(np.float32)), "<i2")
