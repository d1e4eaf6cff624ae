"""`python -m mktts bench speak-all`: how fast a table of thousands of sentences becomes files, as a user has it done.

The sentences are written by a generator: distinct, of one clause to three, 7 s long on average. `python -m mktts
speak-all` speaks them in a process of its own; what it says of itself is held against the folder that it leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mktts.checkpoint.arguments import add_model_arguments
from mktts.common import python_path, whole_number, write_json
from mktts.errors import MetricsError
from mktts.measure.bench.load.book import figure
from mktts.measure.environment import head
from mktts.spec import FRAME_RATE_HZ

EXAMPLES = """examples:
  python -m mktts bench speak-all --sentences 50
  python -m mktts bench speak-all --checkpoint random:0.6b --into speak_all.json

Random weights never end by themselves: their sentences get the frames that their words take at 150 words a minute."""

_WORDS_HZ = 150 / 60
_NAMES = (
    "the captain",
    "my neighbour",
    "a young doctor",
    "the old teacher",
    "our guide",
    "nobody in town",
    "her brother",
)
_VERBS = (
    "found",
    "carried",
    "remembered",
    "described",
    "borrowed",
    "painted",
    "repaired",
    "left behind",
    "asked about",
)
_THINGS = (
    "a letter", "the blue lantern", "two wooden chairs", "the last train ticket", "an umbrella", "a map of the harbour",
    "the broken clock", "three baskets of apples", "a short poem",
)  # fmt: skip
_PLACES = (
    "near the bridge", "in the market", "behind the station", "under the stairs", "on the way home", "at the lake",
    "between two meetings", "without saying a word", "early in the morning", "before the rain began",
)  # fmt: skip
_JOINS = ("and", "while", "because", "but later", "so")
_CLAUSES = (1, 1, 1, 2, 2, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sentences", type=int, default=10_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--format", default="wav", help="of the files: wav, flac, opus, mp3 (default: %(default)s)")
    parser.add_argument(
        "--codec-precision", choices=("full", "fast"), default="full", help="see speak-all (default: %(default)s)"
    )
    parser.add_argument("--sentence-seed", type=int, default=0, help="of the generator (default: %(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the files there (default: none is kept)")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write the document there")
    parser.add_argument("--ray", action="store_true", help="on every GPU, see speak-all")
    add_model_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Prints a line for people and the document; 0 where every sentence is ok."""
    whole_number("--sentences", arguments.sentences, at_least=1)
    with tempfile.TemporaryDirectory(prefix="mktts-speak-all-") as scratch:
        folder = arguments.folder or Path(scratch, "spoken")
        table = Path(scratch, "sentences.jsonl")
        bounded = arguments.checkpoint.startswith("random:")
        with table.open("w", encoding="utf-8") as file:
            for index, text in enumerate(sentences(arguments.sentences, arguments.sentence_seed)):
                line: dict[str, Any] = {"id": f"{index:06d}", "text": text}
                if bounded:
                    line["max_frames"] = round(len(text.split()) / _WORDS_HZ * FRAME_RATE_HZ)
                file.write(json.dumps(line) + "\n")
        command = _command(arguments, table, folder)
        report = _spoken(command)
        seen = _seen(folder, arguments.sentences)
    if abs(seen["audio_s"] - report["audio_s"]) > 1e-3 * report["audio_s"] or seen["ok"] != report["ok"]:
        raise MetricsError(f"speak-all says {report}, its folder holds {seen}")
    document = _document(arguments, report, seen)
    if arguments.into:
        write_json(arguments.into, document)
    made = f"{report['audio_s']:.0f} s of audio in {report['wall_s']:.1f} s, {report['rtfx']:.1f} s a second"
    print(f"{report['ok']} of {arguments.sentences} sentences, {made}")
    print(json.dumps(document))
    return 0 if report["ok"] == arguments.sentences else 1


def sentences(count: int, seed: int) -> Iterator[str]:
    """`count` different sentences, of one clause to three; the same for the same seed."""
    draw, seen = random.Random(seed), set()
    while len(seen) < count:
        clauses = [
            f"{draw.choice(_NAMES)} {draw.choice(_VERBS)} {draw.choice(_THINGS)} {draw.choice(_PLACES)}"
            for _ in range(draw.choice(_CLAUSES))
        ]
        text = clauses[0]
        for clause in clauses[1:]:
            text += f", {draw.choice(_JOINS)} {clause}"
        text = f"{text[0].upper()}{text[1:]}."
        if text not in seen:
            seen.add(text)
            yield text


def _command(arguments: argparse.Namespace, table: Path, folder: Path) -> list[str]:
    words = ["speak-all", str(table), "-o", str(folder), "--seed", "0"]
    for name in ("format", "codec_precision", "checkpoint", "revision", "backend", "device", "dtype"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    return [sys.executable, "-m", "mktts", *words, *(["--ray"] if arguments.ray else [])]


def _spoken(command: list[str]) -> dict[str, Any]:
    """What the command says last; its progress goes to standard error, as it comes."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **python_path()})
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise MetricsError(f"speak-all ended with status {done.returncode} and no figures") from None


def _seen(folder: Path, count: int) -> dict[str, Any]:
    """The folder by itself: its manifest's lines, and the files that they name."""
    ok = size_bytes = 0
    audio_s = 0.0
    for line in (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "file" in record:
            size_bytes += (folder / record["file"]).stat().st_size
            audio_s += record["duration_s"]
        ok += record["status"] == "ok"
    return {"ok": ok, "audio_s": audio_s, "bytes": size_bytes}


def _document(arguments: argparse.Namespace, report: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    import torch

    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    count = arguments.sentences
    units = {
        "sentences": (count, "sentences"), "audio_s": (report["audio_s"], "s"), "wall_s": (report["wall_s"], "s"),
        "with_loading_s": (report["with_loading_s"], "s"), "rtfx": (report["rtfx"], "s of audio / s"),
        "sentences_hz": (round(count / report["wall_s"], 3), "sentences / s"), "bytes": (seen["bytes"], "bytes"),
        "retried": (report["retried"], "sentences"), "unfinished": (report["unfinished"], "sentences"),
        "failed": (report["failed"] + report["bad"], "sentences"),
    }  # fmt: skip
    names = ("checkpoint", "format", "codec_precision", "sentence_seed", "ray")
    settings = {name: getattr(arguments, name) for name in names}
    command = "python -m mktts bench speak-all"
    figures = {name: figure(value, unit, count) for name, (value, unit) in units.items()}
    return {**head(device), "command": command, "settings": settings, "figures": figures}
