"""The few calls of the CUDA driver that launching a compiled kernel takes. Every one is checked."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from mktts.errors import BackendUnavailable, EngineError

_Arguments = ctypes.c_void_p * 1  # held: an array type that nobody holds is left to the garbage collector
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...


class _LaunchAttribute(ctypes.Structure):
    """cuda.h, CUlaunchAttribute: of 64 bytes of value the first four."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15)]


class _LaunchConfig(ctypes.Structure):
    """cuda.h, CUlaunchConfig."""

    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(f"the CUDA driver is not installed here ({error}): pass backend='torch'") from None


def _call(name: str, *arguments: object) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{name} failed: {text.value.decode() if text.value else status}")


class PlainKernel:
    """A kernel of a loaded cubin, or of PTX that the driver translates, on torch's current device. Raises
    BackendUnavailable where this driver or GPU cannot load it."""

    def __init__(self, image: bytes, name: str) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes torch's context the current one
        try:
            self._load(image, name)
        except EngineError as error:  # at this stage it says what this driver or GPU cannot do
            raise BackendUnavailable(
                f"the compiled kernel cannot be used here: {error}: pass backend='torch'"
            ) from None

    def _load(self, image: bytes, name: str) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._image = image  # the driver may read it later
        _call("cuModuleLoadData", ctypes.byref(self._module), image)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def launch_grid(
        self, grid: tuple[int, int], threads: int, parameters: ctypes.Structure, early: bool = False
    ) -> None:
        """An ordinary launch on torch's current stream, which may be capturing; `parameters` are copied. early: blocks
        may come before the kernel ahead has ended (programmatic dependent launch: compute capability 9.0 and later)."""
        attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(*grid, 1, threads, 1, 1, 0, stream, ctypes.pointer(attribute), int(early))
        arguments = _Arguments(ctypes.addressof(parameters))
        _call("cuLaunchKernelEx", ctypes.byref(config), self._function, arguments, None)


class Kernel(PlainKernel):
    """A kernel with a fixed grid and shared memory, for cooperative launches: all blocks are resident at once, because
    they wait for each other. Raises BackendUnavailable where the device cannot hold `blocks`."""

    def __init__(self, image: bytes, name: str, blocks: int, threads: int, shared_bytes: int) -> None:
        """`threads` of a block, and the dynamic shared memory that it takes."""
        self.blocks, self.threads, self.shared_bytes = blocks, threads, shared_bytes
        super().__init__(image, name)
        if self._present < blocks:
            raise BackendUnavailable(
                f"{blocks} blocks must be resident together and this GPU holds {self._present}: pass backend='torch'"
            )

    def _load(self, image: bytes, name: str) -> None:
        super()._load(image, name)
        _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, self.shared_bytes)
        each = ctypes.c_int()
        occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        _call(occupancy, ctypes.byref(each), self._function, self.threads, ctypes.c_size_t(self.shared_bytes))
        self._present = each.value * torch.cuda.get_device_properties().multi_processor_count

    def launch(self, parameters: ctypes.Structure, stream: torch.cuda.Stream) -> None:
        """A cooperative launch on `stream`; `parameters` are copied."""
        arguments, handle = _Arguments(ctypes.addressof(parameters)), ctypes.c_void_p(stream.cuda_stream)
        launch, blocks, threads = _driver().cuLaunchCooperativeKernel, self.blocks, self.threads
        status = launch(self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, handle, arguments)
        _check("cuLaunchCooperativeKernel", status)  # not `_call`: every frame comes by here
