"""`python -m mktts bench --peers`: ours and the peers on one card in one run, every section in a process of its own.

A section that fails or runs past its time loses its own figures only: they stand under `missing` with the reason. The
document is written after every section, so that a run cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import python_path, write_json
from mktts.errors import MetricsError
from mktts.measure.bench.peers import PACKAGES
from mktts.measure.bench.sections import SECTIONS, Settings, command
from mktts.measure.environment import head, versions

# What each section must give. Others may come with them.
EXPECTED = {
    "prepare": (),
    "ours": ("talker_step_ms", "predictor_ms", "frame_ms", "ttfc_ms", "rtf"),
    "codec": ("codec_1_ms", "codec_8_ms"),
    "overlap": (),
    "graph": ("graph_frame_ms",),
    "memory": ("peak_gpu_mb",),
    "text": ("text_tok_s",),
    "large": ("frame_1p7b_ms", "ttfc_1p7b_ms"),
    "faster": ("faster_frame_ms", "faster_ttfc_ms", "faster_rtf"),
    "upstream": ("upstream_frame_ms", "upstream_rtf"),
}
CHECKPOINT = "random:0.6b"
LARGE = "random:1.7b"
TIMEOUT_S = 180.0
_TAIL_LINES = 12  # of a failed section's messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("side by side with the peers")
    group.add_argument("--peers", action="store_true", help="ours, upstream, faster-qwen3-tts, and ours as CUDA graphs")
    group.add_argument("--output", type=Path, metavar="FILE", help="also write the document there (any bench)")
    group.add_argument(
        "--large", default=LARGE, metavar="CHECKPOINT", help="for the 1.7B figures (default: %(default)s)"
    )
    group.add_argument(
        "--text-model",
        default=Settings.text_model,
        metavar="CHECKPOINT",
        help="Qwen3 text model (default: %(default)s)",
    )
    group.add_argument("--only", metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    group.add_argument(
        "--section-timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="of a section (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs the sections and prints a table, then one line of JSON. 0 where no expected figure is missing, else 1."""
    sections = arguments.only.split(",") if arguments.only else list(SECTIONS)
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        raise MetricsError(f"--only names sections of {list(SECTIONS)}, found {unknown}")
    settings = replace(
        Settings(),
        checkpoint=arguments.checkpoint,
        revision=arguments.revision,
        large=arguments.large,
        text_model=arguments.text_model,
        backend=arguments.backend,
        device=arguments.device,
    )

    def store(document: dict[str, Any]) -> None:
        if arguments.output:
            write_json(arguments.output, document)

    document = measure(settings, sections, arguments.section_timeout, store)
    if not arguments.json_only:
        print(table(document))
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 1 if document["missing"] else 0


def measure(
    settings: Settings,
    sections: list[str],
    timeout_s: float = TIMEOUT_S,
    store: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document: device, driver, torch, revision, date, figures, missing, settings, packages, sections."""
    document: dict[str, Any] = {
        **head(settings.device),
        "figures": {},
        "missing": {},
        "settings": asdict(settings),
        "packages": versions(PACKAGES),
        "sections": {},
    }
    for section in sections:
        begun_s = time.perf_counter()
        figures, notes, reason = run_section(command(section, settings), timeout_s)
        document["figures"] |= figures
        document["settings"] |= notes
        for name in EXPECTED[section]:
            if name not in figures:
                document["missing"][name] = reason or "the section gave no such figure"
        document["sections"][section] = {"seconds": time.perf_counter() - begun_s, "error": reason}
        store(document)
    return document


def run_section(words: list[str], timeout_s: float) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Runs a program that prints JSON lines: its figures, its notes, and why it failed (None: it did not)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environment_ = {**os.environ, **python_path()}
        try:
            done = subprocess.run(
                words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment_, timeout=timeout_s
            )
            reason = None if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {timeout_s:.0f} s"
        out.seek(0)
        err.seek(0)
        said, messages = out.read(), [line.rstrip() for line in err if line.strip()]
    if reason is not None:
        if messages:
            reason = f"{reason}: {messages[-1]}"
        print(f"{words[-2]}: {reason}", *messages[-_TAIL_LINES:], sep="\n    ", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    for line in said.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue  # a library that writes to standard output
        if isinstance(value, dict):
            figures |= value.get("figures", {})
            notes |= value.get("notes", {})
    return figures, notes, reason


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    settings = document["settings"]
    lines = [
        f"{document['device']}, driver {document['driver']}, torch {document['torch']}",
        ", ".join(
            f"{name} {settings[name]}" for name in ("checkpoint", "large", "backend", "text") if name in settings
        ),
    ]
    if settings.get("random_weights", True):
        lines.append(RANDOM_WEIGHTS)
    lines += ["", f"{'':32}{'median':>12}{'p95':>12}{'n':>6}  unit"]
    for name, figure in document["figures"].items():
        lines.append(f"{name:32}{figure['median']:>12,.3f}{figure['p95']:>12,.3f}{figure['n']:>6}  {figure['unit']}")
    lines += [f"{name:32}missing: {reason}" for name, reason in document["missing"].items()]
    return "\n".join(lines)
