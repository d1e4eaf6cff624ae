"""`python -m mktts bench --load`: its arguments, its table, and the line of JSON."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mktts.checkpoint import DEFAULT_CHECKPOINT
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.measure.bench.load import book
from mktts.measure.bench.load.point import clean
from mktts.measure.bench.load.sections import SECTIONS, Numbers, Result, Subject
from mktts.measure.bench.load.settings import HELD_S, LoadSettings, loads, of_file
from mktts.measure.environment import head
from mktts.measure.tables import cell

_GPU_CHECKPOINT = "random:0.6b"
_GPU_LISTENERS, _CPU_LISTENERS = "256,512", "2,4"
_COLUMNS = (
    ("offered", "listeners"), ("open", "open_mean"), ("playing", "playing_mean"), ("rows", "context_rows"),
    ("byte p99", "ttfb_p99_ms"),
    ("p50 ms", "ttfc_p50_ms"), ("p95 ms", "ttfc_p95_ms"), ("p99 ms", "ttfc_p99_ms"), ("audible p95", "audible_p95_ms"),
    ("underruns", "underruns"), ("refused", "refused"), ("errors", "errors"), ("audio s/s", "audio_s_per_s"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("real-time listeners")
    group.add_argument("--load", action="store_true", help="how many listeners the synthesizer carries")
    group.add_argument(
        "--section", action="append", choices=SECTIONS, help="what to measure; may be repeated (default: listeners)"
    )
    group.add_argument(
        "--listeners", metavar="N,...", help=f"offered loads (default: {_GPU_LISTENERS}; on a CPU {_CPU_LISTENERS})"
    )
    group.add_argument(
        "--seconds", type=float, default=HELD_S, help="that a load is held (default: %(default)s; less cannot be kept)"
    )
    group.add_argument("--warm-seconds", type=float, default=8.0, help="before, to build it up (default: %(default)s)")
    group.add_argument("--context", type=int, metavar="ROWS", help="of every prompt (default: 32 with random weights)")
    group.add_argument(
        "--context-kind", choices=("auto", "text", "instruct", "voice", "natural"), default="auto", help="what fills it"
    )
    group.add_argument("--engine", choices=("auto", "single", "batch"), help="of the synthesizer (default: its own)")
    group.add_argument("--codec-precision", choices=("full", "fast"), help="of the batch engine")
    group.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="codes that no neighbour changes")
    group.add_argument("--max-streams", type=int, metavar="N", help="of the batch engine")
    group.add_argument("--seed", type=int, default=0, help="of the arrivals (default: %(default)s)")
    group.add_argument("--texts", type=int, default=Numbers.texts, help="of say_many (default: %(default)s)")
    group.add_argument(
        "--soak-seconds", type=float, default=Numbers.soak_s, help="that the soak lasts (default: %(default)s)"
    )
    group.add_argument("--into", type=Path, metavar="FILE", help="merge points and figures into this file")
    group.add_argument("--again", action="store_true", help="also points that the file has of this revision")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Runs the sections; every result is merged into --into as soon as it is there. Returns document and table.

    Raises MetricsError where --into is given and the loads are not held long enough to be reported.
    """
    from mktts.model.backend import device_named

    device = device_named(arguments.device)
    gpu = device.type == "cuda"
    settings = LoadSettings(
        checkpoint=arguments.checkpoint or (_GPU_CHECKPOINT if gpu else DEFAULT_CHECKPOINT),
        revision=arguments.revision,
        backend=arguments.backend,
        device=str(device),
        dtype=arguments.dtype,
        engine=arguments.engine,
        codec=arguments.codec_precision,
        deterministic=arguments.deterministic,
        max_streams=arguments.max_streams,
        context_rows=arguments.context,
        context=arguments.context_kind,
        seconds=arguments.seconds,
        warm_s=arguments.warm_seconds,
        seed=arguments.seed,
    )
    sections = arguments.section or ["listeners"]
    if arguments.into is not None:
        book.require_place(arguments.into, settings)
    named = arguments.listeners
    default = (_GPU_LISTENERS if gpu else _CPU_LISTENERS) if sections == ["listeners"] else ""
    listeners = loads(named if named is not None else default)
    known = book.read(arguments.into)["points"] if arguments.into and not arguments.again else []
    beside = book.provenance(settings.device)

    def there(point: dict[str, Any]) -> bool:
        return any(book.same(point, other) and other["revision"] == beside["revision"] for other in known)

    numbers = Numbers(listeners, there, arguments.texts, arguments.soak_seconds)
    return _run(settings, sections, numbers, arguments.into)


