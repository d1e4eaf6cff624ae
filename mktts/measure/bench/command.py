"""`python -m mktts bench`: prints timings as a table, and then as one line of JSON.

Every section (mktts.measure.bench.sections) runs in its own process. If one fails or times out, only its figures are
missing; `missing` gives the reason. --load and --url measure real-time listeners instead (mktts.measure.load)."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.arguments import add_model_arguments
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import python_path, write_json
from mktts.errors import MetricsError
from mktts.llm.checkpoint import open_text_checkpoint
from mktts.measure.bench import sections
from mktts.measure.bench.sections import BenchSettings, Measured
from mktts.measure.environment import head, versions
from mktts.measure.load import command as load
from mktts.measure.metrics import object_of, percentiles

_STREAMS = ("ttfc_ms", "ttfc_sentence_ms", "rtf", "frame_with_codec_ms")
# Name -> the function of a section and the figures that it must yield; it may yield others.
SECTIONS: dict[str, tuple[Callable[[BenchSettings], Measured], tuple[str, ...]]] = {
    "streams": (sections.streams, _STREAMS),
    "codec": (sections.codec, ("codec_1_ms", "codec_8_ms")),
    "frames": (sections.frames, ("talker_step_ms", "predictor_ms", "frame_ms")),
    "text": (sections.text, ("text_tok_s",)),
    "large": (sections.large, ("frame_1p7b_ms",)),
    "faster": (sections.faster, ("faster_frame_ms", *(f"faster_{name}" for name in _STREAMS))),
    "upstream": (sections.upstream, ("upstream_frame_ms", "upstream_rtf", "upstream_frame_with_codec_ms")),
    "words": (sections.words, ("word_start_error_s", "word_end_error_s")),
}
BY_ITSELF = tuple(SECTIONS)[:2]
TIMED = tuple(SECTIONS)[:-1]
CHECKPOINT = "random:tiny"
TIMEOUT_S = 240.0  # per section
_PACKAGES = ("qwen-tts", "qwen-tts-hf", "faster-qwen3-tts", "transformers", "tokenizers", "torchaudio")
_TAIL_LINES = 12  # of a failed section's messages
EXAMPLES = f"""examples:
  python -m mktts bench
  python -m mktts bench --checkpoint random:0.6b --only streams
  python -m mktts bench --peers --output bench.json
  python -m mktts bench --checkpoint small --device cpu --only words --output words.json
  python -m mktts bench --capacity
  python -m mktts bench --load --listeners 2,4 --seconds 10
  python -m mktts bench --load --engine batch --listeners 40 --burst --seconds 20
  python -m mktts bench --url http://127.0.0.1:8000 --listeners 2,4 --seconds 10
  python -m mktts bench --load --engine batch --listeners 512,1024 --context 332 --into load.json
  python -m mktts bench --checkpoint path/to/checkpoint --backend torch --device cuda | tail -1 > bench.json

