"""`python -m mktts bench`: timings for people as a table, then for programs as one line of JSON.

This checkpoint on this machine (mktts.measure.bench.here); with --peers ours beside other programs on one card
(mktts.measure.bench.runner); with --load the real-time listeners that are carried (mktts.measure.bench.load);
with --url those of a server (mktts.measure.bench.load.served).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.common import write_json
from mktts.errors import MetricsError
from mktts.measure.bench import here, runner
from mktts.measure.bench.load import command as load
from mktts.measure.bench.load import served
from mktts.measure.bench.settings import BenchSettings
from mktts.spec import FRAME_MS

EXAMPLES = """examples:
  python -m mktts bench
  python -m mktts bench --codec full --repeats 10
  python -m mktts bench --checkpoint random:0.6b --load-only
  python -m mktts bench --peers --output bench.json
  python -m mktts bench --load --listeners 2,4 --seconds 10
  python -m mktts bench --url http://127.0.0.1:8000 --listeners 2,4 --seconds 10
  python -m mktts bench --load --engine batch --listeners 512,1024 --context 332 --into load.json
  python -m mktts bench --checkpoint path/to/checkpoint --backend torch --device cuda | tail -1 > bench.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = BenchSettings()
    add_model_arguments(parser, checkpoint=None)
    parser.epilog = f"{parser.epilog}\n\nWithout --checkpoint: {here.CHECKPOINT}, with --peers {default.checkpoint}."
    parser.add_argument("--frames", type=_positive, default=50, help=f"of {FRAME_MS:.0f} ms, per stream (default: 50)")
    parser.add_argument("--repeats", type=_positive, default=5, help="measured streams (default: 5)")
    parser.add_argument("--text", default=here.TEXT, help="what is said")
    parser.add_argument("--speaker", help="a speaker of the checkpoint (default: its first)")
    parser.add_argument(
        "--codec",
        choices=("checkpoint", "full"),
        default="checkpoint",
        help="codec timed by itself: the checkpoint's, or one of released size with random weights",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--load-only", action="store_true", help="only load time and peak memory, in a fresh process")
    only.add_argument("--codec-only", action="store_true", help="only the codec by itself")
    parser.add_argument("--json-only", action="store_true", help="no table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the document there")
    peers = parser.add_argument_group("side by side with the peers")
    peers.add_argument("--peers", action="store_true", help="ours, upstream, faster-qwen3-tts, and ours as CUDA graphs")
    peers.add_argument(
        "--large", default=default.large, metavar="CHECKPOINT", help="for the 1.7B figures (default: %(default)s)"
    )
    peers.add_argument(
        "--text-model",
        default=default.text_model,
        metavar="CHECKPOINT",
        help="Qwen3 text model (default: %(default)s)",
    )
    peers.add_argument("--only", metavar="SECTION,...", help=f"of {', '.join(runner.EXPECTED)}")
    peers.add_argument(
        "--section-timeout",
        type=float,
        default=runner.TIMEOUT_S,
        metavar="SECONDS",
        help="of a section (default: %(default)s)",
    )
    load.add_arguments(parser)
    served.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Prints a table, then the document. 0 where no expected figure is missing, else 1."""
    if arguments.load + arguments.peers + (arguments.url is not None) > 1:
        raise MetricsError("--load, --peers and --url are measurements of their own: name one")
    measure = (
        _of_server if arguments.url else load.measure if arguments.load else _beside_peers if arguments.peers else _here
    )
    document, table = measure(arguments)
    if not arguments.json_only:
        print(table)
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 1 if document.get("missing") else 0


def _here(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    source = arguments.checkpoint or here.CHECKPOINT
    checkpoint = open_checkpoint(source, arguments.revision)  # a random one is made here, unmeasured
    parts = ("load",) if arguments.load_only else ("codec",) if arguments.codec_only else ("load", "streams", "codec")
    document = here.measure(
        checkpoint,
        loading(arguments),
        text=arguments.text,
        speaker=arguments.speaker,
        frames=arguments.frames,
        repeats=arguments.repeats,
        full_codec=arguments.codec == "full",
        parts=parts,
    )
    document["settings"]["checkpoint"] = source
    _store(arguments.output, document)
    return document, here.table(document)


def _of_server(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    document = served.measure(arguments)
    return document, load.table(document)


def _beside_peers(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from mktts.model.backend import device_named

    sections = arguments.only.split(",") if arguments.only else list(runner.EXPECTED)
    if unknown := [name for name in sections if name not in runner.EXPECTED]:
        raise MetricsError(f"--only names sections of {', '.join(runner.EXPECTED)}, found {', '.join(unknown)}")
    settings = BenchSettings(
        checkpoint=arguments.checkpoint or BenchSettings.checkpoint,
        revision=arguments.revision,
        large=arguments.large,
        text_model=arguments.text_model,
        backend=arguments.backend,
        device=str(device_named(arguments.device)),
    )
    document = runner.measure(
        settings, sections, arguments.section_timeout, lambda document: _store(arguments.output, document)
    )
    return document, runner.table(document)


def _store(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, document)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value
