"""Ticks by themselves: every lane filled, all at the same context, through the lanes that the engine uses.

* `frame_N_ms`: a tick of N lanes at ROWS rows without the codec, the device's time of it
* `codec_fast_us`, `codec_full_us`: what the codec adds to a tick, a stream-frame
* `deterministic_cost_percent_N`: what one order of sums adds to the frame
* `host_us_per_lane_frame`: the host's time to launch and to collect a tick that is done, a lane
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from mktts.batch.lanes import Lanes
from mktts.batch.tick import Piece, Tick
from mktts.checkpoint import Checkpoint
from mktts.errors import BackendUnavailable
from mktts.measure.bench.load.book import figure
from mktts.measure.bench.load.settings import LoadSettings
from mktts.model.backend import default_dtype, device_named
from mktts.model.sampling import Sampling

ROWS = 500  # of every lane's context
SIZES = (64, 256, 1_024)
SAMPLES = 20
_UNTIMED = 3
_SETTLE_S = 0.05  # after a launch, so that what `collect` then takes is the host's alone

# (checkpoint, codec precision or None for no codec, deterministic, slots, rows a slot) -> lanes that are ready to run.
Maker = Callable[[Checkpoint, str | None, bool, int, int], Lanes]


def cuda_lanes(checkpoint: Checkpoint, codec: str | None, deterministic: bool, slots: int, rows: int) -> Lanes:
    """The engine's lanes without the engine: a `Maker`. Raises BackendUnavailable where there are none."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("frames by themselves are timed on a CUDA device, and torch sees none")
    from mktts.batch.cuda.loading import bare_lanes

    return bare_lanes(checkpoint, codec, deterministic, slots, rows)


def measure(
    settings: LoadSettings, checkpoint: Checkpoint, make: Maker = cuda_lanes, sizes: tuple[int, ...] = SIZES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, figure), each as soon as it is known.

    sizes: lanes. The codec is timed at the largest; the host and the cost of determinism at half of it, the latter at
    the smallest too. settings.deterministic: which frame is reported; None takes one order of sums, the engine's own.
    """
    most, half, least = max(sizes), max(sizes) // 2, min(sizes)
    counts = sorted({*sizes, half})
    device = device_named(settings.device)
    dtype = getattr(torch, settings.dtype) if settings.dtype else default_dtype(device)

    def timed(codec: str | None, ordered: bool, counts: list[int]) -> dict[int, tuple[list[float], list[float]]]:
        lanes = make(checkpoint, codec, ordered, most, ROWS + len(counts) * (SAMPLES + _UNTIMED) + 1)
        enter(lanes, most, torch.zeros(ROWS, checkpoint.config.talker.hidden_size, device=device, dtype=dtype))
        row = torch.zeros(checkpoint.config.talker.hidden_size, device=device, dtype=dtype)
        return {count: tick_s(lanes, count, row) for count in reversed(counts)}  # each tick adds a row to its lanes

    plain = timed(None, False, counts)
    ordered = timed(None, True, counts)
    reported = plain if settings.deterministic is False else ordered
    for count in sizes:
        times_ms = [1e3 * s for s in reported[count][0]]
        yield f"frame_{count}_ms", figure(times_ms, "ms", rows=ROWS, deterministic=reported is ordered)
    for count in (least, half):
        cost = 100 * (float(np.median(ordered[count][0]) / np.median(plain[count][0])) - 1)
        yield f"deterministic_cost_percent_{count}", figure(cost, "%", SAMPLES, rows=ROWS)
    host_us = [1e6 * s / half for s in reported[half][1]]
    yield "host_us_per_lane_frame", figure(host_us, "us", lanes=half, deterministic=reported is ordered)
    frame_s = float(np.median(plain[most][0]))
    for precision in ("fast", "full"):
        ticks_s, _ = timed(precision, False, [most])[most]
        added_us = [1e6 * (s - frame_s) / most for s in ticks_s]
        yield f"codec_{precision}_us", figure(added_us, "us", lanes=most, rows=ROWS)


def tick_s(lanes: Lanes, count: int, row: torch.Tensor) -> tuple[list[float], list[float]]:
    """SAMPLES ticks of slots 0 to count - 1: seconds of each on the device, and on the host. row (H,): of text."""
    device_s, host_s = [], []
    slots = np.arange(count, dtype=np.int32)
    bucket = lanes.settings.bucket(lanes.model, count, 0)
    for index in range(_UNTIMED + SAMPLES):
        begun_s = time.perf_counter()
        launched = lanes.launch(Tick(bucket, slots, context_rows=count * ROWS), [row] * count)
        spent_s = time.perf_counter() - begun_s
        time.sleep(_SETTLE_S)
        begun_s = time.perf_counter()
        made = lanes.collect(launched)
        spent_s += time.perf_counter() - begun_s
        if index >= _UNTIMED:
            device_s.append(made.took_s)
            host_s.append(spent_s)
    return device_s, host_s


def enter(lanes: Lanes, count: int, prompt: torch.Tensor) -> None:
    """Opens slots 0 to count - 1, all of their rows reserved, and runs the ticks that `prompt` (L, H) takes in each."""
    rows, sampling = len(prompt), Sampling()
    for slot in range(count):
        lanes.pages.open(slot, lanes.pages.rows_per_slot)
        lanes.enter(slot, None)
        lanes.begin(slot, prompt, sampling, slot)
    waiting = [(slot, 0) for slot in range(count)]  # and how many of its rows are in
    while waiting:
        pieces, left = [], lanes.settings.max_rows
        while waiting and left and len(pieces) < lanes.settings.max_lanes:
            slot, start = waiting.pop(0)
            taken = min(left, rows - start)
            pieces.append(Piece(slot, start, taken, start + taken == rows))
            left -= taken
            if start + taken < rows:
                waiting.insert(0, (slot, start + taken))
        new = [piece.slot for piece in pieces if piece.last]
        bucket = lanes.settings.bucket(lanes.model, len(new), sum(piece.rows for piece in pieces))
        tick = Tick(bucket, np.array(new, np.int32), len(new), pieces=tuple(pieces))
        lanes.collect(lanes.launch(tick, [None] * len(new)))
