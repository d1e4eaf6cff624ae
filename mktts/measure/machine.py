"""What this machine can run, and how fast it reads memory."""

from __future__ import annotations

import importlib.util
import time
from functools import partial

import torch

from mktts.errors import BackendUnavailable

BANDWIDTH_BYTES = 256 * 2**20  # well above any CPU's last-level cache and the 60 MB L2 of an H200


def read_bandwidth_gb_s(device: str, repeats: int = 5) -> float:
    """Bytes per second at which `device` reads a large float32 matrix once (matrix-vector product), best of `repeats`.
    This is the access pattern of decoding one stream: every weight is read once per pass and used once."""
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
