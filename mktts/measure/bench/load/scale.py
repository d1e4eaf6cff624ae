"""`python -m mktts bench scale`: how many listeners two GPUs of one host carry, beside one, and what one's death costs.

A part a call, so that a machine that is lent for minutes is enough; a later part finds the earlier ones in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mktts.common import write_json
from mktts.errors import MetricsError
from mktts.measure.bench.load import book, hosts, served
from mktts.measure.bench.load.attendance import Attendance
from mktts.measure.bench.load.fleet import attend_in_processes
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.point import clean, late_gaps, measured
from mktts.measure.bench.load.remote import RemoteServer, endpoint
from mktts.measure.bench.load.settings import HELD_S, LoadSettings, loads
from mktts.measure.bench.load.visits import visits
from mktts.measure.tables import cell

PARTS = ("one", "two", "ray", "kill", "kill-ray")
EXAMPLES = """examples:
  python -m mktts bench scale --part one --listeners 768,896 --into outputs/reference/scale.json
  python -m mktts bench scale --part two --part ray --listeners 1536,1792 --into outputs/reference/scale.json
  python -m mktts bench scale --part kill --part kill-ray --listeners 640 --into outputs/reference/scale.json
  python -m mktts bench scale --checkpoint small --device cpu --part kill-ray --listeners 4 --seconds 10

one: a server alone. two: one a GPU behind HAProxy. ray: the same as replicas of Ray Serve. kill, kill-ray: a load that
one GPU carries, on two of which one is killed in the middle. Loads are tried in the order given, up to the first that
is not carried; a table, then one line of JSON."""
_NAMES = {"one": "listeners_1", "two": "listeners_2", "ray": "listeners_2_ray"}
_COLUMNS = ("part", "listeners", "playing_mean", "ttfb_p99_ms", "underruns", "refused", "errors", "carried")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, required=True, help="what to measure; repeat it")
    parser.add_argument("--listeners", metavar="N,...", required=True, help="offered loads")
    parser.add_argument("--checkpoint", default="random:0.6b", help="default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--engine", choices=("auto", "single", "batch"), help="of the servers (default: their own)")
    parser.add_argument("--engine-process", choices=("auto", "same", "own"), help="likewise")
    parser.add_argument("--codec-precision", choices=("full", "fast"), help="of the batch engine")
    parser.add_argument("--seconds", type=float, default=HELD_S, help="that a load is held (default: %(default)s)")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="before (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), metavar="N")
    parser.add_argument("--into", type=Path, metavar="FILE", help="merge points and figures into this file")


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where a load was not carried of which nothing smaller was. Raises MetricsError for bad numbers."""
    tried = loads(arguments.listeners)
    held = arguments.seconds >= HELD_S
    if arguments.into is not None and not held:
        raise MetricsError(f"a load is held for at least {HELD_S:g} s to be kept, got --seconds {arguments.seconds:g}")
    document: dict[str, Any] = {"points": [], "reports": {}}
    for part in arguments.part:
        with _host(part, arguments) as host:
            for listeners in tried:
                point, report = _held(part, host, arguments, listeners)
                document["points"].append(point)
                document["reports"] |= report
                _say(part, point)
                if arguments.into is not None and point["held"]:
                    _keep(arguments.into, point, report, arguments.device)
                if report or not point["carried"]:  # whoever was killed is dead
                    break
    document["figures"] = figures(document["points"], document["reports"])
    print(json.dumps(document))
    best = {point["part"] for point in document["points"] if point["carried"]}
    return 0 if best >= {part for part in arguments.part if part in _NAMES} else 1


