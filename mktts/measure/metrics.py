"""Figures of many streams and frames, and the file they are recorded in. Those of one stream: `mktts.speech.metrics`.

* **Frame** (`frame_ms`, of a peer `upstream_frame_ms` ...): host wall time from one frame's codes on the host to the
  next one's, codec left out, at about 200 positions of context. **Talker step**, **predictor**: what the backend says
  of that frame (`Frame.talker_ms`, `predictor_ms`); for the megakernel, several frames a launch and the first of them
  left out, so that they are the kernel's own clock: head and draw of code 0 are the talker's, the sum the predictor's.
* **Codec** (`codec_N_ms`): N frames, codes on the host to PCM on the host, by the decoder that the synthesizer uses.
* **Peak GPU memory** (`peak_gpu_mb`): MiB the driver counts as used, context and kernels included, with four streams
  of 2 000 frames open. The card must be otherwise idle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mktts.common import write_json
from mktts.errors import MetricsError


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile (linear interpolation), smallest, largest and count of `values`.

    Raises MetricsError where there is none, or one is not finite.
    """
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise MetricsError(f"expected at least one finite number, found {array.tolist()}")
    median, p95, p99 = np.percentile(array, (50, 95, 99))
    return {
        "median": float(median),
        "p95": float(p95),
        "p99": float(p99),
        "min": float(array.min()),
        "max": float(array.max()),
        "n": int(array.size),
    }


def record(run_dir: str | Path, **metrics: Any) -> dict[str, Any]:
    """Merges `metrics` into `run_dir/metrics.json` (keys sorted, replaced atomically) and returns all of it.

    Values are finite numbers, booleans or strings; anything else raises MetricsError with the metric's name.
    """
    checked = {name: _scalar(name, value) for name, value in metrics.items()}
    path = Path(run_dir) / "metrics.json"
    merged = {**(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}), **checked}
    write_json(path, merged)
    return merged


def _scalar(name: str, value: Any) -> bool | int | float | str:
    if isinstance(value, np.generic) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0):
        value = value.item()
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise MetricsError(
        f"metric {name!r} must be a finite number, a boolean or a string, found {value!r}: record one value per name"
    )
