"""The file of points and figures: what may stand in it, how it is merged, and what follows from its points.

`figures`: name -> {value, unit, n, p95?, p99?}, with revision, device, driver, torch, date and command beside.
`points`: see `mktts.measure.bench.load.point.measured`. A point that was not held for its whole time is refused. A
later point takes the place of an earlier one of the same conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mktts.common import read_object, require_writable, write_json
from mktts.errors import MetricsError
from mktts.measure.bench.load.point import SCHEMA, clean
from mktts.measure.bench.load.settings import HELD_S, LoadSettings
from mktts.measure.environment import head

FIRST_PCM_MS = 100.0  # p99, of a point that counts as carried on a GPU
AUDIBLE_MS = 500.0  # p95, of one on a CPU
_SAME = ("listeners", "codec", "deterministic", "engine", "context_rows", "context", "checkpoint", "dtype", "backend")
_NEAR = 1.15  # a figure at N listeners is read off a point of N to so many times N
_LARGE = "1b7"


def provenance(device: str) -> dict[str, Any]:
    """What stands beside each figure and point. device: as torch names it."""
    facts = head(device)
    return {name: facts[name] for name in ("revision", "device", "driver", "torch", "date")}


def figure(values: float | list[float], unit: str, n: int | None = None, **beside: Any) -> dict[str, Any]:
    """A figure: one number of `n` observations, or the median of several with their p95 and p99."""
    if isinstance(values, list):
        from mktts.measure.metrics import percentiles

        spread = percentiles(values)
        found = {"value": spread["median"], "n": spread["n"], "p95": spread["p95"], "p99": spread["p99"]}
        return {**found, "unit": unit, **beside}
    return {"value": values, "unit": unit, "n": 1 if n is None else n, **beside}


def require_place(path: Path, settings: LoadSettings) -> None:
    """Before anything is measured: makes the folder. Raises MetricsError where the loads are not held long enough to be
    reported, or nothing can be written there."""
    if not settings.reportable:
        raise MetricsError(
            f"a point is held for at least {HELD_S:g} s to be kept, got --seconds {settings.seconds:g}: leave "
            "--into out"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(path)


def read(path: Path) -> dict[str, Any]:
    """The file's document; an empty one where there is no file. Raises MetricsError for anything else."""
    if not path.exists():
        return {"figures": {}, "points": []}
    document = read_object(path, MetricsError)
    if not isinstance(document.get("figures"), dict) or not isinstance(document.get("points"), list):
        raise MetricsError(f"{path}: expected figures and points, found {sorted(document)}: name another file")
    return document


