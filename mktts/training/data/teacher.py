"""The teacher: flite's voices at 24 kHz, and shards of its speech (`python -m mktts train teacher`).

$FLITE names a program that takes a voice's name and then flite's own options. Debian's flite installs one program per
voice: a script of one line chooses among them.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import subprocess
import wave
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from mktts.audio import from_pcm16, resample, to_pcm16
from mktts.errors import AudioError, BackendUnavailable, TextError, VoiceError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data.codec_data import read_shard, write_shard
from mktts.training.data.texts import training_sentences

SPEAKERS = ("slt", "rms", "awb")
TEACHER_RATE_HZ = 16_000
_HALF_TAPS = 144  # of the resampler's low pass
_CUTOFF = 0.96  # of the teacher's Nyquist frequency: its images begin just above
_LOUD = 10 ** (-40 / 20)  # of full scale: the teacher's silence has a faint noise that is no lead
_KEPT_MS = 80  # of silence at either end: the student's lead must stay under 200 ms
_CLIPS_PER_SHARD = 200


def speak(text: str, speaker: str) -> np.ndarray:
    """float32 (samples,) at 24 kHz, silence at both ends cut to 80 ms.

    Raises VoiceError for an unknown speaker, BackendUnavailable without the program, AudioError where it says nothing.
    """
    if speaker not in SPEAKERS:
        raise VoiceError(f"expected a speaker of {', '.join(SPEAKERS)}, got {speaker!r}")
    program = os.environ.get("FLITE", "flite")
    try:
        done = subprocess.run([program, speaker, "-t", text, "-o", "/dev/stdout"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendUnavailable(f"the teacher needs flite: set FLITE to a program taking a voice: {error}") from None
    pcm = pcm_of(done.stdout)
    return trimmed(resampled(pcm))


def pcm_of(wav: bytes) -> np.ndarray:
    """WAV bytes, 16-bit mono at 16 kHz -> float32 (samples,). Raises AudioError for another form."""
    try:
        with wave.open(io.BytesIO(wav)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise AudioError(f"expected a WAV file from the teacher: {error}") from None
    if form != (1, 2, TEACHER_RATE_HZ):
        raise AudioError(f"expected 1 channel of 2 bytes at {TEACHER_RATE_HZ} Hz, got {form}")
    return from_pcm16(data)


def resampled(pcm: np.ndarray) -> np.ndarray:
    """float32 (n,) at 16 kHz -> float32 (ceil(3 n / 2),) at 24 kHz, in [-1, 1]."""
    return np.clip(resample(pcm, TEACHER_RATE_HZ, SAMPLE_RATE_HZ, _CUTOFF, _HALF_TAPS), -1, 1)


def trimmed(pcm: np.ndarray) -> np.ndarray:
    """24 kHz audio with at most 80 ms below -40 dBFS at either end. Raises AudioError where all of it is."""
    loud = np.flatnonzero(np.abs(pcm) > _LOUD)
    if not len(loud):
        raise AudioError("expected speech from the teacher, got silence: the text may have no word in it")
    kept = SAMPLE_RATE_HZ * _KEPT_MS // 1000
    return pcm[max(0, loud[0] - kept) : loud[-1] + 1 + kept]


def make_shards(folder: Path, hours: float, seed: int, workers: int, sentences: Iterable[str] | None = None) -> float:
    """Shards of 200 clips until `hours` are there, speakers in turn; the hours made. Shards already there are kept.

    `workers` processes each make whole shards; what the folder holds in the end does not depend on their number.
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
        speakers = [SPEAKERS[(first + i) % len(SPEAKERS)] for i in range(len(texts))]
        clips = [np.frombuffer(to_pcm16(speak(text, who)), "<i2") for text, who in zip(texts, speakers, strict=True)]
        write_shard(path, clips, speakers, texts)
    return len(read_shard(path).audio) / SAMPLE_RATE_HZ


EXAMPLES = """examples:
  FLITE=./flite python -m mktts train teacher --texts texts.xz --hours 20 --out AUDIO

The variable FLITE names a program that takes a voice's name and then flite's own options. AUDIO holds shards of 200
clips, audio and texts; those already there are kept, so that a run can be cut anywhere. The last line of standard
output is JSON: the hours that are there."""


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