def figures(points: list[dict[str, Any]], reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What follows from points of all parts, and from the reports of kills.

    listeners_1, listeners_2, listeners_2_ray: the most listeners who played at once, all in time: by one GPU, by two
    behind HAProxy, by two under Ray Serve. two_over_one, two_over_one_ray: the latter two over listeners_1.
    lost_streams: that broke off where one of two replicas was killed. disturbed_streams: of all others, those that had
    an underrun, or no sound, or broke off too.
    """
    found = {}
    for part, name in _NAMES.items():
        carried = [point for point in points if point["part"] == part and point["carried"]]
        if carried:
            best = max(carried, key=served.playing)
            facts = {key: best[key] for key in ("open_mean", "ttfb_p99_ms", "underruns", "refused", "duration_s")}
            found[name] = book.figure(served.playing(best), "listeners", best["arrivals"], **facts)
    for name, above in (("two_over_one", "listeners_2"), ("two_over_one_ray", "listeners_2_ray")):
        if above in found and "listeners_1" in found:
            found[name] = book.figure(found[above]["value"] / found["listeners_1"]["value"], "ratio")
    kills = [reports[name] for name in ("kill-ray", "kill") if name in reports]
    if kills:
        for name in ("lost_streams", "disturbed_streams"):
            found[name] = book.figure(sum(one[name] for one in kills), "streams", sum(one["streams"] for one in kills))
    return found


def killed(seen: Attendance, killed_s: float) -> dict[str, Any]:
    """What the death of a replica at `killed_s` (of the clock of `seen`) did to the streams of the run.

    disturbed_streams: of those that were open then and not lost, or came later in the held time: that ran dry after it,
    had no sound, were refused or broke off. ended_within_s: the longest that a stream which was lost went on after it.
    Raises MetricsError where the run did not come to its end.
    """
    if seen.end is None:
        raise MetricsError("the run did not come to its end")
    end_s = seen.end.at_s
    lost = [one for one in seen.listeners if one.error and _was_open(one, killed_s)]
    later = [one for one in seen.listeners if one.opened_s is not None and killed_s < one.planned_s < end_s]
    others = [one for one in seen.listeners if one not in lost and _was_open(one, killed_s)] + later
    others = [one for one in others if one.timed and not one.left]
    dry = late_gaps(others, killed_s, end_s, seen.closed_s)
    failed = [one.error is not None or one.refused or one.first_s is None for one in others]
    return {
        "streams": len(lost) + len(others),
        "open_streams": sum(_was_open(one, killed_s) for one in seen.listeners),
        "begun_after": len(later),
        "lost_streams": len(lost),
        "disturbed_streams": sum(bool(gaps) or bad for gaps, bad in zip(dry, failed, strict=True)),
        "ended_within_s": max((one.ended_s - killed_s for one in lost if one.ended_s is not None), default=None),
    }


def _was_open(one: Listener, at_s: float) -> bool:
    return one.opened_s is not None and one.opened_s <= at_s and (one.ended_s is None or one.ended_s > at_s)


def _host(part: str, arguments: argparse.Namespace) -> AbstractContextManager[hosts.Host]:
    words = ["--checkpoint", arguments.checkpoint, "--device", arguments.device]
    words += ["--engine", arguments.engine] if arguments.engine else []
    words += ["--engine-process", arguments.engine_process] if arguments.engine_process else []
    words += ["--codec-precision", arguments.codec_precision] if arguments.codec_precision else []
    devices: list[int | None] = [0, 1] if arguments.device == "cuda" else [None, None]
    if part == "one":
        return hosts.one(words, devices[0])
    if part.endswith("ray"):
        return hosts.by_ray(words, len(devices))
    return hosts.behind_haproxy(words, devices, _free_port())


def _held(
    part: str, host: hosts.Host, arguments: argparse.Namespace, listeners: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The point of a load, and by its part's name the report of a kill."""
    url = endpoint(host.url)
    server = served.ask(url, None)
    settings = LoadSettings(
        checkpoint=arguments.checkpoint, device=server.device, seconds=arguments.seconds, warm_s=arguments.warm_seconds
    )
    remote = RemoteServer(url, served.body_of(server), None, ("max_frames", "seed") if server.random_weights else ())
    begin_s, end_s = settings.warm_s, settings.warm_s + settings.seconds
    killing = hosts.Killing(host.servers[-1]) if part.startswith("kill") else None
    middle_s = begin_s + settings.seconds / 2
    seen = attend_in_processes(
        remote,
        served.said_to(server),
        visits(settings, listeners),
        (begin_s, end_s, end_s + settings.tail_s),
        arguments.processes,
        lambda starts_s: None if killing is None else killing.at(starts_s + middle_s),
    )
    point = measured(seen, settings) | served.conditions(server, settings, listeners, arguments.processes)
    prompt = not settings.reportable or served.is_prompt(point, server.device.startswith("cuda"))
    point |= {"part": part, "carried": clean(point) and prompt and (point["held"] or not settings.reportable)}
    if killing is None:
        return point, {}
    if killing.killed_s is None:
        raise MetricsError("the run ended before the middle of its held time: nobody was killed")
    return point, {part: killed(seen, killing.killed_s)}


def _keep(into: Path, point: dict[str, Any], report: dict[str, Any], device: str) -> None:
    """Merges a point and a report; the figures are made anew of all that the file holds."""
    into.parent.mkdir(parents=True, exist_ok=True)
    beside = book.provenance(device)
    document = book.read(into)
    kept = [one for one in document["points"] if (one["part"], one["listeners"]) != (point["part"], point["listeners"])]
    kept.append({**point, **beside})
    reports = document.get("reports", {}) | {name: {**value, **beside} for name, value in report.items()}
    found = {name: {**value, **beside} for name, value in figures(kept, reports).items()}
    order = {part: number for number, part in enumerate(PARTS)}
    kept.sort(key=lambda one: (order[one["part"]], one["listeners"]))
    write_json(into, {**document, **beside, "points": kept, "reports": reports, "figures": found})


def _say(part: str, point: dict[str, Any]) -> None:
    print(f"{part}: " + ", ".join(f"{name} {cell(point.get(name))}" for name in _COLUMNS[1:]), flush=True)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
