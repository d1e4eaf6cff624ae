"""What the numbers mean, computed in one place.

* **TTFC** (time to first chunk): from the `stream()` call to the first PCM in host memory, on a warm model.
  Loading and warming up are not in it.
* **Audible TTFC**: from the `stream()` call to the moment a listener, whose player starts with the first chunk and
  plays at real time, gets the first sample above `spec.AUDIBLE_DBFS`. Upstream's speakers begin with a silent
  frame or two, so this is the figure a person can feel.
* **RTF** (real-time factor): seconds from the `stream()` call to the last PCM in host memory, divided by seconds of
  audio. Below 1 is faster than speech. It counts everything between the two moments, Python included, so it means
  something only for a stream that has the machine to itself and a reader that does not hold it back.
* **Stage times**: the backend's and codec's own clocks per frame. Their sum is at most the time above.
* **Frame** (`frame_ms`, of a peer `upstream_frame_ms` ...): host wall time from one frame's codes on the host to the
  next one's, codec left out, at about 200 positions of context. **Talker step**, **predictor**: what the backend says
  of that frame (`Frame.talker_ms`, `predictor_ms`); for the megakernel, several frames a launch and the first of them
  left out, so that they are the kernel's own clock: head and draw of code 0 are the talker's, the sum the predictor's.
* **Codec** (`codec_N_ms`): N frames, codes on the host to PCM on the host, by the decoder that the synthesizer uses.
* **Peak GPU memory** (`peak_gpu_mb`): MiB the driver counts as used, context and kernels included, with four streams
  of 2 000 frames open. The card must be otherwise idle.
* **Underrun**: the same player runs dry: a chunk is not yet there when the previous one has been played.
  **Prebuffer**: how much later that player would have to start to never run dry.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.audio import first_audible_sample
from mktts.common import write_json
from mktts.errors import MetricsError
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.speech.options import Chunk


@dataclass(frozen=True)
class Playback:
    """A player that starts with the first chunk and plays at real time; times in ms from the `stream()` call."""

    starts_ms: tuple[float, ...]  # when each chunk begins to sound
    underruns: int
    stalled_ms: float
    prebuffer_ms: float


@dataclass(frozen=True)
class StreamMetrics:
    """One utterance, in the terms of the module docstring. `audible_ttfc_ms` is None where all of it is silent."""

    ttfc_ms: float
    audible_ttfc_ms: float | None
    rtf: float
    audio_s: float
    compute_ms: float
    frames: int
    prefill_ms: float
    talker_ms_per_frame: float
    predictor_ms_per_frame: float
    codec_ms_per_frame: float
    underruns: int
    stalled_ms: float
    prebuffer_ms: float


def play(ready_ms: Sequence[float], samples: Sequence[int]) -> Playback:
    """Plays chunks of `samples[i]` samples that were ready at `ready_ms[i]`."""
    starts_ms: list[float] = []
    free_ms, audio_ms, stalled_ms, prebuffer_ms, underruns = ready_ms[0], 0.0, 0.0, 0.0, 0
    for ready, count in zip(ready_ms, samples, strict=True):
        late_ms = ready - free_ms
        if late_ms > 0:
            underruns += 1
            stalled_ms += late_ms
        starts_ms.append(max(ready, free_ms))
        prebuffer_ms = max(prebuffer_ms, ready - ready_ms[0] - audio_ms)
        length_ms = 1_000 * count / SAMPLE_RATE_HZ
        audio_ms += length_ms
        free_ms = starts_ms[-1] + length_ms
    return Playback(tuple(starts_ms), underruns, stalled_ms, prebuffer_ms)


def summarise(chunks: Iterable[Chunk]) -> StreamMetrics:
    """Metrics of one utterance from its chunks in order. Raises MetricsError where they hold no audio."""
    chunks = [chunk for chunk in chunks if len(chunk.pcm)]
    if not chunks:
        raise MetricsError(
            "expected at least one chunk with audio, found none: the stream was cancelled or stayed empty"
        )
    timings = [chunk.timings for chunk in chunks]
    playback = play([t.ready_ms for t in timings], [len(chunk.pcm) for chunk in chunks])
    audible_ms = None
    for start_ms, chunk in zip(playback.starts_ms, chunks, strict=True):
        sample = first_audible_sample(chunk.pcm)
        if sample is not None:
            audible_ms = start_ms + 1_000 * sample / SAMPLE_RATE_HZ
            break
    audio_s = sum(len(chunk.pcm) for chunk in chunks) / SAMPLE_RATE_HZ
    frames = sum(chunk.frames for chunk in chunks)
    return StreamMetrics(
        ttfc_ms=timings[0].ready_ms,
        audible_ttfc_ms=audible_ms,
        rtf=timings[-1].ready_ms / 1_000 / audio_s,
        audio_s=audio_s,
        compute_ms=timings[-1].ready_ms,
        frames=frames,
        prefill_ms=sum(t.prefill_ms for t in timings),
        talker_ms_per_frame=sum(t.talker_ms for t in timings) / frames,
        predictor_ms_per_frame=sum(t.predictor_ms for t in timings) / frames,
        codec_ms_per_frame=sum(t.codec_ms for t in timings) / frames,
        underruns=playback.underruns,
        stalled_ms=playback.stalled_ms,
        prebuffer_ms=playback.prebuffer_ms,
    )


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Median, 95th percentile (linear interpolation), smallest, largest and count of finite `values`."""
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise MetricsError(f"expected at least one finite number, found {array.tolist()}")
    median, p95 = np.percentile(array, (50, 95))
    return {
        "median": float(median),
        "p95": float(p95),
        "min": float(array.min()),
        "max": float(array.max()),
        "n": int(array.size),
    }


def peak_rss_bytes() -> int:
    """The most resident memory this process has had, memory-mapped checkpoint pages included.

    Linux: VmHWM, because `getrusage` there also counts the parent a fresh process was forked from.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1_024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1_024


def environment() -> dict[str, str | int | float | None]:
    """The machine and the software that a figure belongs to; flat, so that it fits a table row. None = not there."""
    import torch

    gpu = _gpu()
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        **gpu,
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


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """Commit of the working tree this module is in, with "+changes" where files differ from it.

    A tree copied without its history (into a container, say) is named by $MKTTS_REVISION, which goes first.
    """
    if os.environ.get("MKTTS_REVISION"):
        return os.environ["MKTTS_REVISION"]
    folder = Path(__file__).resolve().parent
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if revision and _output("git", "-C", str(folder.parent), "status", "--porcelain", "--untracked-files=no"):
        return revision + "+changes"
    return revision


def _gpu() -> dict[str, str | float | None]:
    """Name, driver, memory, clocks and power of the first GPU, as nvidia-smi names them."""
    queries = {
        "gpu": "name",
        "gpu_driver": "driver_version",
        "gpu_memory_mib": "memory.total",
        "gpu_sm_clock_mhz": "clocks.sm",
        "gpu_max_sm_clock_mhz": "clocks.max.sm",
        "gpu_memory_clock_mhz": "clocks.mem",
        "gpu_power_limit_w": "power.limit",
    }
    line = _output("nvidia-smi", f"--query-gpu={','.join(queries.values())}", "--format=csv,noheader,nounits")
    if not line:
        return dict.fromkeys(queries)
    values = [value.strip() for value in line.splitlines()[0].split(",")]
    texts = dict(zip(queries, values, strict=False))
    return {name: value if name in ("gpu", "gpu_driver") else _number(value) for name, value in texts.items()}


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
