"""Audio shards in memory, random crops of them, and synthetic vowels to develop with.

A shard is an .npz file: `audio` int16 (samples,) at 24 kHz, all clips end to end; `samples` int (clips,), the length
of each; `speaker` (clips,) ids; `text` (clips,) strings. `front_end`, where it is there, names the text front end whose
words the texts are.
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

from mktts.audio import from_pcm16, to_pcm16
from mktts.common import write_whole
from mktts.errors import AudioError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

_QUIET = 0.01  # of full scale: a crop that never gets louder teaches nothing


@dataclass(frozen=True)
class Shard:
    """Clips end to end: clip i is audio[starts[i] : starts[i + 1]]."""

    audio: np.ndarray  # (samples,) int16
    starts: np.ndarray  # (clips + 1,) int64
    speakers: np.ndarray  # (clips,)
    texts: np.ndarray  # (clips,) str
    front_end: str = ""  # whose words the texts are; "": as they were written

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
            front_end = str(file["front_end"]) if "front_end" in file else ""
    except (OSError, ValueError, KeyError) as error:
        raise AudioError(f"{path}: expected arrays audio, samples, speaker, text, but: {error}") from None
    starts = np.concatenate(([0], np.cumsum(samples, dtype=np.int64)))
    if audio.dtype != np.int16 or starts[-1] != len(audio) or not len(samples) == len(speakers) == len(texts):
        raise AudioError(f"{path}: expected int16 audio of {starts[-1]} samples, found {audio.dtype} of {len(audio)}")
    return Shard(audio, starts, speakers, texts, front_end)


def write_shard(path: Path, clips: list[np.ndarray], speakers: list, texts: list[str], front_end: str = "") -> Path:
    """Writes one shard, whole or not at all; clips are int16 (n,). front_end: whose words the texts are."""
    data = io.BytesIO()
    samples = np.array([len(clip) for clip in clips], np.int64)
    said = {"speaker": np.array(speakers), "text": np.array(texts), **({"front_end": front_end} if front_end else {})}
    np.savez(data, audio=np.concatenate(clips), samples=samples, **said)
    return write_whole(path, data.getvalue())


def padded(clip: np.ndarray) -> np.ndarray:
    """A clip (n,) with zeros up to a whole number of frames."""
    return np.pad(clip, (0, -len(clip) % SAMPLES_PER_FRAME))


class Crops:
    """Audio and codes of two folders in RAM; batches of crops that depend on the seed and the step only."""

    def __init__(
        self, audio: Path, codes: Path, frames: int, seed: int, onsets: float = 0.0, hours: float = np.inf
    ) -> None:
        """codes: shards of `mktts.training.data.encode` named like those of `audio`; audio without codes is left out.

        frames: length of a crop. onsets: share of the crops that begin where a clip does, the first of a batch. hours:
        of audio, whole shards until there are as many. Raises AudioError where all is shorter than one crop, or codes
        are of other audio.
        """
        pcm, found = [], []
        for path in shard_paths(codes):
            shard = read_shard(Path(audio) / path.name)
            clips = [padded(shard.clip(i)) for i in range(len(shard))]
            with np.load(path, allow_pickle=False) as file:
                found.append(file["codes"])
                lengths = [int(n) for n in file["frames"]]
            if lengths != [len(clip) // SAMPLES_PER_FRAME for clip in clips]:
                got = f"{sum(lengths)} frames in {len(lengths)} clips, but {len(clips)} clips of other lengths"
                raise AudioError(
                    f"{path}: expected the codes of the shard of its name in {audio}, found {got}: encode it again"
                )
            pcm += clips
            if sum(map(len, pcm)) >= hours * 3600 * SAMPLE_RATE_HZ:
                break
        self.codes = np.concatenate(found)
        self.frames, self.seed, self.onsets = frames, seed, onsets
        begins = np.cumsum([0, *(len(clip) // SAMPLES_PER_FRAME for clip in pcm[:-1])])
        self._begins = begins[begins + frames < len(self.codes)]
        if len(self.codes) <= frames:
            raise AudioError(f"{codes}: expected more than {frames} frames, as long as a crop, found {len(self.codes)}")
        self.pcm = np.concatenate(pcm)

    @property
    def hours(self) -> float:
        return len(self.pcm) / SAMPLE_RATE_HZ / 3600

    def batches(self, step: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`batch` of `step` and all after it, each made while the one before it is used."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.batch, step, size)
            while True:
                step += 1
                ready, ahead = ahead.result(), pool.submit(self.batch, step, size)
                yield ready

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """PCM float32 (size, frames * samples per frame) in [-1, 1) and codes int64 (size, frames, 16).

        A crop may span two clips: they begin and end in silence. Of up to eight draws, the first that is not all quiet.
        """
        generator = np.random.default_rng((self.seed, step))
        starts = np.empty(size, np.int64)
        first = round(self.onsets * size)
        starts[:first] = generator.choice(self._begins, first)
        for i in range(first, size):
            for _ in range(8):
                starts[i] = generator.integers(len(self.codes) - self.frames)
                if np.abs(from_pcm16(self._pcm(starts[i])[::16])).max() > _QUIET:
                    break
        pcm = from_pcm16(np.stack([self._pcm(start) for start in starts]))
        codes = np.stack([self.codes[start : start + self.frames] for start in starts]).astype(np.int64)
        return torch.from_numpy(pcm), torch.from_numpy(codes)

    def _pcm(self, frame: int) -> np.ndarray:
        return self.pcm[frame * SAMPLES_PER_FRAME : (frame + self.frames) * SAMPLES_PER_FRAME]


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
