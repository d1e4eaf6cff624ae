"""What the CUDA driver is given for a launch, without one: a stand-in reads it as the driver would."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from mktts.errors import EngineError
from mktts.kernel import driver
from mktts.kernel.params import Params


class StandIn:
    """Takes launches down as (grid, block, shared bytes, stream, the parameters' bytes)."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.launched = status, []

    def cuLaunchCooperativeKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments):
        parameters = ctypes.string_at(arguments[0], ctypes.sizeof(Params))
        self.launched.append(((gx, gy, gz), (bx, by, bz), shared, stream.value, parameters))
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too many blocks"


@pytest.fixture
def launched(monkeypatch):
    def kernel(status=0):
        found = driver.Kernel.__new__(driver.Kernel)
        found.blocks, found.threads, found.shared_bytes, found._function = 128, 384, 200_000, ctypes.c_void_p(7)
        stand_in = StandIn(status)
        monkeypatch.setattr(driver, "_driver", lambda: stand_in)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
        return found, stand_in.launched

    return kernel


def test_the_driver_reads_the_parameters_of_each_launch(launched):
    kernel, seen = launched()
    for frames in (3, 8):
        params = Params()
        params.frames, params.tag = frames, 17
        kernel.launch(params)
        assert seen[-1] == ((128, 1, 1), (384, 1, 1), 200_000, 5, bytes(params))
    assert seen[0][-1] != seen[1][-1]


def test_a_launch_leaves_nothing_to_the_garbage_collector(launched):
    """ctypes makes an array type anew where nobody holds it, and only the collector frees a type."""
    kernel, _ = launched()
    params = Params()
    kernel.launch(params)
    gc.collect()
    for _ in range(20):
        kernel.launch(params)
    assert gc.collect() == 0


def test_a_refused_launch_is_told_in_the_drivers_words(launched):
    kernel, _ = launched(status=720)
    with pytest.raises(EngineError, match="cuLaunchCooperativeKernel failed: too many blocks"):
        kernel.launch(Params())
