"""Both engines at once, as engine="auto" has it: what each costs the listeners of the other, and the memory of both.

* `memory_single_mib`, `memory_batch_mib`, `memory_both_mib`: what a loaded and warmed-up synthesizer takes, with room
  for STREAMS streams and KEYS_VALUES_BYTES of keys and values in the batch engine
* `mixed_single_ttfc_p99_ms`: of the streams that begin on the single engine while FEW listeners come and go, some of
  whom are then on the batch engine
* `mixed_batch_ttfc_p99_ms`: of those that begin on the batch engine while the single one makes two long streams
* `mixed_underruns`: of all of them
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from typing import Any

import torch

from mktts.batch.simulate import Traffic
from mktts.checkpoint import Checkpoint
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.load.attendance import Attendance
from mktts.measure.bench.load.book import figure
from mktts.measure.bench.load.crowd import attend
from mktts.measure.bench.load.point import measured, named
from mktts.measure.bench.load.settings import Loaded, LoadSettings, load
from mktts.measure.bench.load.soak import resident_mib
from mktts.measure.bench.load.texts import Said
from mktts.measure.bench.load.visits import Visit
from mktts.spec import FRAME_RATE_HZ
from mktts.synth.loading import SINGLE_STREAMS

FIGURES = (
    "memory_single_mib", "memory_batch_mib", "memory_both_mib",
    "mixed_single_ttfc_p99_ms", "mixed_batch_ttfc_p99_ms", "mixed_underruns",
)  # fmt: skip
FEW, MANY, MANY_ON_A_CPU = 3, 64, 4  # listeners
STREAMS, KEYS_VALUES_BYTES = 128, 2 << 30
_FEW_FRAMES = (12, 37)  # 1 to 3 s, so that there are enough of them
_BUILD_UP = 1 / 8  # of the held time, for many listeners to be there
_MADE_WITHIN_S = 300.0
_MIB = 2**20


def run(
    settings: LoadSettings, checkpoint: Checkpoint, said: Said, listeners: int | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Figures by name, and the report of the run. listeners: beside the two long streams; None: MANY.

    Raises MetricsError where a backend is named or one engine is asked for, BackendUnavailable where there are not two.
    """
    if settings.backend != "auto" or settings.engine not in (None, "auto") or settings.deterministic:
        raise MetricsError(
            "the mixed load needs both engines: leave out the backend, --engine and --deterministic, got "
            f"{settings.backend!r}, {settings.engine!r} and {settings.deterministic}"
        )
    settings = replace(settings, engine="auto", max_streams=settings.max_streams or STREAMS)
    figures = {}
    for engine in ("single", "batch"):
        loaded, taken_mib = _loaded(settings, checkpoint, said, engine)
        loaded.synthesizer.close()
        figures[f"memory_{engine}_mib"] = _memory(taken_mib, settings)
    del loaded
    both, taken_mib = _loaded(settings, checkpoint, said, "auto")
    try:
        figures["memory_both_mib"] = _memory(taken_mib, settings)
        cuda = both.synthesizer.device.type == "cuda"
        many = listeners or (MANY if cuda else MANY_ON_A_CPU)
        end_s = settings.warm_s + settings.seconds
        arrivals = plan(settings, many)
        seen = attend(both.synthesizer, said, arrivals, settings.warm_s, end_s, end_s + settings.tail_s)
        load_figures, report = told(seen, settings, many)
        report |= named(settings, both, said, many)
    finally:
        both.synthesizer.close()
    return figures | load_figures, report


def plan(settings: LoadSettings, many: int) -> list[Visit]:
    """In the first half of the time FEW short streams are open on the mean; then two that last to the end, beside
    `many` listeners of the usual length."""
    half_s, end_s = _half_s(settings), settings.warm_s + settings.seconds + settings.tail_s
    longest_s = min(_FEW_FRAMES[1] / FRAME_RATE_HZ, settings.seconds * _BUILD_UP)
    few = Traffic(FEW, _FEW_FRAMES, seed=settings.seed).arrivals(settings.warm_s, half_s - settings.warm_s - longest_s)
    long = [(half_s, math.ceil((end_s - half_s) * FRAME_RATE_HZ))] * SINGLE_STREAMS
    build_up_s = settings.seconds * _BUILD_UP
    after = Traffic(many, settings.frames, seed=settings.seed + 1).arrivals(build_up_s, end_s - half_s - build_up_s)
    arrivals = [*few, *long, *((half_s + at_s, frames) for at_s, frames in after)]
    return [Visit(index, float(at_s), frames) for index, (at_s, frames) in enumerate(arrivals)]


