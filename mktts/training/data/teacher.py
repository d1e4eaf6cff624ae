"""The teacher: flite's voices at 24 kHz, and shards of its speech (`python -m mktts train teacher`)."""

from __future__ import annotations

import argparse
import json
import lzma
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from mktts.audio import resample, to_pcm16
from mktts.errors import AudioError, TextError, VoiceError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data import flite
from mktts.training.data.as_spoken import as_spoken
from mktts.training.data.codec_data import read_shard, write_shard
from mktts.training.data.texts import training_sentences
from mktts.training.talker.sizes import LANGUAGE

# Speakers and what brings their speech to -23 LUFS: pyloudnorm's measure of 120 sentences of a training list each, end
# to end, was -16.05, -21.59 and -20.61, of a quarter of them within 0.2 of that.
GAINS_DB = {"slt": -6.95, "rms": -1.41, "awb": -2.39}
SPEAKERS = tuple(GAINS_DB)
_TURNS = ("slt", "rms", "awb", "rms")  # rms twice: who names no speaker gets him
_HALF_TAPS = 144  # of the resampler's low pass
_CUTOFF = 0.96  # of the teacher's Nyquist frequency: its images begin just above
_LOUD = 10 ** (-40 / 20)  # of full scale: the teacher's silence has a faint noise that is no lead
_LEAD_MS, _TRAIL_MS = 60, 80  # of silence that stays: what comes before the sound is waited for
_FADE_MS = 10  # at either end, so that faint noise does not begin and end with a click
_CLIPS_PER_SHARD = 200


def speak(text: str, speaker: str) -> np.ndarray:
    """float32 (samples,) at 24 kHz and -23 LUFS, silence cut to 60 ms before the sound and 80 ms after it.

    Raises VoiceError for an unknown speaker, BackendUnavailable without flite, AudioError where it says nothing.
    """
    if speaker not in SPEAKERS:
        raise VoiceError(f"expected a speaker of {', '.join(SPEAKERS)}, got {speaker!r}")
    gain = np.float32(10 ** (GAINS_DB[speaker] / 20))
    return gain * trimmed(resampled(flite.spoken(text, speaker)))


def resampled(pcm: np.ndarray, rate_hz: int = flite.RATE_HZ) -> np.ndarray:
    """float32 (n,) at `rate_hz` -> float32 (ceil(n * 24 000 / rate_hz),) at 24 kHz, in [-1, 1]."""
    return np.clip(resample(pcm, rate_hz, SAMPLE_RATE_HZ, _CUTOFF, _HALF_TAPS), -1, 1)


def trimmed(pcm: np.ndarray) -> np.ndarray:
    """24 kHz audio with at most 60 ms below -40 dBFS before its sound and 80 ms after it, faded in and out.

    Raises AudioError where all of it is below.
    """
    loud = np.flatnonzero(np.abs(pcm) > _LOUD)
    if not len(loud):
        raise AudioError("expected speech from the teacher, got silence: the text may have no word in it")
    lead, trail, fade = (SAMPLE_RATE_HZ * ms // 1000 for ms in (_LEAD_MS, _TRAIL_MS, _FADE_MS))
    cut = pcm[max(0, loud[0] - lead) : loud[-1] + 1 + trail].copy()
    ramp = np.linspace(0, 1, min(fade, len(cut)), dtype=np.float32)
    cut[: len(ramp)] *= ramp
    cut[len(cut) - len(ramp) :] *= ramp[::-1]
    return cut


def make_shards(folder: Path, hours: float, seed: int, workers: int, sentences: Iterable[str] | None = None) -> float:
    """Shards of 200 clips until `hours` are there; the hours made. Shards already there are kept.

    Their texts are the words that the text front end makes of `sentences`, and flite is given those. Raises TextError
    for a sentence that it cannot read.

    Speakers take turns, the default one twice in four. `workers` processes each make whole shards; what the folder
    holds in the end does not depend on their number.
    """
    source: Iterator[str] = iter(training_sentences(seed) if sentences is None else sentences)
    Path(folder).mkdir(parents=True, exist_ok=True)
    shards = (
        (Path(folder) / f"shard{index:05}.npz", texts)
        for index, texts in enumerate(iter(lambda: list(islice(source, _CLIPS_PER_SHARD)), []))
    )
    made_s, under_way = 0.0, deque()
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:  # not threads: resampling holds the interpreter
        while made_s < 3600 * hours:
            for path, texts in islice(shards, workers + 1 - len(under_way)):
                under_way.append((path, pool.submit(_make_shard, path, texts)))
            if not under_way:
                break
            path, future = under_way.popleft()
            made_s += future.result()
            print(f"{path.name}  {made_s / 3600:.2f} h", flush=True)
        for path, future in under_way:  # begun, and more than was asked for
            if not future.cancel():
                future.result()
                path.unlink()
    return made_s / 3600


def _make_shard(path: Path, texts: list[str]) -> float:
    """Speaks and writes one shard unless it is there; its seconds."""
    if not path.exists():
        first = int(path.stem[-5:]) * _CLIPS_PER_SHARD
        texts = [as_spoken(text) for text in texts]  # flite would read figures and signs its own way
        speakers = [_TURNS[(first + i) % len(_TURNS)] for i in range(len(texts))]
        clips = [np.frombuffer(to_pcm16(speak(text, who)), "<i2") for text, who in zip(texts, speakers, strict=True)]
        write_shard(path, clips, speakers, texts, LANGUAGE)
    return len(read_shard(path).audio) / SAMPLE_RATE_HZ


EXAMPLES = """examples:
  python -m mktts train teacher --texts texts.xz --hours 20 --out AUDIO

Needs flite's libraries (Debian: libflite1), or in the variable FLITE a program that takes a voice's name and then
flite's own options. AUDIO holds shards of 200 clips, audio and texts; those already there are kept, so that a run can
be cut anywhere. The last line of standard output is JSON: the hours that are there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="AUDIO", help="folder for audio shards")
    parser.add_argument("--hours", type=float, default=20.0, help="of speech (default: %(default)s)")
    parser.add_argument("--texts", type=Path, metavar="FILE.xz", help="of `train texts` (default: the grammar's)")
    parser.add_argument("--seed", type=int, default=0, help="of the grammar's sentences (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")


def main(arguments: argparse.Namespace) -> int:
    """Makes the shards. Raises as `speak`, and TextError for texts that cannot be read."""
    lines = None
    if arguments.texts:
        try:
            lines = lzma.decompress(arguments.texts.read_bytes()).decode().splitlines()
        except (OSError, ValueError, lzma.LZMAError) as error:
            raise TextError(f"{arguments.texts}: expected sentences of `train texts`, but: {error}") from None
    made_h = make_shards(arguments.out, arguments.hours, arguments.seed, arguments.workers, lines)
    print(json.dumps({"hours": round(made_h, 4)}))
    return 0
