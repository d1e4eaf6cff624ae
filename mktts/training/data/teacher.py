"""Makes shards of a teacher's speech: `python -m mktts train teacher`.

The teacher is Kokoro (--fetch downloads it), or any program that writes an audio file for a text or prints one."""

import argparse
import json
import lzma
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mktts.audio import read_audio, resample, to_pcm16
from mktts.errors import OptionsError, TextError
from mktts.model.backend import device_named
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data.audio import Clip, trimmed, write_shard
from mktts.training.data.kokoro import fetch, load_kokoro, load_phonemes, output_of
from mktts.training.data.texts import as_spoken

LENGTHS_S = (0.3, 15.0)  # shorter and longer clips are skipped


class Item(NamedTuple):
    """A text for a speaker, in the words of the text front end, and the name of its recording."""

    text: str
    speaker: str
    name: str = ""


Speak = Callable[[Sequence[Item], int], list[np.ndarray]]  # items, seed -> float32 at 24 kHz each


def kokoro(folder: Path, device: str, voices: dict[str, str]) -> Speak:
    """Kokoro as a teacher. voices: its voices by speaker. Raises CheckpointError, or OptionsError for unknown ones."""
    (model, styles), read = load_kokoro(folder, device_named(device)), load_phonemes(folder)
    if unknown := set(voices.values()) - set(styles):
        raise OptionsError(f"expected voices of {', '.join(styles)}, found {', '.join(sorted(unknown))}")

    def speak(items: Sequence[Item], seed: int) -> list[np.ndarray]:
        return model.speak([read(item.text) for item in items], [styles[voices[item.speaker]] for item in items], seed)

    return speak


def program(template: str) -> Speak:
    """A command as a teacher; {text}, {speaker}, {name} and {wav} in it are replaced; without {wav}, its output is the
    file. The result raises BackendUnavailable if the command fails, VoiceError if it gives no audio."""

    def one(item: Item) -> np.ndarray:
        with tempfile.TemporaryDirectory() as work:
            wav = Path(work) / "said.wav"
            given = {"text": item.text, "speaker": item.speaker, "name": item.name, "wav": str(wav)}
            command = [re.sub(r"\{(\w+)\}", lambda m: given.get(m[1], m[0]), word) for word in shlex.split(template)]
            printed = output_of(command, f"say {item.text!r}")
            if "{wav}" not in template:
                wav.write_bytes(printed)
            pcm, rate_hz = read_audio(wav)
            return resample(pcm, rate_hz, SAMPLE_RATE_HZ)

    def speak(items: Sequence[Item], seed: int) -> list[np.ndarray]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(one, items))

    return speak


def read_texts(path: Path, speakers: Sequence[str]) -> list[Item]:
    """Reads the texts, assigned to the speakers in turn: a list of `train texts`, or LJSpeech's metadata.csv
    (name|text). Raises TextError for another file, or a text that the front end cannot read."""
    try:
        data = path.read_bytes()
        lines = (data if path.suffix == ".csv" else lzma.decompress(data)).decode().splitlines()
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise TextError(f"{path}: expected sentences of `train texts`, or metadata.csv, but: {error}") from None
    items = []
    for i, line in enumerate(lines):
        speaker = speakers[i % len(speakers)]
        if path.suffix == ".csv":
            name, *texts = line.split("|")
            said = next((text for text in reversed(texts) if text.strip()), "")
            items.append(Item(as_spoken(" ".join(said.split())), speaker, name))
        else:
            items.append(Item(line, speaker))
    return items


def make_shards(out: Path, items: Sequence[Item], speak: Speak, gains_db: Mapping[str, float], per: int) -> int:
    """Writes the missing shards of `per` items each and returns their number. gains_db: by speaker."""
    paths = [out / f"shard{number:05}.npz" for number in range(-(-len(items) // per))]
    missing = {number: path for number, path in enumerate(paths) if not path.exists()}
    with ThreadPoolExecutor(1) as pool:  # trims and writes one shard while the next is spoken
        written = pool.submit(int)  # a placeholder
        for number, path in missing.items():
            batch = items[number * per : (number + 1) * per]
            spoken = speak(batch, number)
            written.result()
            written = pool.submit(_write, path, batch, spoken, gains_db)
            print(path.name, flush=True)
        written.result()
    return len(missing)


def _write(path: Path, items: Sequence[Item], spoken: list[np.ndarray], gains_db: Mapping[str, float]) -> None:
    clips: list[Clip] = []
    for item, pcm in zip(items, spoken, strict=True):
        cut = trimmed(np.clip(pcm * np.float32(10 ** (gains_db[item.speaker] / 20)), -1, 1))
        if LENGTHS_S[0] <= len(cut) / SAMPLE_RATE_HZ <= LENGTHS_S[1]:
            clips.append(Clip(item.text, item.speaker, np.frombuffer(to_pcm16(cut), "<i2")))
    write_shard(path, clips)


EXAMPLES = """examples:
  python -m mktts train teacher --kokoro KOKORO --fetch
  python -m mktts train teacher --kokoro KOKORO --texts texts.xz --speakers heart=af_heart:2 --out AUDIO
  python -m mktts train teacher --program "cat wavs/{name}.wav" --texts metadata.csv --speakers linda --out AUDIO

Shards that are there are kept, so that a run can be cut anywhere. The last line of standard output is JSON: how many
were made, or the files that were fetched and their bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--kokoro", type=Path, metavar="KOKORO", help="folder of Kokoro-82M's files")
    source.add_argument("--program", metavar="COMMAND", help="with {text}, {speaker}, {name} and {wav} in it")
    parser.add_argument("--fetch", action="store_true", help="only download KOKORO: 160 MB, of which 56 stay")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="of `train texts`, or metadata.csv")
    parser.add_argument("--clips", type=int, help="sentences from the first on (default: all)")
    parser.add_argument("--per-shard", type=int, default=1_000, help="clips of a file (default: %(default)s)")
    parser.add_argument("--speakers", default="", help="NAME=VOICE:DB by turns: a voice of Kokoro's, and dB to add")
    parser.add_argument("--out", type=Path, metavar="AUDIO", help="folder for audio shards")
    parser.add_argument("--device", default="auto", help="Kokoro's (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Makes the shards. Raises as the teacher, and OptionsError for missing arguments."""
    if arguments.fetch and arguments.kokoro:
        fetch(arguments.kokoro)
        print(json.dumps({path.name: path.stat().st_size for path in sorted(arguments.kokoro.iterdir())}))
        return 0
    given = re.findall(r"([^,=:]+)(?:=([^,:]*))?(?::([-+.\d]+))?", arguments.speakers)
    if not (arguments.texts and given and arguments.out):
        raise OptionsError("expected --texts, --speakers and --out, found one of them missing: add it")
    items = read_texts(arguments.texts, [name for name, *_ in given])[: arguments.clips]
    if arguments.kokoro:
        speak = kokoro(arguments.kokoro, arguments.device, {name: voice for name, voice, _ in given})
    else:
        speak = program(arguments.program)
    gains_db = {name: float(db or 0) for name, _, db in given}
    print(json.dumps({"shards": make_shards(arguments.out, items, speak, gains_db, arguments.per_shard)}))
    return 0
