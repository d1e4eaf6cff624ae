"""Figures of many streams and frames, and the file they are recorded in. Those of one stream: `mktts.engine.metrics`.

Names in a document of `python -m mktts bench`; all in host wall time, on a warm model, one stream:

* **Codes of a frame** (`frame_ms`): from one frame's codes on the host to the next one's, codec left out, at about 200
  positions of context. **Talker step**, **predictor** (`talker_step_ms`, `predictor_ms`): the backend's own clock of
  the two halves (`Frame.talker_ms`, `predictor_ms`); for the megakernel, several frames a launch, the first of them
  left out, so that they are the kernel alone: head and draw of code 0 count as the talker's, the embedding sum as the
  predictor's.
* **Frame with codec** (`frame_with_codec_ms`): between two chunks of 8 frames that follow each other, from PCM on the
  host to PCM on the host, divided by the frames: what a frame takes once a stream runs, codec and Python included.
* **Codec** (`codec_N_ms`): N frames, codes on the host to PCM on the host, by the decoder that the synthesizer uses.
* **First PCM**: TTFC of mktts.engine.metrics, of a few words in the streaming layout (`ttfc_ms`), and of a sentence of
  15 words in the checkpoint's own layout (`ttfc_sentence_ms`). **RTF** (`rtf`): as there.
* **Text** (`text_tok_s`): tokens a second of the text model, one a launch.

`_1p7b` marks the large checkpoint. Others have the same names behind `upstream_` and `faster_`. Upstream does not
stream: its `upstream_first_pcm_ms` comes with its last, and its `upstream_frame_with_codec_ms` is a whole utterance
over its frames."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mktts.common import write_json
from mktts.errors import MetricsError


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile (linear interpolation), smallest, largest, mean and count of `values`. Raises
    MetricsError where there is none, or one is not finite."""
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise MetricsError(f"expected at least one finite number, found {array.tolist()}")
    found = [*np.percentile(array, (50, 95, 99, 0, 100)).tolist(), float(array.mean())]
    return {**dict(zip(("median", "p95", "p99", "min", "max", "mean"), found, strict=True)), "n": array.size}


def record(run_dir: str | Path, **metrics: Any) -> dict[str, Any]:
    """Merges `metrics` into `run_dir/metrics.json` (keys sorted, replaced atomically) and returns all of it. Values are
    finite numbers, booleans or strings; anything else raises MetricsError with the metric's name."""
    path = Path(run_dir) / "metrics.json"
    merged = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, value in metrics.items():
        if getattr(value, "ndim", None) == 0:  # a number of NumPy's or PyTorch's
            value = value.item()
        if not isinstance(value, (int, str)) and not (isinstance(value, float) and math.isfinite(value)):
            must = "must be a finite number, a boolean or a string"
            raise MetricsError(f"metric {name!r} {must}, found {value!r}: record one value per name")
        merged[name] = value
    write_json(path, merged)
    return merged


def object_of(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def cell(value: Any, digits: int = 4) -> str:
    """`value` in words and digits: so many significant `digits`, or a whole number with its thousands separated; yes/no
    for booleans."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item, digits) for item in value)
    if isinstance(value, float) and abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}"
    return "" if value is None else str(value)


def short(value: float) -> str:
    """Three digits, or a whole number with its thousands separated."""
    return cell(float(value), digits=3)
