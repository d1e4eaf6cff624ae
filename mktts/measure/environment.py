"""The machine and the software that a figure belongs to."""

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
    """The most resident memory this process has had, memory-mapped checkpoint pages included. Linux: VmHWM, because
    `getrusage` there also counts the parent a fresh process was forked from."""
    if found := _proc("/proc/self/status", "VmHWM"):
        return int(found.split()[0]) * 1_024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


def _proc(path: str, name: str) -> str | None:
    """The first value of this name in a file of Linux; None where there is none."""
    with suppress(OSError):
        lines = Path(path).read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
    return None


def head(device: str) -> dict[str, Any]:
    """How every document of measurements begins: device, driver, torch, revision, date (UTC), environment. `device` is
    where the measured work ran, as torch names it: "cuda..." puts the GPU's name there, others the CPU's."""
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
    """Installed versions by the names that pip knows; None for a package that is not there."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def provided_by(module: str) -> str | None:
    """The installed package that `module` comes from, with its version: "qwen-tts-hf 0.1.1.post1". None where none. Two
    packages may provide one module: qwen-tts, and its build for newer transformers, both install qwen_tts."""
    owners = versions(metadata.packages_distributions().get(module, []))
    return ", ".join(f"{owner} {version}" for owner, version in owners.items()) or None


def environment() -> dict[str, str | int | float | None]:
    """The machine and the software, flat, so that it fits a table row; None for what is not there or not known. Units
    are in the names; the GPU is the first that nvidia-smi lists. date_utc is the time of the call (ISO 8601)."""
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
    """Commit of the working tree this module is in, with "+changes" where files differ from it. A tree copied without
    its history (into a container, say) is named by $MKTTS_REVISION, which goes first."""
    if os.environ.get("MKTTS_REVISION"):
        return os.environ["MKTTS_REVISION"]
    folder = Path(__file__).resolve().parent
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = revision and _output("git", "-C", str(folder.parent), "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+changes" if changed else revision


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
    found: dict[str, str | float | None] = dict(zip(queries, line.splitlines()[0].split(", "), strict=False))
    for name in list(queries)[2:]:
        with suppress(ValueError):  # "[N/A]" stays
            found[name] = float(found[name])
    return found


def _output(*command: str) -> str | None:
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, timeout=20, **quiet).strip() or None
    return None


# ---- what can run here, and how fast memory is read


def read_bandwidth_gb_s(device: str, repeats: int = 5) -> float:
    """Bytes per second at which `device` reads a large float32 matrix once (matrix-vector product), best of `repeats`.
    This is the access pattern of decoding one stream: every weight is read once per pass and used once."""
    from torch.utils.benchmark import Timer  # takes a tenth of a second to import

    columns = 4096
    matrix = torch.ones(BANDWIDTH_BYTES // 4 // columns, columns, device=device)
    timed = {"torch": torch, "matrix": matrix, "vector": torch.ones(columns, device=device)}
    timer = Timer("torch.mv(matrix, vector)", globals=timed, num_threads=torch.get_num_threads())
    return BANDWIDTH_BYTES / min(timer.timeit(1).mean for _ in range(repeats)) / 1e9


def kernel_missing() -> str | None:
    """Why the megakernel cannot run here; None where it can. Nothing is compiled for this."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        target_of(torch.cuda.get_device_capability())
        nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return None
