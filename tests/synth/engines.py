"""The engines that every stream test runs on: arguments of `Synthesizer.load`, by name."""

from __future__ import annotations

import pytest
import torch

from mktts.batch.settings import BatchSettings

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_SMALL = BatchSettings(max_streams=32, memory_bytes=1 << 30)  # so that several tests share a device
_CUDA = {"device": "cuda", "engine": "batch", "batch": _SMALL}
ENGINES = [
    pytest.param({"backend": "torch", "device": "cpu", "engine": "single"}, id="oracle"),
    pytest.param({"device": "cpu", "engine": "batch"}, id="batch"),
    pytest.param({"backend": "megakernel", "device": "cuda"}, id="megakernel", marks=_GPU),
    pytest.param(
        {"device": "cuda", "engine": "batch", "deterministic": False, "batch": _SMALL}, id="batch-cuda", marks=_GPU
    ),
    pytest.param({"device": "cuda", "engine": "batch", "batch": _SMALL}, id="batch-cuda-same", marks=_GPU),
]


def pcm_limit(loading: dict) -> float:
    """How far a sample may lie from the plain decoder's in fp32: rounding, or 80 dB of a device's fused decoder."""
    return 1e-5 if loading["device"] == "cpu" else 1e-4
