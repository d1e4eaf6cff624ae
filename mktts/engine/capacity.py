"""How many listeners an engine serves in time: measured by its own lanes, and kept by machine, model and settings."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

from mktts.common import cache_folder, read_object, write_json
from mktts.engine.admission import Capacity, measured_streams
from mktts.engine.runner import Runner
from mktts.engine.tick import TickModel
from mktts.errors import CheckpointError

FRAMES = 32  # of each stream of a measurement
_BURSTS = 1.25  # streams, times the lanes of a tick: so that most ticks are full
_FULL = 0.9  # of the most lanes a tick had: those that are measured


def kept(key: str, runner: Runner) -> Capacity | None:
    """What was measured under this key, for the runner to compare its ticks with; None where nothing was."""
    found = _read().get(key)
    if found is None:
        return None
    runner.reference_model = TickModel(*found["tick_model_s"])
    return Capacity(found["streams"], found["basis"])


def keep(key: str, runner: Runner, capacity: Capacity) -> None:
    """Writes it beside what is there."""
    model = runner.reference_model
    parts = [model.constant_s, model.lane_s, model.row_s, model.attention_s]
    found = {**_read(), key: {**capacity._asdict(), "tick_model_s": parts}}
    write_json(_path(), found)


def measure(runner: Runner, speak: Callable[[int], None]) -> Capacity:
    """Measures a warm runner: as many streams as a tick has lanes, as fast as they are made, for some seconds.

    speak: makes so many unpaced streams of FRAMES frames. What counts is the time from one full tick to the next.
    """
    begun_s = time.perf_counter()
    lanes = runner.lanes.settings.max_lanes
    count = 1 if lanes == 1 else min(runner.lanes.slots, round(_BURSTS * lanes))
    speak(count)
    ticks = runner.log.table()
    ticks = ticks[ticks["ended_s"] >= begun_s]
    full = ticks["lanes"] >= _FULL * ticks["lanes"].max()
    gaps_s = np.diff(ticks["ended_s"])[full[1:] & (ticks["new"][1:] == 0)]
    tick_s = float(np.median(gaps_s)) if len(gaps_s) else float(np.median(ticks["took_s"][full]))
    lanes = int(np.median(ticks["lanes"][full]))
    runner.reference_model = runner.model
    streams = measured_streams(lanes, tick_s, runner.model.row_s)
    basis = f"measured {date.today().isoformat()}: {lanes} lanes in {1e3 * tick_s:.3g} ms"
    return Capacity(round(streams, 2), basis)


def machine_key(device: torch.device, threads: int | None) -> str:
    """What a measurement holds for: the processor or the GPU, its cores for us, and PyTorch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.node()} {platform.machine()}, {cores} cores, {threads or 0} threads, torch {torch.__version__}"


def _path() -> Path:
    return cache_folder() / "capacity.json"


def _read() -> dict:
    """What was kept; nothing where the file is missing, or damaged: it is then measured again."""
    path = _path()
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except CheckpointError:
        return {}