def told(seen: Attendance, settings: LoadSettings, many: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The figures of a run of `plan`, and its point with what each engine's listeners met. A figure is left out where
    an engine had no arrival, or one that got no PCM."""
    if seen.begin is None:
        raise MetricsError("the run ended before its warm-up did: nothing was measured")
    report = measured(seen, settings)
    half_s = seen.begin.at_s - settings.warm_s + _half_s(settings)
    parts = {
        "single": _part(seen, settings, "single", 0.0, half_s),
        "batch": _part(seen, settings, "batch", half_s + settings.seconds * _BUILD_UP, math.inf),
    }
    facts = {"held": report["held"], "duration_s": report["duration_s"], "beside": many}
    figures = {"mixed_underruns": figure(report["underruns"], "count", report["arrivals"], **facts)}
    for engine, part in parts.items():
        if (p99_ms := part["ttfc_p99_ms"]) is not None:
            spread = {"p95": part["ttfc_p95_ms"], "p99": p99_ms}
            figures[f"mixed_{engine}_ttfc_p99_ms"] = figure(p99_ms, "ms", part["arrivals"], **spread, **facts)
    return figures, report | {"of_engine": {engine: _part(seen, settings, engine) for engine in parts}}


def _half_s(settings: LoadSettings) -> float:
    return settings.warm_s + settings.seconds / 2


def _part(
    seen: Attendance, settings: LoadSettings, engine: str, from_s: float = 0.0, until_s: float = math.inf
) -> dict[str, Any]:
    """The figures of the listeners on one engine, planned in that time."""
    there = [one for one in seen.listeners if one.engine == engine and from_s <= one.planned_s < until_s]
    point = measured(replace(seen, listeners=there), settings)
    names = ("arrivals", "open_mean", "ttfc_p50_ms", "ttfc_p95_ms", "ttfc_p99_ms", "underruns", "late_max_ms")
    return {name: point[name] for name in names}


def _loaded(settings: LoadSettings, checkpoint: Checkpoint, said: Said, engine: str) -> tuple[Loaded, float]:
    """A synthesizer with that engine, or both for "auto", that has spoken; and the MiB that it takes."""
    if engine == "single":
        settings = replace(settings, engine="single", codec=None, max_streams=None)
    else:
        settings = replace(settings, engine=engine)
    device = torch.device(settings.device)
    before_mib = _used_mib(device)
    loaded = load(settings, checkpoint, KEYS_VALUES_BYTES)
    try:
        _speak(loaded, said)
        lanes = loaded.synthesizer.lanes
        if engine == "auto" and lanes is None:
            raise BackendUnavailable("the mixed load needs both engines: there is no batch engine here, see the log")
        if lanes is not None:
            loaded = replace(loaded, codec=lanes.precision, deterministic=lanes.deterministic)
        return loaded, _used_mib(device) - before_mib
    except BaseException:
        loaded.synthesizer.close()
        raise


def _speak(loaded: Loaded, said: Said) -> None:
    """Several streams at once, so that the engine for many is made where it comes later."""
    synthesizer = loaded.synthesizer
    for _ in range(2):  # once more when it is there
        streams = []
        for index in range(SINGLE_STREAMS + 2):
            text, settings = said.of(index, _FEW_FRAMES[1])
            streams.append(synthesizer.stream(text, **settings))
        for stream in streams:
            stream.read()
        until_s = time.perf_counter() + _MADE_WITHIN_S
        while synthesizer.serves_many and synthesizer.lanes is None and time.perf_counter() < until_s:
            time.sleep(0.05)


def _memory(taken_mib: float, settings: LoadSettings) -> dict[str, Any]:
    return figure(taken_mib, "MiB", streams=settings.max_streams, keys_values_mib=KEYS_VALUES_BYTES // _MIB)


def _used_mib(device: torch.device) -> float:
    """Of the device, by all its processes; on a CPU the resident memory of this one."""
    gc.collect()
    if device.type != "cuda":
        return resident_mib()
    torch.zeros(1, device=device)  # the context counts for nobody
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / _MIB
