"""The machine and the software that a figure belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np


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
