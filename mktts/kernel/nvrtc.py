"""NVRTC, NVIDIA's run-time compiler, from its Python package: no CUDA toolkit is needed, and no GPU.

Reference: NVRTC documentation, CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

from mktts.errors import BackendUnavailable

PACKAGE = "nvidia-cuda-nvrtc"


@cache
def nvrtc() -> tuple[ctypes.CDLL, tuple[int, int]]:
    """The library and its version. Raises BackendUnavailable where there is none."""
    for candidate in _candidates():
        try:
            if isinstance(candidate, Path):
                for builtins in candidate.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))  # NVRTC opens it by name, which works once it is loaded
            library = ctypes.CDLL(str(candidate))
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return library, (major.value, minor.value)
    raise BackendUnavailable(f"NVRTC was not found, so the megakernel cannot be compiled: pip install {PACKAGE}")


@cache
def known_architectures() -> frozenset[int]:
    """The compute capabilities that this NVRTC compiles for, ten times each: 86 is 8.6. Raises BackendUnavailable."""
    library, _ = nvrtc()
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    found = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(found))
    return frozenset(found)


def compile_source(code: str, unit: str, arch: str, flags: list[str]) -> tuple[bytes, str]:
    """Machine code for `arch` sm_..., PTX for compute_..., and the compiler's words. `unit` names the source in them.

    Raises BackendUnavailable without NVRTC, and where it refuses the source.
    """
    library, _ = nvrtc()
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), unit.encode(), 0, None, None))
    try:
        flags = [f"--gpu-architecture={arch}", *flags]
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), options)
        log = _bytes(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise BackendUnavailable(f"NVRTC refused the kernel's source ({' '.join(flags)}):\n{log[:4000]}")
        return _bytes(library, program, "PTX" if arch.startswith("compute_") else "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _candidates() -> list[Path | str]:
    spec = importlib.util.find_spec("nvidia")
    found: list[Path | str] = []
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted((p for p in Path(folder).glob(pattern) if "alt" not in p.name), reverse=True)
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BackendUnavailable(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")
