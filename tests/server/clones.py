"""Voices without the models that make them: what was to be cloned is remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mktts.checkpoint import Checkpoint
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ


def hum(seconds: float = 1.0, pitch_hz: float = 140.0) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (0.1 * sum(np.sin(2 * np.pi * pitch_hz * k * t) / k for k in range(1, 8))).astype(np.float32)


def voice_of(checkpoint: Checkpoint, number: float, transcript: str | None = None) -> Voice:
    """A voice that can be told by its first number."""
    embedding = torch.full((checkpoint.config.talker.hidden_size,), float(number))
    codes = None if transcript is None else torch.zeros((2, 16), dtype=torch.int64)
    return Voice(embedding, codes, transcript, checkpoint.config.model_size)


class Clones:
    """In the place of `clone_voice`. asked: PCM, rate and transcript of each call. made: its voices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[np.ndarray, int, str | None]] = []
        self.made: list[Voice] = []
        monkeypatch.setattr("mktts.server.references.clone_voice", self._clone)

    def _clone(self, checkpoint: Checkpoint, pcm: np.ndarray, rate_hz: int, transcript: str | None = None) -> Any:
        self.asked.append((pcm, rate_hz, transcript))
        self.made.append(voice_of(checkpoint, float(np.abs(pcm).sum()), transcript))
        return self.made[-1]
