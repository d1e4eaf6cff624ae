"""Ours and the peers on one card in one run: every section of mktts.measure.bench.sections in its own process.

A section that fails or runs past its time loses its own figures only: they stand under `missing` with the reason. The
document is written after every section, so that a run cut short leaves what it measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import python_path
from mktts.measure.bench.peers import PACKAGES
from mktts.measure.bench.settings import BenchSettings
from mktts.measure.environment import head, versions

# What each section must give. Others may come with them.
EXPECTED = {
    "prepare": (),
    "ours": (
        "talker_step_ms",
        "predictor_ms",
        "frame_ms",
        "ttfc_ms",
        "ttfc_sentence_ms",
        "rtf",
        "frame_with_codec_ms",
    ),
    "codec": ("codec_1_ms", "codec_8_ms"),
    "overlap": (),
    "graph": ("graph_frame_ms",),
    "memory": ("peak_gpu_mb",),
    "text": ("text_tok_s",),
    "large": ("frame_1p7b_ms", "ttfc_1p7b_ms"),
    "faster": (
        "faster_frame_ms",
        "faster_ttfc_ms",
        "faster_ttfc_sentence_ms",
        "faster_rtf",
        "faster_frame_with_codec_ms",
    ),
    "upstream": ("upstream_frame_ms", "upstream_rtf", "upstream_frame_with_codec_ms"),
}
TIMEOUT_S = 180.0
_TAIL_LINES = 12  # of a failed section's messages


def measure(
    settings: BenchSettings,
    sections: list[str],
    timeout_s: float = TIMEOUT_S,
    store: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document: device, driver, torch, revision, date, environment, figures, missing, settings, packages, sections.

    `store` gets it after every section. Figures that EXPECTED names and nobody gave stand under `missing`.
    """
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
        figures, notes, reason = run_section(program(section, settings), timeout_s)
        document["figures"] |= figures
        document["settings"] |= notes
        for name in EXPECTED[section]:
            if name not in figures:
                document["missing"][name] = reason or "the section gave no such figure"
        document["sections"][section] = {"seconds": time.perf_counter() - begun_s, "error": reason}
        store(document)
    return document


def program(section: str, settings: BenchSettings) -> list[str]:
    """The words of the process that measures `section`."""
    return [sys.executable, "-m", "mktts.measure.bench.sections", section, json.dumps(asdict(settings))]


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
