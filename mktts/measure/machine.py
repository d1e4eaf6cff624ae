"""What this machine can do, for notebook 00_machine: one row per resource, with what follows from it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mktts.errors import BackendUnavailable
from mktts.measure.environment import environment, provided_by

MISSING = "missing"
BANDWIDTH_BYTES = 256 * 2**20  # well above any CPU's last-level cache and the 60 MB L2 of an H200


def resources(folder: Path) -> list[dict[str, str]]:
    """Hardware: what was found, and what it means for the notebooks. `folder`: where outputs are written."""
    facts = environment()
    cores = f"{facts['cpu']}, {facts['cpu_cores']} cores, {facts['torch_threads']} torch threads"
    free_gb = shutil.disk_usage(folder).free / 1e9
    try:
        memory = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB"
    except (AttributeError, ValueError, OSError):
        memory = "unknown"
    return [
        _row("CPU", cores, "the torch backend runs here, in bfloat16 or float32"),
        _row("memory", memory, "0.6B needs 2.3 GB in bfloat16, 1.7B 4.5 GB; twice that in float32"),
        _row("disk", f"{free_gb:.0f} GB free", "a released checkpoint takes 2.5 GB (0.6B) or 4.5 GB (1.7B)"),
        _row("torch", str(facts["torch"]), "2.11 or newer is needed"),
        _gpu_row(facts),
        _kernel_row(),
    ]


def packages() -> list[dict[str, str]]:
    """Optional packages: present or missing, and what is skipped without them."""
    return [
        _upstream_row(),
        _package_row("soundfile", "reads reference audio for voice cloning", "only saved voices can be used"),
        _package_row("huggingface_hub", "fetches checkpoints by Hub id", "pass CHECKPOINT as a folder"),
        _package_row("anywidget", "plays PCM in the page", "04_streaming writes WAV files only"),
        _package_row("pyarrow", "writes outputs/metrics.parquet", "`mktts run` cannot collect its runs and refuses"),
        _package_row("pipecat", "voice agent", "the Pipecat service cannot be started"),
    ]


def read_bandwidth_gb_s(device: str, repeats: int = 5) -> float:
    """Bytes per second at which `device` reads a large float32 matrix once (matrix-vector product), best of `repeats`.

    This is the access pattern of decoding one stream: every weight is read once per pass and used once.
    """
    columns = 4096
    matrix = torch.ones(BANDWIDTH_BYTES // 4 // columns, columns, device=device)
    vector = torch.ones(columns, device=device)
    best_s = float("inf")
    synchronise = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else (lambda: None)
    for _ in range(repeats + 1):
        synchronise()
        begun_s = time.perf_counter()
        torch.mv(matrix, vector)
        synchronise()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return BANDWIDTH_BYTES / best_s / 1e9


def _row(what: str, found: str, consequence: str) -> dict[str, str]:
    return {"what": what, "found": found, "consequence": consequence}


def _gpu_row(facts: dict[str, Any]) -> dict[str, str]:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name, cuda = torch.cuda.get_device_name(), torch.version.cuda
        found = f"{name}, sm_{major}{minor}, CUDA {cuda}, driver {facts['gpu_driver']}"
        return _row("GPU", found, 'device="auto" takes it')
    if torch.version.cuda is None:
        why = "this torch is a CPU build"
    else:
        why = f"torch is built for CUDA {torch.version.cuda} and sees no usable device or driver"
    return _row("GPU", f"none ({why})", "everything runs on the CPU; GPU tests are skipped")


def kernel_missing() -> str | None:
    """Why the megakernel cannot run here; None where it can. Nothing is compiled for this."""
    from mktts.kernel.build import nvrtc, target_of

    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        target_of(torch.cuda.get_device_capability())
        nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return None


def batch_missing() -> str | None:
    """Why the batched frame cannot run here; None where it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if importlib.util.find_spec("triton") else "triton is not installed: it comes with torch's CUDA builds"


def _kernel_row() -> dict[str, str]:
    from mktts.kernel.build import nvrtc, target_of

    if why := kernel_missing():
        return _row("megakernel", f"none ({why})", "the torch backend speaks; figures of the kernel are recorded ones")
    (major, minor), target = nvrtc()[1], target_of(torch.cuda.get_device_capability())
    return _row("megakernel", f"for {target}, compiled by NVRTC {major}.{minor}", 'backend="auto" takes it')


def _upstream_row() -> dict[str, str]:
    from mktts.engine.upstream import import_upstream, install_shim

    try:
        replaced = install_shim()
        import_upstream()
    except BackendUnavailable as error:
        return _row("qwen_tts", f"{MISSING}: {error}", "03_parity compares with the offline codec only")
    stand_ins = f"; stand-ins for {', '.join(sorted(replaced))}, which 12 Hz models never use" if replaced else ""
    return _row("qwen_tts", f"{provided_by('qwen_tts')}{stand_ins}", "parity against upstream, fallback backend")


def _package_row(name: str, gives: str, without: str) -> dict[str, str]:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a banner is not a result
            importlib.import_module(name)
    except Exception as error:  # a package that fails to import, for whatever reason, is not available
        return _row(name, f"{MISSING}: {type(error).__name__}: {error}", without)
    return _row(name, provided_by(name) or "present", gives)
