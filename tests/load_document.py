"""A made-up document of `python -m mktts bench --load --into`, as the notebook and the record of loads read it."""

import json
from pathlib import Path
from typing import Any

from mktts.measure.load.command import merge

BESIDE = dict(device="NVIDIA H200", driver="580", torch="2.11", date="2026-11-22T00:00:00+00:00", revision="abc")
BESIDE["command"] = "python -m mktts bench --load"


def point(listeners: int = 512, **changes: Any) -> dict[str, Any]:
    """One that was held for a minute, every listener in time."""
    return {
        **dict.fromkeys(("underruns", "refused", "unanswered", "errors"), 0),
        **dict.fromkeys(("open_mean", "playing_mean"), float(listeners)),
        **dict.fromkeys(("ttfb_p99_ms", "ttfc_p99_ms"), 20.0),
        **{"ttfc_p50_ms": 10.0, "ttfc_p95_ms": 15.0, "audible_p95_ms": 100.0},
        **{"held": True, "duration_s": 60.0, "arrivals": 4_000, "listeners": listeners},
        **{"codec": "fast", "deterministic": False, "engine": "batch", "context_rows": 32, "context": "text"},
        **{"checkpoint": "random:0.6b", "model_size": "0b6", "backend": "megakernel", "dtype": "bfloat16"},
        **changes,
    }


def load_file(folder: Path) -> Path:
    """Two loads of one kind and one of another, with a figure of an earlier version: `folder`/load.json."""
    busy = {"device_busy_percent": 50.0, "frames": 60 * 512 * 12, "lanes_mean": 64.0}
    points = [point(512, **busy), point(1_024, underruns=3, refused=2), point(512, codec="full", deterministic=True)]
    path = folder / "load.json"
    figure = {"value": 5.1, "unit": "ms", "n": 3, **BESIDE}
    path.write_text(json.dumps({"points": [], "figures": {"frame_64_ms": figure}}))
    merge(path, BESIDE, True, points)
    return path
