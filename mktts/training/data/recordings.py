"""A folder of recordings with transcripts as the teacher: `python -m mktts train recordings`.

Two layouts are read. LJSpeech's: `metadata.csv` with a line `name|text` or `name|text|text as spoken` for each file of
`wavs/` (or of the folder itself). Or a `.txt` beside each audio file, in whatever folders. Shards are those of
`train teacher`, so everything after it is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from mktts.audio import read_audio, to_pcm16
from mktts.errors import AudioError, OptionsError, TextError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data.as_spoken import as_spoken
from mktts.training.data.codec_data import write_shard
from mktts.training.data.teacher import trimmed
from mktts.training.judge.loudness import TARGET_LUFS, integrated_lufs
from mktts.training.talker.sizes import LANGUAGE

METADATA = "metadata.csv"
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
LENGTHS_S = (0.4, 15.0)  # what is shorter or longer is left out
MAX_LETTERS = 250
_MEASURED = 200  # recordings of a speaker, for its loudness
_CLIPS_PER_SHARD = 200


@dataclass(frozen=True)
class SpokenClip:
    path: Path
    text: str  # in the words of the text front end
    speaker: str


def recordings(folder: Path, speaker: str | None = None) -> list[SpokenClip]:
    """All of a folder, in order of their names. speaker: of all; None: each one's is the folder that it lies in.

    Raises OptionsError for a folder without recordings, TextError for a transcript that is missing or empty, or that
    the text front end cannot read.
    """
    metadata = folder / METADATA
    found = list(_listed(folder, metadata) if metadata.is_file() else _beside(folder))
    if not found:
        raise OptionsError(
            f"{folder}: expected {METADATA} with wavs/, or audio files with a .txt beside each, found neither"
        )
    if empty := [str(path) for path, text in found if not text.strip()]:
        raise TextError(f"{empty[0]}: expected a transcript, found an empty one")
    return [SpokenClip(path, _words(path, text), speaker or _name(path, folder)) for path, text in sorted(found)]


def _words(path: Path, transcript: str) -> str:
    try:
        return as_spoken(" ".join(transcript.split()))
    except TextError as error:
        raise TextError(f"{path}: expected an English transcript, but {error}") from None


def _listed(folder: Path, metadata: Path) -> Iterator[tuple[Path, str]]:
    places = [folder / "wavs", folder]
    for number, line in enumerate(metadata.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name, *texts = line.split("|")
        if not texts:
            raise TextError(f"{metadata}, line {number}: expected name|text, found {line[:40]!r}")
        names = [name] if name.lower().endswith(AUDIO_SUFFIXES) else [name + suffix for suffix in AUDIO_SUFFIXES]
        paths = [place / each for place in places for each in names if (place / each).is_file()]
        if not paths:
            raise AudioError(f"{metadata}, line {number}: expected the recording {name} in wavs/, found none")
        yield paths[0], next((text for text in reversed(texts) if text.strip()), "")


def _beside(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        if path.suffix.lower() in AUDIO_SUFFIXES:
            text = path.with_suffix(".txt")
            if not text.is_file():
                raise TextError(f"{path}: expected its transcript in {text.name} beside it, found none")
            yield path, text.read_text(encoding="utf-8")


def _name(path: Path, folder: Path) -> str:
    """A speaker's name as a request may give it: small letters, digits and underscores."""
    parent = path.parent if path.parent.name != "wavs" else path.parent.parent
    parent = folder.resolve() if parent == folder else parent
    return "".join(c if c.isalnum() else "_" for c in parent.name.lower()) or "speaker"


def loaded(path: Path) -> np.ndarray:
    """float32 (n,), mono at 24 kHz. Raises VoiceError for a file that cannot be read."""
    return resampled(*read_audio(path))


