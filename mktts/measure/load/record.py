"""The file that loads are merged into, and what follows from them.

`points`: a load each (mktts.measure.load.client.measured), with revision, device, driver, torch, date and command
beside. `figures`: name -> {value, unit, n, ...}, read off a point. A load that was not held for its whole time is
refused. A later one takes the place of an earlier one of the same conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from mktts.common import read_object, write_json
from mktts.errors import MetricsError
from mktts.measure.load.client import clean

FIRST_PCM_MS = 100.0  # p99, of a load that counts as carried on a GPU
FIRST_BYTE_MS = 120.0  # p99, of a server's
AUDIBLE_MS = 500.0  # p95, of one on a CPU
DERIVED = (
    "listeners", "listeners_full_precision", "listeners_1p7b", "ttfc_p99_512_ms", "ttfc_p99_1024_ms", "ttfb_p99_ms",
    "underruns", "refused",
)  # fmt: skip
PROVENANCE = ("revision", "device", "driver", "torch", "date")  # what stands beside each point and figure
_SAME = ("listeners", "codec", "deterministic", "engine", "context_rows", "context", "checkpoint", "dtype", "backend")
_BESIDE = (
    *PROVENANCE, "command", "codec", "deterministic", "engine", "underruns", "ttfc_p99_ms", "ttfb_p99_ms", "open_mean",
    "playing_mean",
)  # fmt: skip
_NEAR = 1.15  # a figure at N listeners is read off a point of N to so many times N
_LARGE = "1b7"
_SERVER = "server"  # the engine that a server's listeners know


def read(path: Path) -> dict[str, Any]:
    """The file's document; an empty one where there is no file. Raises MetricsError for anything else."""
    if not path.exists():
        return {"figures": {}, "points": []}
    document = read_object(path, MetricsError)
    if not isinstance(document.get("figures"), dict) or not isinstance(document.get("points"), list):
        raise MetricsError(f"{path}: expected figures and points, found {sorted(document)}: name another file")
    return document


def merge(
    path: Path, beside: dict[str, Any], gpu: bool, points: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Puts points, and `more` figures that no point gives, into the file and reads its figures off again; returns all
    of it. beside: PROVENANCE, with the command. gpu: which limit of the wait counts. Raises MetricsError for a point
    that was not held, and for a file of another device: nothing is written then."""
    document = read(path)
    if document.get("device", beside["device"]) != beside["device"]:
        raise MetricsError(
            f"{path}: figures of {document['device']}, and this is {beside['device']}: name another file"
        )
    kept = list(document["points"])
    for point in points:
        if point["held"] is not True:
            raise MetricsError(
                f"a load that was not held for its whole time cannot be recorded: {point['duration_s']:.1f} s at "
                f"{point['listeners']} listeners"
            )
        kept = [other for other in kept if not same(other, point)] + [{**point, **beside}]
    kept.sort(key=lambda p: (p["model_size"], p["context_rows"], p["codec"], p["deterministic"], p["listeners"]))
    others = {name: value for name, value in document["figures"].items() if name not in DERIVED}
    document |= {name: beside[name] for name in ("device", "driver", "torch")}
    document |= {"points": kept, "figures": others | carried(kept, gpu) | (more or {})}
    write_json(path, document)
    return document


def burst(count: int, point: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of so many listeners that came at once."""
    heard = point["arrivals"] - point["refused"] - point["unanswered"]
    return {
        f"burst_{count}_{name}": {"value": value, "unit": "listeners", "n": point["arrivals"]}
        for name, value in (("accepted", heard), ("stalled", point["stalled"]))
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two points have the same conditions."""
    return all(one.get(name) == other.get(name) for name in _SAME)


def carried(points: list[dict[str, Any]], gpu: bool) -> dict[str, dict[str, Any]]:
    """What follows from held points.

    listeners: the most that were all served in time for the whole run, and whose wait was within FIRST_PCM_MS (of a
    server FIRST_BYTE_MS, on a CPU AUDIBLE_MS), by the fast codec of the small model; the same by the full one, and by
    the 1.7B model. The mean of the streams that were open; of a server those that played at once, at most as many as
    were offered. Where several contexts were measured, the smallest of their figures. ttfb_p99_ms: of a server at that
    load. ttfc_p99_N_ms: of the smallest point of at least N open streams (and not far above) of each engine and
    precision the best, and of the contexts the worst."""
    small = [point for point in points if point["model_size"] != _LARGE]
    precisions = {"full"} if gpu else set()
    groups = {
        "listeners": [point for point in small if point["codec"] not in precisions],
        "listeners_full_precision": [point for point in small if point["codec"] in precisions],
        "listeners_1p7b": [point for point in points if point["model_size"] == _LARGE],
    }
    found = {}
    for name, group in groups.items():
        best = _by_context([point for point in group if _passes(point, gpu)], lambda point: -listeners_of(point))
        if best and best.keys() == {point["context_rows"] for point in group}:  # else one carries no load at all
            found[name] = _figure(best, listeners_of, "listeners", min)
    if (best := found.get("listeners")) and best["engine"] == _SERVER:
        found["ttfb_p99_ms"] = {**best, "value": best["ttfb_p99_ms"], "unit": "ms"}
    for count in (512, 1_024):
        near = [p for p in small if count <= p["open_mean"] <= _NEAR * count and p["ttfc_p99_ms"] is not None]
        smallest: dict[Any, dict[str, Any]] = {}
        for point in sorted(near, key=itemgetter("open_mean")):
            smallest.setdefault(itemgetter("context_rows", "engine", "codec", "deterministic")(point), point)
        if smallest:
            wait_ms = itemgetter("ttfc_p99_ms")
            found[f"ttfc_p99_{count}_ms"] = _figure(_by_context(smallest.values(), wait_ms), wait_ms, "ms", max)
    return found


def listeners_of(point: dict[str, Any]) -> float:
    """How many listeners a point stands for: see `carried`."""
    if point["engine"] == _SERVER:  # a server's streams end before their listeners have played them
        return min(point["listeners"], point["playing_mean"])
    return point["open_mean"]


def _passes(point: dict[str, Any], gpu: bool) -> bool:
    name, most_ms = ("ttfc_p99_ms", FIRST_PCM_MS) if gpu else ("audible_p95_ms", AUDIBLE_MS)
    if gpu and point["engine"] == _SERVER:
        name, most_ms = "ttfb_p99_ms", FIRST_BYTE_MS
    return point["held"] and clean(point) and point[name] is not None and point[name] <= most_ms


def _by_context(points: Iterable[dict[str, Any]], key: Callable[[dict], float]) -> dict[int, dict[str, Any]]:
    """Prompt rows -> of their points that with the smallest key."""
    best: dict[int, dict[str, Any]] = {}
    for point in sorted(points, key=key):
        best.setdefault(point["context_rows"], point)
    return dict(sorted(best.items()))


def _figure(
    best: dict[int, dict[str, Any]], value: Callable[[dict], float], unit: str, worst: Callable[..., Any]
) -> dict[str, Any]:
    """The value of the worst context's point, and what stands beside it."""
    point = worst(best.values(), key=value)
    by_context = {str(rows): value(one) for rows, one in best.items()}
    about = {"n": point["arrivals"], "offered": point["listeners"], "by_context": by_context}
    return {"value": value(point), "unit": unit, **about, **{name: point.get(name) for name in _BESIDE}}
