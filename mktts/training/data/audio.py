"""Audio shards, and random crops of them.

A shard is an .npz file: `audio` int16 (samples,) at 24 kHz, all clips concatenated; `samples` int (clips,), the length
of each; `speaker` (clips,), names; `text` (clips,), in the words of the text front end."""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mktts.audio import from_pcm16
from mktts.common import write_whole
from mktts.errors import AudioError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

_QUIET = 0.01  # of full scale: crops that never get louder are useless for training
_LOUD = 10 ** (-40 / 20)  # of full scale: fainter audio is the silence around speech
_LEAD_MS, _TRAIL_MS = 40, 80  # silence to keep; the lead is short because it adds to the latency
_FADE_MS = 10  # at both ends, so that faint noise does not begin and end with a click


class Clip(NamedTuple):
    """A sentence by a speaker: int16 (n,) at 24 kHz."""

    text: str
    speaker: str
    pcm: np.ndarray


def clips_in(*folders: Path) -> Iterator[Clip]:
    """Yields all clips of the folders' shards, in order. Raises AudioError for a folder without shards."""
    for folder in folders:
        paths = sorted(folder.glob("*.npz"))
        if not paths:
            raise AudioError(f"{folder}: expected shards (*.npz), found none: make them with `train teacher` first")
        for path in paths:
            yield from read_shard(path)


def read_shard(path: Path) -> list[Clip]:
    """Reads one shard. Raises AudioError if the file is not a shard."""
    try:
        with np.load(path, allow_pickle=False) as file:
            audio, samples, speakers, texts = (file[key] for key in ("audio", "samples", "speaker", "text"))
    except (OSError, ValueError, KeyError) as error:
        raise AudioError(f"{path}: expected arrays audio, samples, speaker, text, but: {error}") from None
    total = samples.sum(dtype=np.int64)
    if audio.dtype != np.int16 or total != len(audio) or not len(samples) == len(speakers) == len(texts):
        raise AudioError(f"{path}: expected int16 audio of {total} samples, found {audio.dtype} of {len(audio)}")
    parts = np.split(audio, np.cumsum(samples, dtype=np.int64)[:-1])
    return [Clip(*clip) for clip in zip(texts.tolist(), speakers.tolist(), parts, strict=True)]


def write_shard(path: Path, clips: Sequence[Clip]) -> Path:
    """Writes one shard, completely or not at all."""
    texts, speakers, pcm = zip(*clips, strict=True) if clips else ((), (), ())
    data, samples = io.BytesIO(), np.array([len(part) for part in pcm], np.int64)
    joined = np.concatenate((np.zeros(0, np.int16), *pcm))
    np.savez(data, audio=joined, samples=samples, speaker=np.array(speakers, str), text=np.array(texts, str))
    return write_whole(path, data.getvalue())


def trimmed(pcm: np.ndarray) -> np.ndarray:
    """Trims 24 kHz audio to at most 40 ms below -40 dBFS before its sound and 80 ms after it, with fades."""
    loud = np.flatnonzero(np.abs(pcm) > _LOUD)
    if not len(loud):
        return pcm[:0]
    lead, trail, fade = (SAMPLE_RATE_HZ * ms // 1000 for ms in (_LEAD_MS, _TRAIL_MS, _FADE_MS))
    cut = pcm[max(0, loud[0] - lead) : loud[-1] + 1 + trail].copy()
    ramp = np.linspace(0, 1, min(fade, len(cut)), dtype=np.float32)
    cut[: len(ramp)] *= ramp
    cut[len(cut) - len(ramp) :] *= ramp[::-1]
    return cut


class Crops:
    """A folder's audio in memory, and batches of crops that depend only on the seed and the step."""

    def __init__(self, folder: Path, frames: int, seed: int, onsets: float = 0.0) -> None:
        """onsets: fraction of crops that start at the beginning of a clip. Raises AudioError for too little audio."""
        pcm = [np.pad(clip.pcm, (0, -len(clip.pcm) % SAMPLES_PER_FRAME)) for clip in clips_in(folder)]
        self.frames, self.seed, self.onsets = frames, seed, onsets
        begins = np.cumsum([0, *(len(clip) // SAMPLES_PER_FRAME for clip in pcm)])
        self.total = int(begins[-1])
        if self.total <= frames:
            raise AudioError(f"{folder}: expected more than {frames} frames, as long as a crop, found {self.total}")
        self._begins = begins[begins + frames < self.total]
        self.pcm = np.concatenate(pcm)
        self.hours = len(self.pcm) / SAMPLE_RATE_HZ / 3600

    def batches(self, step: int, size: int) -> Iterator[Tensor]:
        """Yields `batch` for `step` and all later steps, each made while the one before it is used."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.batch, step, size)
            while True:
                step += 1
                ready, ahead = ahead.result(), pool.submit(self.batch, step, size)
                yield ready

    def batch(self, step: int, size: int) -> Tensor:
        """PCM float32 (size, frames * samples per frame) in [-1, 1). Each crop is the first of up to eight draws that
        is not all quiet. It may span two clips, which begin and end in silence."""
        generator = np.random.default_rng((self.seed, step))
        starts = np.empty(size, np.int64)
        first = round(self.onsets * size)
        starts[:first] = generator.choice(self._begins, first)
        for i in range(first, size):
            for _ in range(8):
                starts[i] = generator.integers(self.total - self.frames)
                if np.abs(from_pcm16(self._crop(starts[i])[::16])).max() > _QUIET:
                    break
        found = torch.from_numpy(from_pcm16(np.stack([self._crop(start) for start in starts])))
        return found.pin_memory() if torch.cuda.is_available() else found  # else its copy would wait for the last step

    def _crop(self, frame: int) -> np.ndarray:
        return self.pcm[frame * SAMPLES_PER_FRAME : (frame + self.frames) * SAMPLES_PER_FRAME]
