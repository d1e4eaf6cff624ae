"""Figures of many streams and frames, and the file that records them. For one stream see `mktts.engine.metrics`.

Figures in a document of `python -m mktts bench`, all in host wall time, with a warm model and one stream:

* **Codes of a frame** (`frame_ms`): from the codes of one frame on the host to those of the next, without the codec, at
  about 200 positions of context. **Talker step**, **predictor** (`talker_step_ms`, `predictor_ms`): the backend's own
  timing of the two halves (`Frame.talker_ms`, `predictor_ms`); for the megakernel without the first of several frames
  per launch, so that they time the kernel only. Head and draw of code 0 count as talker, the embedding sum as
  predictor.
* **Frame with codec** (`frame_with_codec_ms`): the time between two consecutive chunks of 8 frames, PCM on the host to
  PCM on the host, divided by the frames: the time per frame of a running stream, including codec and Python.
* **Codec** (`codec_N_ms`): N frames, codes on the host to PCM on the host, by the decoder that the synthesizer uses.
* **First PCM**: TTFC as in mktts.engine.metrics, for a few words in the streaming layout (`ttfc_ms`) and for a sentence
  of 15 words in the checkpoint's layout (`ttfc_sentence_ms`). **RTF** (`rtf`): as in mktts.engine.metrics.
* **Text** (`text_tok_s`): tokens per second of the text model, with one token per launch.

`_1p7b` marks the large checkpoint; `upstream_` and `faster_` mark other implementations. Upstream does not stream:
`upstream_first_pcm_ms` is the time of a whole utterance, `upstream_frame_with_codec_ms` that time over its frames."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mktts.common import write_json
from mktts.errors import MetricsError


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile (linear interpolation), minimum, maximum, mean and count of `values`. Raises
    MetricsError if there are none, or one is not finite."""
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise MetricsError(f"expected at least one finite number, found {array.tolist()}")
    found = [*np.percentile(array, (50, 95, 99, 0, 100)).tolist(), float(array.mean())]
    return {**dict(zip(("median", "p95", "p99", "min", "max", "mean"), found, strict=True)), "n": array.size}


def record(run_dir: str | Path, **metrics: Any) -> dict[str, Any]:
    """Merges `metrics` into `run_dir/metrics.json` (keys sorted, replaced atomically) and returns the merged metrics.
    Values are finite numbers, booleans or strings; any other value raises MetricsError with the metric's name."""
    path = Path(run_dir) / "metrics.json"
    merged = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, value in metrics.items():
        if getattr(value, "ndim", None) == 0:  # a NumPy or PyTorch scalar
            value = value.item()
        if not isinstance(value, (int, str)) and not (isinstance(value, float) and math.isfinite(value)):
            must = "must be a finite number, a boolean or a string"
            raise MetricsError(f"metric {name!r} {must}, found {value!r}: record one value per name")
        merged[name] = value
    write_json(path, merged)
    return merged


def object_of(text: str | bytes) -> dict[str, Any] | None:
    """Parses a JSON object; None if the text is anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def cell(value: Any, digits: int = 4) -> str:
    """Formats `value` for a table: with `digits` significant digits, large numbers as integers with a thousands
    separator, booleans as yes or no."""
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
    """Formats a number with three significant digits, or as an integer with a thousands separator."""
    return cell(float(value), digits=3)
