"""`python -m mktts bench --load` and `--url`: loads of real-time listeners, one after the other. The last line of JSON:
device, driver, torch, revision, date, environment, settings, points, figures, missing.

The file that loads are merged into: `points`, a load each (mktts.measure.load.client.measured), with revision, device,
driver, torch, date and command beside; `figures`, name -> {value, unit, n, ...}, read off a point. A load that was not
held for its whole time is refused. A later one takes the place of an earlier one of the same conditions."""

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

FIRST_PCM_MS = 100.0  # p99, of a load that counts as carried on a GPU
FIRST_BYTE_MS = 120.0  # p99, of a server's
AUDIBLE_MS = 500.0  # p95, of one on a CPU
DERIVED = (
    "listeners", "listeners_full_precision", "listeners_1p7b", "ttfc_p99_512_ms", "ttfc_p99_1024_ms", "ttfb_p99_ms",
    "underruns", "refused",
)  # fmt: skip
PROVENANCE = ("revision", "device", "driver", "torch", "date")  # what stands beside each point and figure
_CONTEXT = itemgetter("context_rows")
_SAME = ("listeners", "codec", "deterministic", "engine", "context_rows", "context", "checkpoint", "dtype", "backend")
_BESIDE = (
    *PROVENANCE, "command", "codec", "deterministic", "engine", "underruns", "ttfc_p99_ms", "ttfb_p99_ms", "open_mean",
    "playing_mean",
)  # fmt: skip
_NEAR = 1.15  # a figure at N listeners is read off a point of N to so many times N
_LARGE = "1b7"
_SERVER = "server"  # the engine that a server's listeners know
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
    group.add_argument("--load", action="store_true", help="how many listeners the synthesizer carries")
    group.add_argument("--capacity", action="store_true", help="measures anew how many it serves in time, and keeps it")
    group.add_argument("--url", help="how many a server with /v1/audio/speech carries, by its address")
    offered = f"offered loads (default: {_GPU_LISTENERS}; on a CPU {_CPU_LISTENERS})"
    group.add_argument("--listeners", metavar="N,...", help=offered)
    add_options(group, LoadSettings)
    group.add_argument("--into", type=Path, metavar="FILE", help="merge loads and figures into this file")
    server = parser.add_argument_group("a server, with --url")
    keys = 'keys of the request, as {"model": "tts-1", "voice": "alloy"}'
    server.add_argument("--keys", metavar="JSON", default="{}", help=keys)
    server.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key (default: $MKTTS_API_KEY)")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Holds the loads; each is merged into --into as soon as it is there. Returns document and table. Raises
    MetricsError where no server answers, and where loads that are to be kept are not held long enough."""
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
            least, got = f"a load is held for at least {HELD_S:g} s to be kept", f"--seconds {settings.seconds:g}"
            raise MetricsError(f"{least}, got {got}: leave --into out")
        into.parent.mkdir(parents=True, exist_ok=True)
        require_writable(into)
    subject = subject or Subject(settings)
    with nullcontext() if arguments.url else subject.source:
        document: dict[str, Any] = {**head(settings.device), **subject.place}
        document["settings"] = {**asdict(settings), "random_weights": subject.about["random_weights"]}
        document |= {"points": [], "figures": {}, "missing": {}}
        command = ["python", "-m", "mktts", *sys.argv[1:]]
        if "--into" in command:  # its path is this machine's
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
                # More were offered than it says, and those it let in were in time.
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
    """What the model arguments stand for, with the device's name."""
    names = ("checkpoint", "revision", "backend", "dtype")
    return {name: getattr(arguments, name) for name in names} | {"device": str(device_named(arguments.device))}


