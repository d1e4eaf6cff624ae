"""Audio shards in memory, random crops of them, and synthetic vowels to develop with.

A shard is an .npz file: `audio` int16 (samples,) at 24 kHz, all clips end to end; `samples` int (clips,), the length
of each; `speaker` (clips,) ids; `text` (clips,) strings.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mktts.errors import AudioError
from mktts.files import write_whole
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

_FULL_SCALE = 32_768.0
_QUIET = 0.01  # of full scale: a crop that never gets louder teaches nothing


@dataclass(frozen=True)
class Shard:
    """Clips end to end: clip i is audio[starts[i] : starts[i + 1]]."""

    audio: np.ndarray  # (samples,) int16
    starts: np.ndarray  # (clips + 1,) int64
    speakers: np.ndarray  # (clips,)
    texts: np.ndarray  # (clips,) str

    def __len__(self) -> int:
        return len(self.speakers)

    def clip(self, index: int) -> np.ndarray:
        """int16 (n,)."""
        return self.audio[self.starts[index] : self.starts[index + 1]]


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder in order. Raises AudioError where there is none."""
    paths = sorted(path for path in Path(folder).glob("*.npz") if not path.name.startswith("."))
    if not paths:
        raise AudioError(f"{folder}: expected audio shards (*.npz), found none: make them with the teacher first")
    return paths


def read_shard(path: Path) -> Shard:
    """Raises AudioError for a file of another shape."""
    try:
        with np.load(path, allow_pickle=False) as file:
            audio, samples, speakers, texts = (file[key] for key in ("audio", "samples", "speaker", "text"))
    except (OSError, ValueError, KeyError) as error:
        raise AudioError(f"{path}: expected arrays audio, samples, speaker, text, but: {error}") from None
    starts = np.concatenate(([0], np.cumsum(samples, dtype=np.int64)))
    if audio.dtype != np.int16 or starts[-1] != len(audio) or not len(samples) == len(speakers) == len(texts):
        raise AudioError(f"{path}: expected int16 audio of {starts[-1]} samples, found {audio.dtype} of {len(audio)}")
    return Shard(audio, starts, speakers, texts)


def write_shard(path: Path, clips: list[np.ndarray], speakers: list, texts: list[str]) -> Path:
    """Writes one shard, whole or not at all; clips are int16 (n,)."""
    data = io.BytesIO()
    samples = np.array([len(clip) for clip in clips], np.int64)
    np.savez(data, audio=np.concatenate(clips), samples=samples, speaker=np.array(speakers), text=np.array(texts))
    return write_whole(path, data.getvalue())


class Crops:
    """All audio of a folder in RAM; batches of crops that depend on the seed and the step only."""

    def __init__(self, folder: Path, frames: int, seed: int) -> None:
        """frames: length of a crop in codec frames. Raises AudioError where the audio is shorter than one crop."""
        parts = [read_shard(path).audio for path in shard_paths(folder)]
        self.audio = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.samples = frames * SAMPLES_PER_FRAME
        self.seed = seed
        if len(self.audio) <= self.samples:
            raise AudioError(f"{folder}: expected more than {self.samples} samples in all, found {len(self.audio)}")

    @property
    def hours(self) -> float:
        return len(self.audio) / SAMPLE_RATE_HZ / 3600

    def batches(self, step: int, size: int) -> Iterator[Tensor]:
        """`batch` of `step` and all after it, each made while the one before it is used."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.batch, step, size)
            while True:
                step += 1
                made, ahead = ahead.result(), pool.submit(self.batch, step, size)
                yield made

    def batch(self, step: int, size: int) -> Tensor:
        """float32 (size, samples) in [-1, 1). A crop may span two clips: they begin and end in silence."""
        generator = np.random.default_rng((self.seed, step))
        rows = np.empty((size, self.samples), np.float32)
        for row in rows:
            for _ in range(8):
                start = generator.integers(len(self.audio) - self.samples)
                row[:] = self.audio[start : start + self.samples]
                if np.abs(row).max() > _QUIET * _FULL_SCALE:
                    break
        return torch.from_numpy(rows / _FULL_SCALE)


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
    return (0.5 * 32767 * wave / np.abs(wave).max()).astype(np.int16)