Without --checkpoint: {CHECKPOINT}, with --peers {BenchSettings.checkpoint}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, checkpoint=None)
    parser.add_argument("--only", metavar="NAME,...", help=f"{', '.join(SECTIONS)} (default: {', '.join(BY_ITSELF)})")
    parser.add_argument("--peers", action="store_true", help="all timings: ours, faster-qwen3-tts and upstream")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the document to this file")
    load.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Prints a table, then the document. Returns 0 if no expected figure is missing, else 1."""
    if arguments.load + arguments.peers + (arguments.url is not None) > 1:
        raise MetricsError("--load, --peers and --url are different measurements: choose one")
    if arguments.load or arguments.capacity or arguments.url:
        document, shown = load.measure(arguments)
    else:
        names = arguments.only.split(",") if arguments.only else list(TIMED if arguments.peers else BY_ITSELF)
        if unknown := [name for name in names if name not in SECTIONS]:
            raise MetricsError(f"--only names sections of {', '.join(SECTIONS)}, found {', '.join(unknown)}")
        quick = {} if arguments.peers else {"frames": 50, "samples": 20, "utterances": 5}
        settings = BenchSettings(**load.model_of(arguments), **quick)
        if settings.checkpoint is None:
            settings = replace(settings, checkpoint=BenchSettings.checkpoint if arguments.peers else CHECKPOINT)
        document = measure(settings, names, arguments.output)
        shown = table(document)
    print(shown)
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 1 if document["missing"] else 0


def measure(settings: BenchSettings, names: Sequence[str], output: Path | None = None) -> dict[str, Any]:
    """Runs sections. Returns device, driver, torch, revision, date, environment, figures, missing, settings, packages.

    output: written after every section, so that an aborted run leaves what it measured. Raises what opening the
    checkpoints raises."""
    if "large" in names:  # creates the sections' checkpoints first, which may take longer than a section's time limit
        open_checkpoint(settings.large)
    if "text" in names:
        open_text_checkpoint(settings.text_model)
    is_random = settings.open().is_random
    document: dict[str, Any] = {
        **head(settings.device),
        "figures": {},
        "missing": {},
        "settings": {**asdict(settings), "random_weights": is_random},
        "packages": versions(_PACKAGES),
    }
    for name in names:
        program = [sys.executable, "-m", "mktts.measure.bench.command", name, json.dumps(asdict(settings))]
        figures, notes, reason = run_section(program)
        document["figures"] |= figures
        document["settings"] |= notes
        missing = [figure for figure in SECTIONS[name][1] if figure not in figures]
        document["missing"] |= dict.fromkeys(missing, reason or "the section gave no such figure")
        if output is not None:
            write_json(output, document)
    return document


def run_section(words: list[str], timeout_s: float = TIMEOUT_S) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Runs a program that prints JSON lines. Returns its figures, its notes, and why it failed, or None."""
    how = {"stdin": subprocess.DEVNULL, "env": {**os.environ, **python_path()}, "timeout": timeout_s}
    try:
        done = subprocess.run(words, capture_output=True, **how)
        reason = f"exit status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as late:
        done, reason = late, f"stopped after {timeout_s:.0f} s"
    said, messages = ((part or b"").decode(errors="replace") for part in (done.stdout, done.stderr))
    messages = [line.rstrip() for line in messages.splitlines() if line.strip()]
    if reason is not None:
        reason = ": ".join([reason, *messages[-1:]])
        print(f"{words[-2]}: {reason}", *messages[-_TAIL_LINES:], sep="\n    ", file=sys.stderr, flush=True)
    found: dict[str, dict[str, Any]] = {"figures": {}, "notes": {}}
    for line in said.splitlines():
        if (value := object_of(line)) is not None:  # None: output of a library
            for kind, known in found.items():
                known |= value.get(kind, {})
    return found["figures"], found["notes"], reason


def print_section(name: str, settings: BenchSettings) -> None:
    """Measures a section in this process, and prints each figure as a line of JSON once it is known. Output of
    libraries goes to standard error."""
    output = sys.stdout
    with redirect_stdout(sys.stderr):
        for found in SECTIONS[name][0](settings):
            line = {"notes": found}
            if not isinstance(found, dict):
                figure, values, unit = found
                line = {"figures": {figure: {**percentiles(values), "unit": unit}}}
            print(json.dumps(line), file=output, flush=True)


def table(document: dict[str, Any]) -> str:
    """Formats the document as a table."""
    settings = document["settings"]
    named = ("checkpoint", "large", "backend", "device", "dtype", "text")
    machine = f"{document['device']}, {document['environment']['cpu_cores']} cores, driver {document['driver']}"
    asked = ", ".join(f"{name} {settings[name]}" for name in named if settings.get(name))
    lines = [f"{machine}, torch {document['torch']}", asked]
    lines += [RANDOM_WEIGHTS] if settings["random_weights"] else []
    lines += ["", f"{'':32}{'median':>12}{'p95':>12}{'n':>6}  unit"]
    for name, figure in document["figures"].items():
        lines.append(f"{name:32}{figure['median']:12,.3f}{figure['p95']:12,.3f}{figure['n']:>6}  {figure['unit']}")
    lines += [f"{name:32}missing: {reason}" for name, reason in document["missing"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print_section(sys.argv[1], BenchSettings(**json.loads(sys.argv[2])))
