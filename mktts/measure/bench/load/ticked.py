"""What the batch engine did while a load was held, in figures of its ticks."""

from __future__ import annotations

from typing import Any

import numpy as np


def held_ticks(ticks: np.ndarray, begin_s: float, end_s: float) -> np.ndarray:
    """Those of `ticks` (n,), of dtype mktts.batch.log.TICKS, that ended in [begin_s, end_s) of time.perf_counter."""
    return ticks[(ticks["ended_s"] >= begin_s) & (ticks["ended_s"] < end_s)]


def ticked(ticks: np.ndarray, duration_s: float) -> dict[str, Any] | None:
    """Figures of the ticks (n,) of a held time; None where there was none, as on the engine "single".

    tick_p50_ms, tick_p95_ms: of one tick on the device. lanes_mean: frames a tick; filled_percent: of its bucket.
    busy_percent: the part of the time in which a tick ran. device_us_per_frame: the ticks' time over the frames of all
    streams; prompts that entered are in it. late_ticks: with a frame that came late; late_max_ms: by how much.
    """
    if not len(ticks):
        return None
    took_ms = 1e3 * ticks["took_s"]
    frames, room = int(ticks["lanes"].sum()), int(ticks["bucket_lanes"].sum())
    return {
        "ticks": len(ticks),
        "tick_p50_ms": float(np.percentile(took_ms, 50)),
        "tick_p95_ms": float(np.percentile(took_ms, 95)),
        "lanes_mean": frames / len(ticks),
        "filled_percent": 100 * frames / room if room else None,
        "busy_percent": float(took_ms.sum()) / (10 * duration_s),
        "device_us_per_frame": 1e3 * float(took_ms.sum()) / frames if frames else None,
        "late_ticks": int((ticks["late_s"] > 0).sum()),
        "late_max_ms": 1e3 * float(ticks["late_s"].max()),
    }
