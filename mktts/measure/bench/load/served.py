"""`python -m mktts bench --url URL`: how many listeners a server carries, ours or another of OpenAI's shape.

The open-loop protocol of public benches of speech servers: listeners come by a Poisson process whether the earlier ones
are served or not, every time counts from the planned arrival, each plays from its first PCM on without a prebuffer, and
audible is what `mktts.spec.AUDIBLE_DBFS` says. The listeners live in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mktts.errors import EngineError, MetricsError
from mktts.measure.bench.load import book
from mktts.measure.bench.load.fleet import attend_in_processes
from mktts.measure.bench.load.point import clean, measured
from mktts.measure.bench.load.remote import RemoteServer, endpoint, exchange, is_here
from mktts.measure.bench.load.settings import LoadSettings, loads, of_file
from mktts.measure.bench.load.texts import Said, spoken
from mktts.measure.bench.load.visits import visits
from mktts.measure.bench.settings import WORDS
from mktts.measure.environment import head

FIRST_BYTE_MS = 120.0  # p99, of a point that counts as carried on a GPU
FIGURES = ("listeners", "ttfb_p99_ms", "underruns", "refused")
_GPU_LISTENERS, _CPU_LISTENERS = "256,768", "2,12"
_ASK_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server, by its address", "with --listeners, --seconds, --into as for --load")
    group.add_argument("--url", help="of a server with /v1/audio/speech: its listeners are played")
    group.add_argument("--processes", type=int, metavar="N", help="that play them (default: by the cores there are)")
    group.add_argument("--model", metavar="NAME", help="of the request (default: the first of /v1/models)")
    group.add_argument("--keys", metavar="JSON", default="{}", help='more keys of the request, as {"stream": true}')
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the server's key (default: $MKTTS_API_KEY)")


@dataclass(frozen=True)
class Server:
    """What a server says of itself. ours: it is mktts, and `health` its GET /health."""

    model: str
    health: dict[str, Any]

    @property
    def ours(self) -> bool:
        return bool(self.health)

    @property
    def random_weights(self) -> bool:
        return bool(self.health.get("model", {}).get("random_weights"))

    @property
    def device(self) -> str:
        """As torch names it; "cuda" for another server where this machine has a GPU."""
        if self.ours:
            return self.health["device"]
        return "cuda" if head("cuda")["device"] else "cpu"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plays the loads; every point is merged into --into as soon as it is there. Returns the document.

    Raises MetricsError where no server answers there, and where --into is given and the loads are not held.
    """
    from mktts.server import read_keys

    url = endpoint(arguments.url)
    key = next(iter(read_keys(arguments.api_key_file)), None)
    server = ask(url, key, arguments.model)
    gpu = server.device.startswith("cuda")
    settings = LoadSettings(
        checkpoint=server.health.get("model", {}).get("checkpoint") or server.model,
        device=server.device,
        seconds=arguments.seconds,
        warm_s=arguments.warm_seconds,
        seed=arguments.seed,
    )
    if arguments.into is not None:
        book.require_place(arguments.into, settings)
    body = {**body_of(server, arguments.speaker), **_more(arguments.keys)}
    remote = RemoteServer(url, body, key, ("max_frames", "seed") if server.random_weights else ())
    processes = arguments.processes or max(1, min(8, (os.cpu_count() or 2) // 2))
    if processes < 1:
        raise MetricsError(f"--processes takes a number of at least 1, got {processes}")
    document: dict[str, Any] = {**head(server.device), "settings": {**of_file(settings), "url": _shown(url)}}
    document["settings"] |= {"random_weights": server.random_weights, "processes": processes}
    document |= {"points": [], "figures": {}, "reports": {}, "missing": {}}
    beside = book.provenance(server.device) | {"command": _command(sys.argv[1:])}
    if not is_here(url):  # what is known of this machine is nothing of that one
        beside |= {"device": f"{server.device} at {urlsplit(url).hostname}", "driver": None}
        document |= {name: beside[name] for name in ("device", "driver")}
    for listeners in loads(arguments.listeners or (_GPU_LISTENERS if gpu else _CPU_LISTENERS)):
        point = _point(remote, server, settings, listeners, processes)
        document["points"].append(point)
        if arguments.into is not None:
            book.merge(arguments.into, beside, gpu, [point], derive=figures)
    if settings.reportable:
        document["figures"] = figures([{**point, **beside} for point in document["points"]], gpu)
        if not document["figures"]:
            document["missing"]["listeners"] = "no load was carried: somebody was not in time for the whole of it"
    return document


def ask(url: str, key: str | None, model: str | None = None) -> Server:
    """Raises MetricsError where no server answers."""
    root = url.removesuffix("/v1/audio/speech")
    try:
        health, models = (asyncio.run(_got(f"{root}{path}", key)) for path in ("/health", "/v1/models"))
    except (OSError, EngineError) as error:
        raise MetricsError(f"no server answers at {_shown(root)}: {type(error).__name__}: {error}") from None
    named = [one.get("id") for one in models.get("data") or () if isinstance(one, dict)]
    of_ours = isinstance(health.get("model"), dict) and "random_weights" in health["model"]
    return Server(model or next(iter(named), None) or "tts-1", health if of_ours else {})


async def _got(url: str, key: str | None) -> dict[str, Any]:
    """The JSON object at an address; an empty one where there is something else, or nothing."""
    async with asyncio.timeout(_ASK_S):
        _, *body = [event async for event in exchange("GET", url, key)]
    try:
        found = json.loads(b"".join(body))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def figures(points: list[dict[str, Any]], gpu: bool) -> dict[str, dict[str, Any]]:
    """Of the largest load that was carried: everybody in time for the whole run, and the first byte within
    FIRST_BYTE_MS (on a CPU, the first audible sound within book.AUDIBLE_MS). Nothing where none was.

    listeners: that played at once, the mean of the held time, never more than were offered: speech that ends earlier
    than it was planned to leaves fewer.
    """
    passed = [point for point in points if point["held"] and clean(point) and is_prompt(point, gpu)]
    if not passed:
        return {}
    best = max(passed, key=playing)
    beside = ("revision", "device", "driver", "torch", "date", "command", "processes", "open_mean", "playing_mean")
    facts = {name: best.get(name) for name in (*beside, "duration_s", "held")}
    count = best["arrivals"]
    return {
        "listeners": book.figure(playing(best), "listeners", count, **facts, offered=best["listeners"]),
        "ttfb_p99_ms": book.figure(best["ttfb_p99_ms"], "ms", count, **facts),
        "underruns": book.figure(best["underruns"], "count", count, **facts),
        "refused": book.figure(best["refused"], "count", count, **facts),
    }


def playing(point: dict[str, Any]) -> float:
    """Listeners who played at once, never more than were offered."""
    return min(point["listeners"], point["playing_mean"])


def is_prompt(point: dict[str, Any], gpu: bool) -> bool:
    """Whether its listeners waited no longer than a load that counts as carried may let them."""
    wait_ms, most_ms = (point["ttfb_p99_ms"], FIRST_BYTE_MS) if gpu else (point["audible_p95_ms"], book.AUDIBLE_MS)
    return wait_ms is not None and wait_ms <= most_ms


def _point(
    remote: RemoteServer, server: Server, settings: LoadSettings, listeners: int, processes: int
) -> dict[str, Any]:
    begin_s, end_s = settings.warm_s, settings.warm_s + settings.seconds
    plan = visits(settings, listeners)
    seen = attend_in_processes(remote, said_to(server), plan, (begin_s, end_s, end_s + settings.tail_s), processes)
    return measured(seen, settings) | conditions(server, settings, listeners, processes)


def said_to(server: Server) -> Said:
    """What listeners of it ask for."""
    return Said("text", 0, _words, {}) if server.random_weights else Said("natural", 0, spoken, {})


def conditions(server: Server, settings: LoadSettings, listeners: int, processes: int) -> dict[str, Any]:
    """What a point says about its conditions. listeners: offered. processes: that play them."""
    model = server.health.get("model", {})
    return {
        "listeners": listeners,
        "codec": "the server's",
        "deterministic": False,
        "context_rows": 0,
        "context": said_to(server).kind,
        "checkpoint": settings.checkpoint,
        "model_size": model.get("size", ""),
        "random_weights": server.random_weights,
        "backend": server.health.get("backend", "unknown"),
        "dtype": server.health.get("dtype", "unknown"),
        "processes": processes,
        "host_us_per_frame": None,  # it is the server's that would tell something
    }


def _words(index: int, frames: int) -> str:
    """Random weights have no end of their own: `max_frames` is the length, whatever is said."""
    return f"{WORDS}."


def body_of(server: Server, voice: str | None = None) -> dict[str, Any]:
    """The keys of every request to it; None: by the first of its voices."""
    voice = voice or (server.health.get("speakers") or ["alloy"])[0]
    return {"model": server.model, "voice": voice, "response_format": "pcm"}


def _command(words: list[str]) -> str:
    """That is in the file: without the path of this machine that the file has."""
    if "--into" in words:
        place = words.index("--into")
        words = [*words[:place], *words[place + 2 :]]
    return shlex.join(["python", "-m", "mktts", *words])


def _more(words: str) -> dict[str, Any]:
    try:
        more = json.loads(words)
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise MetricsError(f"--keys takes a JSON object, got {words!r}")
    return more


def _shown(url: str) -> str:
    """Without a name or a password that stands in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
