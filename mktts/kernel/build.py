"""Compiling csrc/ with NVRTC, NVIDIA's run-time compiler, from its Python package: no CUDA toolkit is needed.

A build is cached by source, definitions, architecture and compiler version. It needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import struct
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from mktts.common import cache_folder, write_whole
from mktts.errors import BackendUnavailable

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# Architecture -> shared memory a block may have, bytes (CUDA programming guide, compute capabilities).
TARGETS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
_SM_120_NEEDS = (12, 8)  # the first NVRTC that knows sm_100 and sm_120
_PACKAGE = "nvidia-cuda-nvrtc"
SHARED = "stages.cuh"  # included by frame.cu and text.cu; holds the constants that they export


@dataclass(frozen=True)
class Build:
    """A compiled kernel and what the assembler said of it."""

    cubin: bytes
    registers: int
    spill_bytes: int  # stores and loads of spilled registers, all functions
    log: str

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's exported 32-bit constants without their `mktts_`, read from the file: no GPU is needed.

        A float's is its bits.
        """
        return constants_of(self.cubin)


def target_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for. Raises BackendUnavailable for a GPU without a configuration."""
    name = f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
    if name not in TARGETS:
        raise BackendUnavailable(
            f"the megakernel is built for {', '.join(TARGETS)}; this GPU is compute capability "
            f"{capability[0]}.{capability[1]}: pass backend='torch'"
        )
    return name


def source(unit: str = "frame.cu", folder: Path = CSRC) -> str:
    """A kernel's file with its headers in place of their includes."""
    if not (folder / unit).exists():
        raise BackendUnavailable(f"{folder}: expected the kernel's source: install from a checkout (pip install -e .)")
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = []
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            include = re.fullmatch(r'#include "(.+)"', line)
            lines.append(expand(include[1]) if include else "" if line == "#pragma once" else line)
        return "\n".join(lines)

    return expand(unit)


def build_for(defines: dict[str, int], arch: str, unit: str = "frame.cu") -> Build:
    """Compiles with as many ring stages as the target's shared memory holds.

    What two stages take is read from a build of the shared headers, which have no kernel in them and compile at once.
    Never more stages than one token's: its keys and values must be written before the ring fetches them for the next
    token. A layer has at least four stages.

    Raises BackendUnavailable as `compile_kernel`, and where the checkpoint's dimensions leave no room for two stages.
    """
    least = compile_kernel({**defines, "RING": 2}, arch, SHARED)
    used_bytes, stage_bytes = (least.constants[name] for name in ("shared_bytes", "stage_bytes"))
    stages = 2 + (TARGETS[arch] - used_bytes) // stage_bytes
    if stages < 2:
        raise BackendUnavailable(
            f"the megakernel needs {used_bytes} bytes of shared memory a block for this "
            f"checkpoint, {arch} has {TARGETS[arch]}: pass backend='torch'"
        )
    return compile_kernel({**defines, "RING": min(stages, 4 * defines["T_L"])}, arch, unit)


def compile_kernel(defines: dict[str, int], arch: str, unit: str = "frame.cu") -> Build:
    """Compiles, or takes from the cache. Raises BackendUnavailable without NVRTC, and where it refuses the source."""
    library, version = nvrtc()
    if arch in ("sm_100", "sm_120") and version < _SM_120_NEEDS:
        raise BackendUnavailable(f"NVRTC {version} cannot compile for {arch}: install {_PACKAGE} 12.8 or newer")
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    code = source(unit)
    key = hashlib.sha256(json.dumps([code, flags, version]).encode()).hexdigest()[:24]
    kept = cache_folder() / "kernels" / f"{arch}-{key}"
    if kept.with_suffix(".json").exists():
        return Build(kept.with_suffix(".cubin").read_bytes(), **json.loads(kept.with_suffix(".json").read_text()))
    print(f"mktts: compiling {unit} for {arch}, once ...", end="", file=sys.stderr, flush=True)
    begun_s = time.perf_counter()
    build = _compile(library, code, unit, flags)
    print(f" {time.perf_counter() - begun_s:.1f} s", file=sys.stderr)
    about = {name: value for name, value in asdict(build).items() if name != "cubin"}
    try:
        write_whole(kept.with_suffix(".cubin"), build.cubin)
        write_whole(kept.with_suffix(".json"), json.dumps(about).encode())
    except OSError as error:  # a full or read-only cache costs seconds at the next start, not this one
        print(f"mktts: the compiled kernel could not be kept: {error}", file=sys.stderr)
    return build


def constants_of(cubin: bytes) -> dict[str, int]:
    """The 32-bit objects of an ELF64 file whose names begin with mktts_, by the rest of their names.

    Format: ELF-64 Object File Format 1.5.
    """
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    found = {}
    for section in sections:
        kind, offset, length, link = section[1], section[4], section[5], section[6]
        if kind != 2:  # SHT_SYMTAB
            continue
        for at in range(offset, offset + length, 24):
            name, _, _, index, value, bytes_ = struct.unpack_from("<IBBHQQ", cubin, at)
            start = sections[link][4] + name
            text = cubin[start : cubin.index(b"\0", start)].decode()
            if bytes_ == 4 and 0 < index < count and text.startswith("mktts_"):
                (found[text.removeprefix("mktts_")],) = struct.unpack_from("<I", cubin, sections[index][4] + value)
    return found


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
    raise BackendUnavailable(f"NVRTC was not found, so the megakernel cannot be compiled: pip install {_PACKAGE}")


def _candidates() -> list[Path | str]:
    spec = importlib.util.find_spec("nvidia")
    found: list[Path | str] = []
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted((p for p in Path(folder).glob(pattern) if "alt" not in p.name), reverse=True)
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


def _compile(library: ctypes.CDLL, code: str, unit: str, flags: list[str]) -> Build:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), unit.encode(), 0, None, None))
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), options)
        log = _text(library, program, "ProgramLog")
        if status:
            raise BackendUnavailable(f"NVRTC refused the kernel's source ({' '.join(flags)}):\n{log[:4000]}")
        cubin = _bytes(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return Build(cubin, registers, spills, log)


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(library, program, what).rstrip(b"\0").decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BackendUnavailable(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")