def merge(
    path: Path,
    beside: dict[str, Any],
    gpu: bool,
    points: Iterable[dict[str, Any]] = (),
    figures: dict[str, dict[str, Any]] | None = None,
    reports: dict[str, Any] | None = None,
    derive: Callable[[list[dict[str, Any]], bool], dict[str, dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Puts points, figures and reports (name -> what a section has to say besides) into the file; returns all of it.

    beside: `provenance`, with the command. gpu: which rule `carried` has. derive: all figures of such a
    file in place of those that `carried` adds. Raises MetricsError for a point that was
    not held or lacks a name, for a figure or report of a run that was not held, and for a file of another device:
    nothing is written then.
    """
    for name, value in {**(figures or {}), **(reports or {})}.items():
        if value.get("held") is False:
            raise MetricsError(f"{name} is of a run that was not held for its whole time: it cannot be reported")
    document = read(path)
    if document.get("device", beside["device"]) != beside["device"]:
        raise MetricsError(
            f"{path}: figures of {document['device']}, and this is {beside['device']}: name another file"
        )
    kept = list(document["points"])
    for point in points:
        check(point)
        kept = [other for other in kept if not same(other, point)] + [{**point, **beside}]
    kept.sort(key=lambda p: (p["model_size"], p["context_rows"], p["codec"], p["deterministic"], p["listeners"]))
    given = {name: {**value, **beside} for name, value in (figures or {}).items()}
    derived = (derive or carried)(kept, gpu)
    others = {} if derive else {name: value for name, value in document["figures"].items() if name not in DERIVED}
    document |= {
        **{name: beside[name] for name in ("device", "driver", "torch")},
        "points": kept,
        "figures": others | given | derived,
        "reports": document.get("reports", {})
        | {name: {**report, **beside} for name, report in (reports or {}).items()},
    }
    write_json(path, document)
    return document


def check(point: dict[str, Any]) -> None:
    """Raises MetricsError for a point that may not be reported."""
    if missing := [name for name in SCHEMA if name not in point]:
        raise MetricsError(f"a point names {', '.join(SCHEMA)}; this one lacks {', '.join(missing)}")
    if point.get("held") is not True:
        raise MetricsError(
            f"a point that was not held for its whole time cannot be reported: {point['duration_s']:.1f} s at "
            f"{point.get('listeners')} listeners"
        )


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two points have the same conditions."""
    return all(one.get(name) == other.get(name) for name in _SAME)


DERIVED = ("listeners", "listeners_full_precision", "listeners_1p7b", "ttfc_p99_512_ms", "ttfc_p99_1024_ms")


def carried(points: list[dict[str, Any]], gpu: bool) -> dict[str, dict[str, Any]]:
    """What follows from held points.

    listeners: the largest open_mean that was served without underrun or refusal and within FIRST_PCM_MS (on a CPU
    AUDIBLE_MS), by the fast codec of the small model; the same by the full one, and by the 1.7B model. Where several
    contexts were measured, the smallest of their figures. On a CPU the codec has one precision: `listeners` is its.
    ttfc_p99_N_ms: of the smallest point of at least N open streams (and not far above) of each engine and precision the
    best, and of the contexts the worst.
    """
    small = [point for point in points if point["model_size"] != _LARGE]
    fast = [point for point in small if point["codec"] == "fast" or not gpu]
    groups = {
        "listeners": fast,
        "listeners_full_precision": [point for point in small if point["codec"] == "full" and gpu],
        "listeners_1p7b": [point for point in points if point["model_size"] == _LARGE],
    }
    found = {name: best for name, group in groups.items() if (best := _most(group, gpu))}
    for open_streams in (512, 1_024):
        if first := _first_pcm_at(small, open_streams):
            found[f"ttfc_p99_{open_streams}_ms"] = first
    return found


def _contexts(points: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    rows = sorted({point["context_rows"] for point in points})
    return {count: [point for point in points if point["context_rows"] == count] for count in rows}


def _passes(point: dict[str, Any], gpu: bool) -> bool:
    wait_ms, most_ms = (point["ttfc_p99_ms"], FIRST_PCM_MS) if gpu else (point["audible_p95_ms"], AUDIBLE_MS)
    return clean(point) and wait_ms is not None and wait_ms <= most_ms


def _most(points: list[dict[str, Any]], gpu: bool) -> dict[str, Any] | None:
    best = {}
    for rows, group in _contexts(points).items():
        passed = [point for point in group if _passes(point, gpu)]
        if not passed:
            return None  # this context carries none of the loads that were tried
        best[rows] = max(passed, key=lambda point: point["open_mean"])
    return _read_off(best, "open_mean", "listeners", min) if best else None


def _first_pcm_at(points: list[dict[str, Any]], open_streams: int) -> dict[str, Any] | None:
    near = [point for point in points if open_streams <= point["open_mean"] <= _NEAR * open_streams]
    near = [point for point in near if point["ttfc_p99_ms"] is not None]
    best = {}
    for rows, group in _contexts(near).items():
        smallest: dict[Any, dict[str, Any]] = {}
        for point in sorted(group, key=lambda point: point["open_mean"]):
            smallest.setdefault((point["engine"], point["codec"], point["deterministic"]), point)
        best[rows] = min(smallest.values(), key=lambda point: point["ttfc_p99_ms"])
    return _read_off(best, "ttfc_p99_ms", "ms", max) if best else None


def _read_off(best: dict[int, dict[str, Any]], name: str, unit: str, choose: Any) -> dict[str, Any]:
    point = choose(best.values(), key=lambda point: point[name])
    beside = ("revision", "device", "driver", "torch", "date", "command", "codec", "deterministic", "engine")
    spread = {"p95": point["ttfc_p95_ms"], "p99": point["ttfc_p99_ms"]} if unit == "ms" else {}
    by_context = {str(rows): other[name] for rows, other in best.items()}
    facts = {key: point.get(key) for key in (*beside, "underruns", "ttfc_p99_ms", "open_mean", "playing_mean")}
    return figure(point[name], unit, point["arrivals"], by_context=by_context, **spread, **facts)
