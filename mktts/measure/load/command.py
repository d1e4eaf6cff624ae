"""`python -m mktts bench --load` and `--url`: measures loads of real-time listeners, one after another. The last line
is JSON with device, driver, torch, revision, date, environment, settings, points, figures and missing.

The file that loads are merged into has `points`, one per load (mktts.measure.load.client.measured), with revision,
device, driver, torch, date and command; and `figures`, name -> {value, unit, n, ...}, derived from the points. A load
that was not held for its whole duration is refused. A later load replaces an earlier one with the same conditions."""

import argparse
import math
import shlex
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mktts.arguments import add_options, given
from mktts.checkpoint import DEFAULT_CHECKPOINT
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import read_object, require_writable, whole_numbers, write_json
from mktts.errors import MetricsError
from mktts.measure.bench.sections import WORDS
from mktts.measure.environment import head
from mktts.measure.load import client
from mktts.measure.load.settings import HELD_S, LoadSettings, LoadTexts, texts_for
from mktts.measure.metrics import cell, object_of
from mktts.model.backend import device_named
from mktts.server.settings import is_loopback, read_keys
from mktts.synth import Synthesizer

FIRST_PCM_MS = 100.0  # limit of the p99 for a load that counts as carried on a GPU
FIRST_BYTE_MS = 120.0  # limit of the p99 for a load on a server with a GPU
AUDIBLE_MS = 500.0  # limit of the p95 for a load on a CPU
DERIVED = (
    "listeners", "listeners_full_precision", "listeners_1p7b", "ttfc_p99_512_ms", "ttfc_p99_1024_ms", "ttfb_p99_ms",
    "underruns", "refused",
)  # fmt: skip
PROVENANCE = ("revision", "device", "driver", "torch", "date")  # recorded with each point and figure
_CONTEXT = itemgetter("context_rows")
_SAME = ("listeners", "codec", "deterministic", "engine", "context_rows", "context", "checkpoint", "dtype", "backend")
_BESIDE = (
    *PROVENANCE, "command", "codec", "deterministic", "engine", "underruns", "ttfc_p99_ms", "ttfb_p99_ms", "open_mean",
    "playing_mean",
)  # fmt: skip
_NEAR = 1.15  # a figure at N listeners comes from a point with N to _NEAR * N open streams
_LARGE = "1b7"
_SERVER = "server"  # the engine's name in points of a server
_GPU_CHECKPOINT = "random:0.6b"
_GPU_LISTENERS, _CPU_LISTENERS = "256,512", "2,4"
_ASK_S = 10.0
_COLUMNS = (
    ("offered", "listeners"), ("arrivals", "arrivals"), ("in time", "in_time"), ("open", "open_mean"),
    ("playing", "playing_mean"), ("rows", "context_rows"), ("byte p99", "ttfb_p99_ms"), ("PCM p50", "ttfc_p50_ms"),
    ("PCM p99", "ttfc_p99_ms"), ("audible p95", "audible_p95_ms"), ("underruns", "underruns"), ("refused", "refused"),
    ("errors", "errors"), ("audio s/s", "audio_s_per_s"),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("real-time listeners")
    group.add_argument("--load", action="store_true", help="measure how many listeners the synthesizer carries")
    group.add_argument("--capacity", action="store_true", help="measure its capacity anew, and store it")
    group.add_argument("--url", help="measure a server with /v1/audio/speech at this address")
    offered = f"offered loads (default: {_GPU_LISTENERS}; on a CPU {_CPU_LISTENERS})"
    group.add_argument("--listeners", metavar="N,...", help=offered)
    add_options(group, LoadSettings)
    group.add_argument("--into", type=Path, metavar="FILE", help="merge loads and figures into this file")
    server = parser.add_argument_group("a server, with --url")
    keys = 'keys of the request, like {"model": "tts-1", "voice": "alloy"}'
    server.add_argument("--keys", metavar="JSON", default="{}", help=keys)
    server.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key (default: $MKTTS_API_KEY)")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Measures the loads, and merges each into --into as soon as it is complete. Returns document and table. Raises
    MetricsError if no server answers, or loads that are to be recorded are too short."""
    into, subject = arguments.into, None
    if arguments.url:
        subject = Server(arguments)
        settings = subject.settings
    else:
        model = model_of(arguments)
        own = _GPU_CHECKPOINT if "cuda" in model["device"] else DEFAULT_CHECKPOINT
        settings = LoadSettings(**model | {"checkpoint": model["checkpoint"] or own}, **given(LoadSettings, arguments))
    gpu = settings.device.startswith("cuda")
    default = _GPU_LISTENERS if gpu else _CPU_LISTENERS
    listeners = whole_numbers("--listeners", default if arguments.listeners is None else arguments.listeners)
    if arguments.capacity and not arguments.load:
        listeners = ()
    recorded = settings.seconds >= HELD_S
    if into is not None:
        if not recorded:
            least, got = f"a recorded load takes at least {HELD_S:g} s", f"--seconds {settings.seconds:g}"
            raise MetricsError(f"{least}, got {got}: leave --into out")
        into.parent.mkdir(parents=True, exist_ok=True)
        require_writable(into)
    subject = subject or Subject(settings)
    with nullcontext() if arguments.url else subject.source:
        document: dict[str, Any] = {**head(settings.device), **subject.place}
        document["settings"] = {**asdict(settings), "random_weights": subject.about["random_weights"]}
        document |= {"points": [], "figures": {}, "missing": {}}
        command = ["python", "-m", "mktts", *sys.argv[1:]]
        if "--into" in command:  # a path of this machine
            place = command.index("--into")
            del command[place : place + 2]
        beside = {name: document[name] for name in PROVENANCE} | {"command": shlex.join(command)}
        said = subject.capacity(arguments.capacity)
        more = {"capacity_said": {**said, "unit": "listeners", "n": 1}} if said["basis"] else {}
        for count in listeners:
            point, _, _ = subject.met(count)
            document["points"].append(point)
            if settings.burst:
                heard = point["arrivals"] - point["refused"] - point["unanswered"]
                of_all = {"unit": "listeners", "n": point["arrivals"]}
                more[f"burst_{count}_accepted"] = {"value": heard, **of_all}
                more[f"burst_{count}_stalled"] = {"value": point["stalled"], **of_all}
                continue
            if recorded and point["refused"] and point["in_time"] == point["arrivals"] - point["refused"]:
                # More listeners were offered than the capacity, and all that were admitted were in time.
                more["capacity_held"] = {"value": point["playing_mean"], "unit": "listeners", "n": point["in_time"]}
            if into is not None:
                merge(into, beside, gpu, [point])
    if recorded and listeners and not settings.burst:
        document["figures"] = carried([{**point, **beside} for point in document["points"]], gpu)
        if "listeners" not in document["figures"]:
            why = "no load was carried: not every listener was in time, or waits were long"
            document["missing"]["listeners"] = why
    document["figures"] |= more
    if into is not None:
        merge(into, beside, gpu, [], more)
    return document, table(document)


def model_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's settings from the arguments, with the device resolved."""
    names = ("checkpoint", "revision", "backend", "dtype")
    return {name: getattr(arguments, name) for name in names} | {"device": str(device_named(arguments.device))}


class Subject:
    """The measured system: a synthesizer in this process, loaded and warmed up. Raises what Synthesizer.load raises.

    about: description of the model, part of every point."""

    place: dict[str, Any] = {}

    def __init__(self, settings: LoadSettings) -> None:
        self.settings = settings
        self.stopped = threading.Event()  # ends the current load
        checkpoint = settings.open()
        self.texts = texts_for(checkpoint, settings.context_rows)
        self.source = Synthesizer.load(checkpoint, **settings.loading())
        self.source.warm_up()
        self.about = {
            "checkpoint": settings.checkpoint,
            "random_weights": checkpoint.is_random,
            # By default only the batch engine is deterministic, as others may generate some streams singly.
            "deterministic": settings.deterministic or (settings.engine, settings.deterministic) == ("batch", None),
            "model_size": checkpoint.config.model_size,
            "backend": self.source.backend_name,
            "dtype": str(self.source.dtype).removeprefix("torch."),
        }

    def capacity(self, renew: bool) -> dict[str, Any]:
        """The capacity that the synthesizer states, and how it was determined. renew: measure it anew."""
        found = self.source.measure_capacity(renew=renew)
        return {"value": None if math.isinf(found.streams) else found.streams, "basis": found.basis}

    def met(self, listeners: int) -> tuple[dict[str, Any], client.LoadRun, np.ndarray]:
        """Measures a load: returns its point, the raw results of its listeners, and the ticks (n,) of the measured
        time, none for a server. Raises MetricsError if another thread sets `stopped`."""
        self.stopped.clear()
        seen = client.hold(self.source, self.texts, self.settings, listeners, self.stopped)
        point = client.measured(seen, self.settings)
        ticks, engine = client.held_ticks(seen, getattr(self.source, "ticks", np.zeros(0)))
        lanes = getattr(self.source, "lanes", None)  # None: the codec of one stream
        codec, context = lanes.precision if lanes else "full", "text" if self.texts.text else "natural"
        offered = {"listeners": listeners, "context_rows": self.texts.rows, "context": context, "codec": codec}
        return point | engine | offered | self.about, seen, ticks


class Server(Subject):
    """A server at an address, ours or another OpenAI-compatible one. Raises MetricsError if none answers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = client.endpoint(arguments.url)
        keys = read_keys(arguments.api_key_file)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        health = health_of(url, headers)
        if not (isinstance(health.get("model"), dict) and "random_weights" in health["model"]):
            health = {"model": {}}  # not an mktts server
        self._health, model = health, health["model"]
        if (of_all := object_of(arguments.keys)) is None:
            raise MetricsError(f"--keys takes a JSON object, got {arguments.keys!r}")
        voice = next(iter(health.get("speakers") or ()), "alloy")
        body = {"model": "tts-1", "voice": voice, "response_format": "pcm", **of_all}
        # For a server that does not state its device: "cuda" if this machine has a GPU.
        device, host = health.get("device") or ("cuda" if head("cuda")["device"] else "cpu"), urlsplit(url).hostname
        self.place = {} if is_loopback(host) else {"device": f"{device} at {host}", "driver": None}
        self.stopped, is_random = threading.Event(), bool(model.get("random_weights"))
        checkpoint, asked = model.get("checkpoint") or body["model"], given(LoadSettings, arguments)
        own = {name: asked.pop(name) for name in ("engine", "codec", "deterministic", "context_rows")}
        if set_here := ", ".join(name for name, value in own.items() if value is not None):
            raise MetricsError(f"--url measures a server as it was started: leave out what sets {set_here}")
        self.settings = LoadSettings(checkpoint=checkpoint, device=device, **asked)
        # Random weights do not end by themselves: max_frames is the length, whatever the text.
        self.source = client.HttpSource(url, headers, body, ("max_frames", "seed") if is_random else ())
        self.texts = LoadTexts(0, f"{WORDS}." if is_random else None, {})
        self.about = {
            "checkpoint": checkpoint,
            "random_weights": is_random,
            "codec": "the server's",
            "deterministic": False,
            "model_size": model.get("size", ""),
            "backend": health.get("backend", "unknown"),
            "dtype": health.get("dtype", "unknown"),
            "host_us_per_frame": None,  # the client's CPU time says nothing about the server's
        }

    def capacity(self, renew: bool) -> dict[str, Any]:
        """The capacity that the server states; None if it states none."""
        return {"value": self._health.get("streams_max"), "basis": self._health.get("capacity")}


def health_of(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """The JSON object at GET /health of the server with this route; {} if there is none. Raises MetricsError if no
    server answers."""
    parts = urlsplit(url)
    root = parts.path.removesuffix(client.PATH)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with closing(kind(parts.hostname, parts.port, timeout=_ASK_S)) as connection:
            connection.request("GET", f"{root}/health", headers=headers)
            return object_of(connection.getresponse().read()) or {}
    except (OSError, HTTPException) as error:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{root}"  # without a password
        raise MetricsError(f"no server answers at {shown}: {type(error).__name__}: {error}") from None


def table(document: dict[str, Any]) -> str:
    """Formats the document as a table: one line per load, then the figures."""
    lines = [f"{document['device']}, driver {document['driver']}, torch {document['torch']}"]
    lines += [RANDOM_WEIGHTS] if document["settings"]["random_weights"] else []
    lines += ["", " ".join(f"{title:>11}" for title, _ in _COLUMNS)]
    for point in document["points"]:
        marks = [f"{point['engine']}, codec {point['codec']}", *(["deterministic"] if point["deterministic"] else [])]
        marks += [] if point["held"] else ["not held: cannot be recorded"]
        marks += ["every listener in time"] if client.clean(point) else ["NOT every listener in time"]
        lines.append(" ".join(f"{cell(point.get(key)) or '-':>11}" for _, key in _COLUMNS) + "  " + ", ".join(marks))
        late = point["generator"]
        behind = f"late by at most {cell(late['loop_late_max_ms'])} ms; latest PCM {cell(point['late_max_ms'])} ms"
        lines.append(f"{'':11} client: {cell(late['cpu_percent'])} % of a core, {behind}")
        lines += [f"{'':11} {count} times {kind}" for kind, count in point["error_kinds"].items()]
    for name, figure in document["figures"].items():
        lines.append(f"{name}: {cell(figure['value']) or '-'} {figure['unit']}, n {figure['n']}")
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in document["missing"].items())])


# ---- the file that loads are merged into, and the figures derived from them


def merge(
    path: Path, beside: dict[str, Any], gpu: bool, points: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Merges points, and `more` figures that no point gives, into the file, derives its figures again, and returns the
    whole document. beside: PROVENANCE and the command. gpu: selects the latency limit. Raises MetricsError, and writes
    nothing, for a point that was not held, and for a file of another device or of another kind."""
    document = read_object(path, MetricsError) if path.exists() else {"figures": {}, "points": []}
    if not isinstance(document.get("figures"), dict) or not isinstance(document.get("points"), list):
        raise MetricsError(f"{path}: expected figures and points, found {sorted(document)}: name another file")
    if document.get("device", beside["device"]) != beside["device"]:
        raise MetricsError(f"{path}: figures of {document['device']}, not of {beside['device']}: name another file")
    for point in points:
        if point["held"] is not True:
            short = f"{point['duration_s']:.1f} s at {point['listeners']} listeners"
            raise MetricsError(f"a load that was not held for its whole time cannot be recorded: {short}")
    latest = {conditions(one): one for one in (*document["points"], *({**point, **beside} for point in points))}
    kept = sorted(latest.values(), key=itemgetter("model_size", "context_rows", "codec", "deterministic", "listeners"))
    others = {name: value for name, value in document["figures"].items() if name not in DERIVED}
    document |= {name: beside[name] for name in ("device", "driver", "torch")}
    others |= carried(kept, gpu) | {name: {**value, **beside} for name, value in (more or {}).items()}
    document |= {"points": kept, "figures": others}
    write_json(path, document)
    return document


def conditions(point: dict[str, Any]) -> tuple[Any, ...]:
    """The conditions of a point; a later point replaces an earlier one with the same conditions."""
    return tuple(map(point.get, _SAME))


def carried(points: list[dict[str, Any]], gpu: bool) -> dict[str, dict[str, Any]]:
    """The figures derived from held points.

    listeners: the most listeners that were all in time for the whole run with a latency within FIRST_PCM_MS (a server:
    FIRST_BYTE_MS, a CPU: AUDIBLE_MS), by the small model with the fast codec; the other names are the same for the full
    codec and for the 1.7B model. It is the mean number of open streams; for a server that of listeners playing at once,
    at most as many as were offered. With several contexts, the smallest of their figures. ttfb_p99_ms: of a server at
    that load. ttfc_p99_N_ms: from points of N to _NEAR * N open streams, the smallest of each engine and precision; the
    best of these, and the worst over contexts."""
    small = [point for point in points if point["model_size"] != _LARGE]
    precisions = {"full"} if gpu else set()
    groups = {
        "listeners": [point for point in small if point["codec"] not in precisions],
        "listeners_full_precision": [point for point in small if point["codec"] in precisions],
        "listeners_1p7b": [point for point in points if point["model_size"] == _LARGE],
    }

    def listeners_of(point: dict[str, Any]) -> float:  # a server's streams end before they have been played
        return min(point["listeners"], point["playing_mean"]) if point["engine"] == _SERVER else point["open_mean"]

    found = {}
    for name, group in groups.items():
        passed = [point for point in group if _passes(point, gpu)]
        if passed and {*map(_CONTEXT, passed)} == {*map(_CONTEXT, group)}:  # else no load was carried at some context
            found[name] = _figure(passed, listeners_of, "listeners", best=max, worst=min)
    if (best := found.get("listeners")) and best["engine"] == _SERVER:
        found["ttfb_p99_ms"] = {**best, "value": best["ttfb_p99_ms"], "unit": "ms"}
    for count in (512, 1_024):
        near = [p for p in small if count <= p["open_mean"] <= _NEAR * count and p["ttfc_p99_ms"] is not None]
        near.sort(key=itemgetter("open_mean"), reverse=True)
        smallest = {itemgetter("context_rows", "engine", "codec", "deterministic")(point): point for point in near}
        if smallest:
            figure = _figure(smallest.values(), itemgetter("ttfc_p99_ms"), "ms", best=min, worst=max)
            found[f"ttfc_p99_{count}_ms"] = figure
    return found


def _passes(point: dict[str, Any], gpu: bool) -> bool:
    name, most_ms = ("ttfc_p99_ms", FIRST_PCM_MS) if gpu else ("audible_p95_ms", AUDIBLE_MS)
    if gpu and point["engine"] == _SERVER:
        name, most_ms = "ttfb_p99_ms", FIRST_BYTE_MS
    return point["held"] and client.clean(point) and point[name] is not None and point[name] <= most_ms


def _figure(
    points: Iterable[dict[str, Any]], value: Callable[[dict], float], unit: str, best: Callable, worst: Callable
) -> dict[str, Any]:
    """The figure of the worst context, each represented by its best point, with the fields of _BESIDE."""
    contexts = sorted({*map(_CONTEXT, points)})
    chosen = [best((point for point in points if _CONTEXT(point) == rows), key=value) for rows in contexts]
    point = worst(chosen, key=value)
    by_context = {str(one["context_rows"]): value(one) for one in chosen}
    about = {"n": point["arrivals"], "offered": point["listeners"], "by_context": by_context}
    return {"value": value(point), "unit": unit, **about, **{name: point.get(name) for name in _BESIDE}}