def resampled(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    """float32 (n,) at any rate -> float32 (ceil(n * 24 000 / rate_hz),) at 24 kHz, by its whole spectrum.

    Rates such as 22 050 Hz have hundreds of phases, for which a filter's taps (`mktts.audio.resample`) are many.
    """
    if rate_hz == SAMPLE_RATE_HZ:
        return pcm
    divisor = math.gcd(SAMPLE_RATE_HZ, rate_hz)
    up, down = SAMPLE_RATE_HZ // divisor, rate_hz // divisor
    blocks = -(-(len(pcm) + rate_hz // 10) // down)  # whole ones, with a tenth of a second between end and start
    n, m = blocks * down, blocks * up
    spectrum = np.fft.rfft(np.pad(pcm.astype(np.float64), (0, n - len(pcm))))
    found = np.fft.irfft(spectrum[: m // 2 + 1], m) * (m / n)
    return found[: -(-len(pcm) * up // down)].astype(np.float32)


def gains(found: Iterable[SpokenClip]) -> dict[str, float]:
    """Speaker -> factor that brings its recordings, end to end, to -23 LUFS. Raises AudioError for silence."""
    whole: dict[str, list[np.ndarray]] = {}
    by_speaker: dict[str, list[SpokenClip]] = {}
    for recording in found:
        by_speaker.setdefault(recording.speaker, []).append(recording)
    for speaker, theirs in by_speaker.items():
        step = -(-len(theirs) // _MEASURED)
        whole[speaker] = [loaded(recording.path) for recording in theirs[::step]]
    factors = {}
    for speaker, clips in whole.items():
        lufs = integrated_lufs(np.concatenate(clips))
        if lufs is None:
            raise AudioError(f"speaker {speaker}: expected speech, found {len(clips)} recordings of silence")
        factors[speaker] = 10 ** ((TARGET_LUFS - lufs) / 20)
    return factors


def prepared(recording: SpokenClip, gain: float) -> np.ndarray | None:
    """int16 (n,) at 24 kHz: at the speaker's loudness, silence at both ends cut; None where it is left out."""
    if len(recording.text) > MAX_LETTERS:
        return None
    try:
        pcm = trimmed(np.clip(gain * loaded(recording.path), -1, 1))
    except AudioError:  # silence
        return None
    shortest, longest = (seconds * SAMPLE_RATE_HZ for seconds in LENGTHS_S)
    return np.frombuffer(to_pcm16(pcm), "<i2") if shortest <= len(pcm) <= longest else None


def make_shards(found: list[SpokenClip], out: Path, workers: int, seed: int = 0) -> dict[str, float]:
    """Writes shards of 200 clips, shuffled; hours, and how many were taken and left out.

    Raises AudioError where all are left out.
    """
    order = np.random.default_rng(seed).permutation(len(found))
    factors, seconds, taken, number = gains(found), 0.0, 0, 0
    chosen = [found[i] for i in order]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        clips = zip(chosen, pool.map(prepared, chosen, [factors[r.speaker] for r in chosen], chunksize=8), strict=True)
        kept = ((recording, pcm) for recording, pcm in clips if pcm is not None)
        while shard := list(islice(kept, _CLIPS_PER_SHARD)):
            speakers, texts = ([getattr(recording, name) for recording, _ in shard] for name in ("speaker", "text"))
            write_shard(out / f"shard{number:05}.npz", [pcm for _, pcm in shard], speakers, texts, LANGUAGE)
            number, taken = number + 1, taken + len(shard)
            seconds += sum(len(pcm) for _, pcm in shard) / SAMPLE_RATE_HZ
    if not taken:
        low, high = LENGTHS_S
        raise AudioError(f"expected recordings of {low} to {high} s, found none among {len(found)}: cut long ones")
    return {"hours": round(seconds / 3600, 4), "recordings": taken, "left_out": len(found) - taken}


EXAMPLES = """examples:
  python -m mktts train recordings --data LJSpeech-1.1 --speaker linda --out AUDIO
  python -m mktts train recordings --data RECORDINGS --out AUDIO

Without --speaker, the folder that a recording lies in names its speaker. Recordings shorter than 0.4 s or longer than
15 s are left out. The last line of standard output is JSON: hours, recordings taken and left out, speakers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="recordings with transcripts")
    parser.add_argument("--out", type=Path, required=True, metavar="AUDIO", help="folder for audio shards")
    parser.add_argument("--speaker", metavar="NAME", help="of all recordings (default: each one's folder)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")


def main(arguments: argparse.Namespace) -> int:
    """Makes the shards. Raises as `recordings`, `gains` and `make_shards`."""
    found = recordings(arguments.data, arguments.speaker)
    made = make_shards(found, arguments.out, arguments.workers)
    print(json.dumps({**made, "speakers": sorted({recording.speaker for recording in found})}))
    return 0