def _run(
    settings: LoadSettings, sections: list[str], numbers: Numbers, into: Path | None
) -> tuple[dict[str, Any], str]:
    document: dict[str, Any] = {**head(settings.device), "settings": of_file(settings)}
    document |= {"points": [], "figures": {}, "reports": {}, "missing": {}}
    subject, gpu = Subject(settings), settings.device.startswith("cuda")
    document["settings"]["random_weights"] = subject.checkpoint.is_random
    try:
        for name in sections:
            for result in _results(name, subject, numbers, document, alone=len(sections) == 1):
                document["points"] += result.points
                document["figures"] |= result.figures
                document["reports"] |= result.reports
                document["missing"] |= {name: result.failed} if result.failed else {}
                if into is not None:
                    command = settings.command(name, **result.numbers)
                    beside = book.provenance(settings.device) | {"command": command}
                    merged = book.merge(into, beside, gpu, result.points, result.figures, result.reports)
                    derived = [key for key in book.DERIVED if key in merged["figures"]]
                    document["figures"] |= {key: merged["figures"][key] for key in derived}
    finally:
        subject.close()
    return document, table(document)


def _results(name: str, subject: Subject, numbers: Numbers, document: dict[str, Any], alone: bool) -> Iterator[Result]:
    """Of one section. Where it is not alone, what fails in it stands under `missing`, and the others go on."""
    try:
        yield from SECTIONS[name](subject, numbers)
    except Exception as error:
        if alone:
            raise
        traceback.print_exc()
        document["missing"][name] = f"{type(error).__name__}: {error}"


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    lines = [f"{document['device']}, driver {document['driver']}, torch {document['torch']}"]
    if document["settings"]["random_weights"]:
        lines.append(RANDOM_WEIGHTS)
    runs = [("", point) for point in document["points"]]
    runs += [(name, report) for name, report in document["reports"].items() if "open_mean" in report]
    if runs:
        lines += ["", " ".join(f"{title:>11}" for title, _ in _COLUMNS)]
    for name, run in runs:
        marks = [name] if name else []
        marks += [f"{run['engine']}, codec {run['codec']}", *(["deterministic"] if run["deterministic"] else [])]
        marks += [] if run["held"] else ["not held: cannot be reported"]
        marks += ["stutters, refuses or fails"] if not clean(run) else []
        values = (run.get(key) for _, key in _COLUMNS)
        lines.append(" ".join(f"{_shown(value):>11}" for value in values) + "  " + ", ".join(marks))
        late = run["generator"]
        lines.append(
            f"{'':11} listeners' loop: {_shown(late['cpu_percent'])} % of a core, late by at most "
            f"{_shown(late['loop_late_max_ms'])} ms; chunks to listeners p99 {_shown(late['delivery_p99_ms'])} ms; "
            f"latest PCM {_shown(run['late_max_ms'])} ms; host {_shown(run['host_us_per_frame'])} us a frame"
        )
    if document["figures"]:
        lines += ["", f"{'':34}{'value':>12}{'p95':>12}{'p99':>12}{'n':>8}  unit"]
    for name, value in document["figures"].items():
        cells = "".join(f"{_shown(value.get(key)):>12}" for key in ("value", "p95", "p99"))
        lines.append(f"{name:34}{cells}{value['n']:>8}  {value['unit']}")
    for name, report in document["reports"].items():
        for check, passed in report.get("checks", {}).items():
            lines.append(f"{name}: {check.replace('_', ' ')}: {'yes' if passed else 'NO'}")
        for kind, count in report.get("error_kinds", {}).items():
            lines.append(f"{name}: {count} times {kind}")
    for point in document["points"]:
        lines += [
            f"{point['listeners']} listeners: {count} times {kind}" for kind, count in point["error_kinds"].items()
        ]
    lines += [f"{name}: {reason}" for name, reason in document["missing"].items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "-" if value is None else cell(round(value, 2) if isinstance(value, float) else value)
