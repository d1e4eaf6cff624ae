"""Describes the machine and the software on which a figure was measured."""

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mktts.errors import BackendUnavailable
from mktts.kernel.build import nvrtc, target_of

BANDWIDTH_BYTES = 256 * 2**20  # well above any CPU's last-level cache and the 60 MB L2 of an H200


def peak_rss_bytes() -> int:
    """Peak resident memory of this process, including memory-mapped checkpoint pages. On Linux this is VmHWM, because
    `getrusage` there includes the parent from which a fresh process was forked."""
    if found := _proc("/proc/self/status", "VmHWM"):
        return int(found.split()[0]) * 1_024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


def _proc(path: str, name: str) -> str | None:
    """The first value with this name in a file under /proc; None if there is none."""
    with suppress(OSError):
        lines = Path(path).read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
    return None


def head(device: str) -> dict[str, Any]:
    """The first keys of every document of measurements: device, driver, torch, revision, date (UTC), environment.
    device: the measured device as torch names it. The key has the GPU's name for "cuda...", else the CPU's."""
    facts = environment()
    return {
        "device": facts["gpu"] if device.startswith("cuda") else facts["cpu"],
        "driver": facts["gpu_driver"],
        "torch": facts["torch"],
        "revision": facts["git_revision"],
        "date": facts["date_utc"],
        "environment": facts,
    }


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions by distribution name; None for a package that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def provided_by(module: str) -> str | None:
    """The installed package that provides `module`, with its version, such as "qwen-tts-hf 0.1.1.post1"; None if there
    is none. Two packages may provide a module: qwen-tts and its build for newer transformers both install qwen_tts."""
    owners = versions(metadata.packages_distributions().get(module, []))
    return ", ".join(f"{owner} {version}" for owner, version in owners.items()) or None


def environment() -> dict[str, str | int | float | None]:
    """Machine and software as a flat dict, fit for a table row; None for what is missing or unknown. Units are in the
    names. The GPU is the first that nvidia-smi lists. date_utc is the time of the call (ISO 8601)."""
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": _proc("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        **_gpu(),
    }


def _git_revision() -> str | None:
    """Commit of the working tree that contains this module, with "+changes" if files differ from it. $MKTTS_REVISION
    takes precedence; it names a tree that was copied without its history, for example into a container."""
    if os.environ.get("MKTTS_REVISION"):
        return os.environ["MKTTS_REVISION"]
    folder = Path(__file__).resolve().parent
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = revision and _output("git", "-C", str(folder.parent), "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+changes" if changed else revision


def _gpu() -> dict[str, str | float | None]:
    """Name, driver, memory, clocks and power limit of the first GPU, as nvidia-smi reports them."""
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
    found: dict[str, str | float | None] = dict(zip(queries, line.splitlines()[0].split(", "), strict=False))
    for name in list(queries)[2:]:
        with suppress(ValueError):  # keeps "[N/A]"
            found[name] = float(found[name])
    return found


def _output(*command: str) -> str | None:
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=20, **quiet).strip() or None
    return None


# ---- memory bandwidth, and support for the kernel


def read_bandwidth_gb_s(device: str, repeats: int = 5) -> float:
    """GB/s at which `device` reads a large float32 matrix in a matrix-vector product, the best of `repeats`. Decoding
    one stream has the same access pattern: every weight is read once per pass and used once."""
    from torch.utils.benchmark import Timer  # takes a tenth of a second to import

    columns = 4096
    matrix = torch.ones(BANDWIDTH_BYTES // 4 // columns, columns, device=device)
    timed = {"torch": torch, "matrix": matrix, "vector": torch.ones(columns, device=device)}
    timer = Timer("torch.mv(matrix, vector)", globals=timed, num_threads=torch.get_num_threads())
    return BANDWIDTH_BYTES / min(timer.timeit(1).mean for _ in range(repeats)) / 1e9


def kernel_missing() -> str | None:
    """Why the megakernel cannot run on this machine; None if it can. Compiles nothing."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        target_of(torch.cuda.get_device_capability())
        nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return None
