"""Sounds to train on."""

from __future__ import annotations

import numpy as np

from mktts.audio import to_pcm16
from mktts.spec import SAMPLE_RATE_HZ


def vowels(seconds: float, seed: int = 0) -> np.ndarray:
    """Like a voice, int16 24 kHz: a pulse train of gliding pitch, whose harmonics come and go."""
    generator = np.random.default_rng(seed)
    n, knots = int(seconds * SAMPLE_RATE_HZ), max(2, int(5 * seconds))

    def curve(low: float, high: float) -> np.ndarray:
        return np.interp(np.linspace(0, knots - 1, n), np.arange(knots), generator.uniform(low, high, knots))

    phase = 2 * np.pi * np.cumsum(curve(90, 220)) / SAMPLE_RATE_HZ
    wave = sum(curve(0, 1) * np.sin(harmonic * phase) / harmonic for harmonic in range(1, 30)) * curve(0, 1)
    return np.frombuffer(to_pcm16((0.5 * wave / np.abs(wave).max()).astype(np.float32)), "<i2")
