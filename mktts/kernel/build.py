"""Compiles csrc/ for one card with NVRTC, NVIDIA's run-time compiler, from its Python package: this needs neither a
CUDA toolkit nor a GPU. Builds are cached by source, definitions, architecture and compiler version."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from mktts.common import announced, cache_folder, write_whole
from mktts.errors import BackendUnavailable

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SHARED = "stages.cuh"  # included by frame.cu and text.cu; defines the constants that they export
PACKAGE = "nvidia-cuda-nvrtc"
# Architecture -> maximum shared memory per block, bytes (CUDA programming guide, compute capabilities).
TARGETS = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_87": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024, "sm_103": 227 * 1024, "sm_110": 227 * 1024, "sm_120": 99 * 1024, "sm_121": 99 * 1024,
}  # fmt: skip


@cache
def nvrtc() -> tuple[ctypes.CDLL, tuple[int, int]]:
    """Loads NVRTC; returns the library and its version. Raises BackendUnavailable if it is not installed."""
    for candidate in _candidates():
        try:
            if isinstance(candidate, Path):
                for builtins in candidate.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))  # NVRTC opens it by name, which succeeds once it is loaded
            library = ctypes.CDLL(str(candidate))
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return library, (major.value, minor.value)
    raise BackendUnavailable(f"NVRTC was not found, so the megakernel cannot be compiled: pip install {PACKAGE}")


@cache
def known_architectures() -> frozenset[int]:
    """The compute capabilities that NVRTC compiles for, times ten: 86 is 8.6. Raises BackendUnavailable without it."""
    library, _ = nvrtc()
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    found = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(found))
    return frozenset(found)


@dataclass(frozen=True)
class Build:
    """A compiled source. image: machine code (cubin), or PTX, which the driver translates. log: the assembler's output.
    constants: the exported 32-bit constants, by name without `mktts_`; a float is given by its bits."""

    image: bytes
    log: str
    constants: dict[str, int]


def compile_source(code: str, unit: str, arch: str, flags: list[str]) -> Build:
    """Compiles to machine code for an `arch` sm_..., to PTX for compute_... unit: name of the source in the compiler's
    messages. Raises BackendUnavailable without NVRTC, and if the source does not compile."""
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
        ptx = _bytes(library, program, "PTX")
        image = ptx if arch.startswith("compute_") else _bytes(library, program, "CUBIN")
        # such as `.global .align 4 .u32 mktts_warps = 8;`, floats as 0f and eight hex digits
        found = re.findall(r"\.[uf]32 mktts_(\w+) = (?:0f([0-9A-F]{8})|(\d+));", ptx.decode())
        return Build(image, log, {name: int(bits, 16) if bits else int(number) for name, bits, number in found})
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def require_triton(what: str, device: torch.device) -> None:
    """Raises BackendUnavailable if Triton kernels, which `what` needs, cannot run. Triton compiles its launchers with
    the system's C compiler; if that is missing, it should be reported here and not during a graph capture."""
    if device.type != "cuda":
        raise BackendUnavailable(f"{what} needs a CUDA device, got {device}")
    try:
        from mktts.kernel import rows

        some = torch.zeros(2, 16, device=device)
        with torch.cuda.device(device):
            rows.silu_mul[1, 1](some[:1], some[1:], N=8, BLOCK=16)
    except Exception as error:  # any error of triton, its compiler or its cache folder, or a failed import
        why = f"which cannot build its kernels here ({type(error).__name__}: {error})"
        raise BackendUnavailable(f"{what} needs triton, {why}") from error


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


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that determine how a kernel is built. arch: a name in TARGETS, compiled to machine code,
    or compute_86, for example: PTX for that compute capability and later ones. shared_bytes: maximum per block."""

    arch: str
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def like(cls, arch: str, multiprocessors: int) -> Card:
        """A card of one architecture, by its name in TARGETS or as compute_..."""
        return cls(arch, multiprocessors, TARGETS[arch.replace("compute_", "sm_")])


def card_of(device: torch.device) -> Card:
    """The card of a CUDA device. Raises BackendUnavailable as `target_of`."""
    properties = torch.cuda.get_device_properties(device)
    card = Card.like(target_of((properties.major, properties.minor)), properties.multi_processor_count)
    return replace(card, shared_bytes=min(card.shared_bytes, properties.shared_memory_per_block_optin))


def target_of(capability: tuple[int, int], known: Collection[int] | None = None) -> str:
    """The architecture to compile for: the capability itself or, if unknown, PTX of the newest earlier one. known: what
    NVRTC compiles for; None asks NVRTC. Raises BackendUnavailable for a GPU before 8.0, and without NVRTC."""
    wanted = 10 * capability[0] + capability[1]
    if wanted < min(map(_number, TARGETS)):
        found = f"this GPU's is {capability[0]}.{capability[1]}: pass backend='torch'"
        raise BackendUnavailable(f"the megakernel is built for compute capability 8.0 and later, {found}")
    known = known_architectures() if known is None else known
    usable = {_number(name): name for name in TARGETS if _number(name) in known}
    if wanted in usable:
        return usable[wanted]
    # sm_90a's code runs on that architecture only
    earlier = [number for number, name in usable.items() if number < wanted and not name.endswith("a")]
    if not earlier:
        hint = "install nvidia-cuda-nvrtc 12.8 or newer"
        raise BackendUnavailable(f"this NVRTC compiles for none of {', '.join(TARGETS)}: {hint}")
    return f"compute_{max(earlier)}"


def _number(name: str) -> int:
    return int("".join(filter(str.isdigit, name)))


def source(unit: str = "frame.cu", folder: Path = CSRC) -> str:
    """The source of a kernel, with its includes expanded."""
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


def build_for(defines: dict[str, int], card: Card, unit: str = "frame.cu") -> Build:
    """Compiles with as many ring stages as fit into the card's shared memory, computed from a quick build of the shared
    headers with two stages. At most one token's stages are used, because its keys and values must be written before the
    ring fetches them for the next token. Raises BackendUnavailable as `compile_kernel`, and if two do not fit."""
    least = compile_kernel({**defines, "RING": 2}, card.arch, SHARED)
    used_bytes, stage_bytes = (least.constants[name] for name in ("shared_bytes", "stage_bytes"))
    stages = 2 + (card.shared_bytes - used_bytes) // stage_bytes
    if stages < 2:
        needs = f"the megakernel needs {used_bytes} bytes of shared memory a block for this checkpoint"
        has = f"this GPU has {card.shared_bytes}, {used_bytes - card.shared_bytes} too few"
        raise BackendUnavailable(f"{needs}, {has}: pass backend='torch'")
    return compile_kernel({**defines, "RING": min(stages, 4 * defines["T_L"])}, card.arch, unit)


def compile_kernel(defines: dict[str, int], arch: str, unit: str = "frame.cu") -> Build:
    """Compiles for `arch` (as `Card.arch`) or returns the cached build. Raises BackendUnavailable without NVRTC, and if
    the source does not compile or NVRTC does not know the architecture."""
    flags = ["--std=c++17", "--ptxas-options=-v"] + [f"-D{name}={value}" for name, value in sorted(defines.items())]
    code = source(unit)
    key = hashlib.sha256(json.dumps([code, arch, flags, nvrtc()[1]]).encode()).hexdigest()[:24]
    kept = cache_folder() / "kernels" / f"{arch}-{key}"
    about = kept.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing, damaged, or from another version of this file
        return Build(kept.with_suffix(".image").read_bytes(), **json.loads(about.read_text(encoding="utf-8")))
    with announced(f"mktts: compiling {unit} for {arch}, once"):
        build = compile_source(code, unit, arch, flags)
    try:
        write_whole(kept.with_suffix(".image"), build.image)
        write_whole(about, json.dumps({"log": build.log, "constants": build.constants}).encode())
    except OSError as error:  # a full or read-only cache only means compiling again at the next start
        print(f"mktts: the compiled kernel could not be kept: {error}", file=sys.stderr)
    return build
