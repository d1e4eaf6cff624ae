"""Measures how many listeners an engine's own lanes serve in time, and keeps it by machine, model and settings."""

import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import date
from typing import Any

import numpy as np
import torch

from mktts.common import cache_folder, read_object, write_json
from mktts.engine.admission import Capacity, measured_streams
from mktts.engine.lanes import Lanes
from mktts.engine.runner import Runner
from mktts.engine.scheduler import FRAME_S, Piece, Tick, TickFit, TickModel
from mktts.engine.stream import Segment
from mktts.errors import BusyError, CheckpointError
from mktts.model.sampling import Sampling

FRAMES = 16  # of a measurement, for each number of lanes
_PARTS = (1.0, 0.75, 0.5, 0.25)  # of a tick's largest number of lanes, where it may have any number
_HOST_S = 0.3e-3  # the host's time between two ticks
_FEW, _QUICKER = 4, 0.8  # lanes that check a kept capacity; below this part of its tick time it is measured again
_KEPT = "capacity.json"


def kept(key: str, runner: Runner) -> Capacity | None:
    """The kept capacity of this key and kind of runner, or None; its tick model becomes `runner.reference_model`."""
    found = _read().get(f"{key}; {runner.name}")
    try:
        streams, *model_s = map(float, (found["streams"], *found["tick_model_s"]))
        if not (0 < streams < math.inf and min(model_s) >= 0):
            return None
        runner.reference_model = TickModel(*model_s)
        return Capacity(streams, str(found["basis"]))
    except (KeyError, TypeError, ValueError):  # not there, or damaged
        return None


def keep(key: str, runner: Runner, capacity: Capacity) -> None:
    """Writes the capacity and the runner's `reference_model` into the cache, beside those of other keys."""
    found = {**capacity._asdict(), "tick_model_s": astuple(runner.reference_model)}
    try:
        write_json(cache_folder() / _KEPT, {**_read(), f"{key}; {runner.name}": found})
    except OSError as error:  # a full or read-only cache costs seconds at the next start, not this one
        print(f"mktts: the measured capacity could not be kept: {error}", file=sys.stderr)


def measure(runner: Runner, prompt: Any, before: Capacity | None) -> Capacity:
    """Measures warm lanes of many streams in the worker's thread: ticks of several sizes, one after the other. before:
    the capacity that was kept; it stays, unless ticks of few lanes are much quicker than it predicts: the machine was
    busy when it was measured. Raises BusyError where no slot is free."""
    settings, fit = runner.lanes.settings, TickFit(runner.lanes.model)
    free = len(runner.free_slots)
    if not free:
        raise BusyError("expected a free slot to measure the capacity with, but every slot has a stream: try later")
    if before is not None:
        slots, rows = runner.free_slots[-_FEW:], len(prompt.embeds) + FRAMES // 2
        bucket = settings.bucket(runner.lanes.model, len(slots), 0)
        expected_s = runner.reference_model.predict(*bucket, len(slots) * rows)
        if tick_times(runner.lanes, slots, prompt, fit) >= _QUICKER * expected_s:
            return before
    sizes = settings.sizes if settings.buckets else [math.ceil(part * settings.max_lanes) for part in _PARTS]
    found: list[tuple[float, int, float]] = []
    for count in sorted({min(size, free) for size in sizes}):
        tick_s = tick_times(runner.lanes, runner.free_slots[-count:], prompt, fit)
        found.append(((tick_s + _HOST_S) / count, count, tick_s))
        if tick_s > settings.margin * FRAME_S:
            break
    in_time = [one for one in found if one[2] <= settings.margin * FRAME_S]
    frame_s, count, tick_s = min(in_time or found)
    runner.reference_model = fit.model
    basis = f"measured {date.today().isoformat()}: {count} lanes in {1e3 * tick_s:.3g} ms"
    return Capacity(round(measured_streams(frame_s, fit.model.row_s, settings.margin), 2), basis)


def measure_single(runner: Runner, speak: Callable[[], int]) -> Capacity:
    """Measures warm lanes of width 1. speak: makes one stream of FRAMES frames at most; returns how many it has."""
    begun_s = time.perf_counter()
    frames = speak()
    frame_s = (time.perf_counter() - begun_s) / frames
    runner.reference_model = runner.steps.model
    basis = f"measured {date.today().isoformat()}: a frame in {1e3 * frame_s:.3g} ms"
    return Capacity(round(measured_streams(frame_s, 0.0, runner.lanes.settings.margin), 2), basis)


def tick_times(lanes: Lanes, slots: Sequence[int], prompt: Any, fit: TickFit) -> float:
    """Median seconds of a tick with a lane for each of these free slots. fit: observes all ticks, prompts' too."""
    rows, settings = len(prompt.embeds), lanes.settings
    for seed, slot in enumerate(slots):
        lanes.pages.open(slot, rows + FRAMES + 1)
        lanes.begin(slot, Segment(prompt, Sampling(), seed, FRAMES + 1))
    at_once = max(1, settings.max_rows // rows)
    groups = [slots[i : i + at_once] for i in range(0, len(slots), at_once)]
    ticks = [(_tick(lanes, group, rows, 0), [None] * len(group)) for group in groups]
    ticks += [(_tick(lanes, slots, 0, rows + i), [prompt.row(i)] * len(slots)) for i in range(FRAMES)]
    waiting: deque[tuple[Tick, Any]] = deque()
    times_s: list[float] = []
    ended_s = time.perf_counter()
    try:
        for tick, inputs in [*ticks, *[(None, ())] * 2]:
            if tick is not None:
                waiting.append((tick, lanes.launch(tick, inputs)))
            if waiting and (tick is None or not lanes.overlaps or len(waiting) == 2):
                run, launched = waiting.popleft()
                lanes.collect(launched)
                took_s, ended_s = time.perf_counter() - ended_s, time.perf_counter()
                fit.observe(*run.bucket, run.context_rows, took_s)
                times_s += [] if run.new_lanes else [took_s]
    finally:
        for slot in slots:
            lanes.leave(slot)
            lanes.pages.close(slot)
    return float(np.median(times_s))


def _tick(lanes: Lanes, slots: Sequence[int], rows: int, context_rows: int) -> Tick:
    """A tick in which prompts of `rows` rows enter, or, with 0, streams with `context_rows` rows each go on."""
    pieces = tuple(Piece(slot, 0, rows, True) for slot in slots) if rows else ()
    bucket, attended = lanes.settings.bucket(lanes.model, len(slots), rows * len(slots)), rows or context_rows
    return Tick(bucket, np.array(slots, np.int32), len(pieces), pieces=pieces, context_rows=len(slots) * attended)


def machine_key(device: torch.device, threads: int | None) -> str:
    """What a measurement is valid for: the GPU, or the CPU's cores and threads for us; and PyTorch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.node()} {platform.machine()}, {cores} cores, {threads or 0} threads, torch {torch.__version__}"


def _read() -> dict:
    """All kept measurements; none where the file is missing or damaged: they are then made again."""
    try:
        path = cache_folder() / _KEPT
        return read_object(path) if path.is_file() else {}
    except (CheckpointError, RecursionError):
        return {}