class Subject:
    """A synthesizer in this process, loaded and warmed up; raises what Synthesizer.load raises.

    about: what speaks, as it stands in a point."""

    place: dict[str, Any] = {}

    def __init__(self, settings: LoadSettings) -> None:
        self.settings = settings
        self.stopped = threading.Event()  # ends the load that is held
        checkpoint = settings.open()
        self.texts = texts_for(checkpoint, settings.context_rows)
        self.source = Synthesizer.load(checkpoint, **settings.loading())
        self.source.warm_up()
        self.about = {
            "checkpoint": settings.checkpoint,
            "random_weights": checkpoint.is_random,
            # Where nothing is said, some streams are made singly.
            "deterministic": settings.deterministic or (settings.engine, settings.deterministic) == ("batch", None),
            "model_size": checkpoint.config.model_size,
            "backend": self.source.backend_name,
            "dtype": str(self.source.dtype).removeprefix("torch."),
        }

    def capacity(self, renew: bool) -> dict[str, Any]:
        """What the synthesizer says that it serves in time, and how it knows. renew: measured anew."""
        found = self.source.measure_capacity(renew=renew)
        return {"value": None if math.isinf(found.streams) else found.streams, "basis": found.basis}

    def met(self, listeners: int) -> tuple[dict[str, Any], client.LoadRun, np.ndarray]:
        """The point of a load, what its listeners met one by one, and the ticks (n,) of the held time; of a server
        none. Raises MetricsError once another thread has set `stopped`."""
        self.stopped.clear()
        seen = client.hold(self.source, self.texts, self.settings, listeners, self.stopped)
        point = client.measured(seen, self.settings)
        ticks, engine = client.held_ticks(seen, getattr(self.source, "ticks", np.zeros(0)))
        lanes = getattr(self.source, "lanes", None)  # None: one stream's codec
        codec, context = lanes.precision if lanes else "full", "text" if self.texts.text else "natural"
        offered = {"listeners": listeners, "context_rows": self.texts.rows, "context": context, "codec": codec}
        return point | engine | offered | self.about, seen, ticks


class Server(Subject):
    """A server by its address, ours or another of OpenAI's shape. Raises MetricsError where none answers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = client.endpoint(arguments.url)
        keys = read_keys(arguments.api_key_file)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        health = health_of(url, headers)
        if not (isinstance(health.get("model"), dict) and "random_weights" in health["model"]):
            health = {"model": {}}  # it is not ours
        self._health, model = health, health["model"]
        if (of_all := object_of(arguments.keys)) is None:
            raise MetricsError(f"--keys takes a JSON object, got {arguments.keys!r}")
        voice = next(iter(health.get("speakers") or ()), "alloy")
        body = {"model": "tts-1", "voice": voice, "response_format": "pcm", **of_all}
        # Of another server: "cuda" where this machine has a GPU.
        device, host = health.get("device") or ("cuda" if head("cuda")["device"] else "cpu"), urlsplit(url).hostname
        self.place = {} if is_loopback(host) else {"device": f"{device} at {host}", "driver": None}
        self.stopped, is_random = threading.Event(), bool(model.get("random_weights"))
        checkpoint, asked = model.get("checkpoint") or body["model"], given(LoadSettings, arguments)
        own = {name: asked.pop(name) for name in ("engine", "codec", "deterministic", "context_rows")}
        if set_here := ", ".join(name for name, value in own.items() if value is not None):
            raise MetricsError(f"--url measures a server as it was started: leave out what sets {set_here}")
        self.settings = LoadSettings(checkpoint=checkpoint, device=device, **asked)
        # Random weights have no end of their own: max_frames is the length, whatever is said.
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
            "host_us_per_frame": None,  # it is the server's that would tell something
        }

    def capacity(self, renew: bool) -> dict[str, Any]:
        """As the server says it, where it does."""
        return {"value": self._health.get("streams_max"), "basis": self._health.get("capacity")}


def health_of(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """GET /health of the server of this route: the JSON object there, an empty one where there is something else, or
    nothing. Raises MetricsError where no server answers."""
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
    """The document as people read it: a line a load, then the figures."""
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


# ---- the file that loads are merged into, and what follows from them


def merge(
    path: Path, beside: dict[str, Any], gpu: bool, points: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Puts points, and `more` figures that no point gives, into the file and reads its figures off again; returns all
    of it. beside: PROVENANCE, with the command. gpu: which limit of the wait counts. Raises MetricsError for a point
    that was not held, and for a file of another device or of something else: nothing is written then."""
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
    """What a later point has in common with the one whose place it takes."""
    return tuple(map(point.get, _SAME))


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

    def listeners_of(point: dict[str, Any]) -> float:  # a server's streams end before their listeners have played them
        return min(point["listeners"], point["playing_mean"]) if point["engine"] == _SERVER else point["open_mean"]

    found = {}
    for name, group in groups.items():
        passed = [point for point in group if _passes(point, gpu)]
        if passed and {*map(_CONTEXT, passed)} == {*map(_CONTEXT, group)}:  # else one carries no load at all
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
    """The worst context's value, of each the best of its points, and what stands beside it."""
    contexts = sorted({*map(_CONTEXT, points)})
    chosen = [best((point for point in points if _CONTEXT(point) == rows), key=value) for rows in contexts]
    point = worst(chosen, key=value)
    by_context = {str(one["context_rows"]): value(one) for one in chosen}
    about = {"n": point["arrivals"], "offered": point["listeners"], "by_context": by_context}
    return {"value": value(point), "unit": unit, **about, **{name: point.get(name) for name in _BESIDE}}
