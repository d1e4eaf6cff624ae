"""Compiling csrc/ for one card with NVRTC, NVIDIA's run-time compiler, from its Python package: no CUDA toolkit is
needed, and no GPU. A build is cached by source, definitions, architecture and compiler version."""

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
SHARED = "stages.cuh"  # included by frame.cu and text.cu; holds the constants that they export
PACKAGE = "nvidia-cuda-nvrtc"
# Architecture -> shared memory a block may have, bytes (CUDA programming guide, compute capabilities).
TARGETS = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_87": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024, "sm_103": 227 * 1024, "sm_110": 227 * 1024, "sm_120": 99 * 1024, "sm_121": 99 * 1024,
}  # fmt: skip


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


@dataclass(frozen=True)
class Build:
    """image: machine code (cubin), or PTX, which the driver translates. log: what the assembler said of it. constants:
    the kernel's exported 32-bit ones without their `mktts_`, a float's by its bits."""

    image: bytes
    log: str
    constants: dict[str, int]


def compile_source(code: str, unit: str, arch: str, flags: list[str]) -> Build:
    """For `arch` sm_... machine code, for compute_... PTX. `unit` names the source in what the compiler says. Raises
    BackendUnavailable without NVRTC, and where it refuses the source."""
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
    """Raises BackendUnavailable where kernels of triton, which `what` needs, cannot run: triton compiles its launchers
    with the machine's own compiler, which is better found wanting here than in a capture."""
    if device.type != "cuda":
        raise BackendUnavailable(f"{what} needs a CUDA device, got {device}")
    try:
        from mktts.kernel import rows

        some = torch.zeros(2, 16, device=device)
        with torch.cuda.device(device):
            rows.silu_mul[1, 1](some[:1], some[1:], N=8, BLOCK=16)
    except Exception as error:  # whatever triton, its compiler or its cache folder raise, or an import without triton
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
    """What decides how a kernel is built. arch: of TARGETS, compiled to machine code; or compute_86, say: PTX for any
    card of that compute capability or a later one. shared_bytes: that one block may have."""

    arch: str
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def like(cls, arch: str, multiprocessors: int) -> Card:
        """Any card of one architecture, by its name in TARGETS or as compute_..."""
        return cls(arch, multiprocessors, TARGETS[arch.replace("compute_", "sm_")])


def card_of(device: torch.device) -> Card:
    """The CUDA device's. Raises BackendUnavailable as `target_of`."""
    properties = torch.cuda.get_device_properties(device)
    card = Card.like(target_of((properties.major, properties.minor)), properties.multi_processor_count)
    return replace(card, shared_bytes=min(card.shared_bytes, properties.shared_memory_per_block_optin))


def target_of(capability: tuple[int, int], known: Collection[int] | None = None) -> str:
    """What to compile for: the capability itself, or PTX of the newest earlier one, where it is not known. known: what
    NVRTC compiles for; None asks it. Raises BackendUnavailable for a GPU before 8.0, and without NVRTC."""
    wanted = 10 * capability[0] + capability[1]
    if wanted < min(map(_number, TARGETS)):
        found = f"this GPU's is {capability[0]}.{capability[1]}: pass backend='torch'"
        raise BackendUnavailable(f"the megakernel is built for compute capability 8.0 and later, {found}")
    known = known_architectures() if known is None else known
    usable = {_number(name): name for name in TARGETS if _number(name) in known}
    if wanted in usable:
        return usable[wanted]
    # sm_90a's code is for that architecture alone
    earlier = [number for number, name in usable.items() if number < wanted and not name.endswith("a")]
    if not earlier:
        hint = "install nvidia-cuda-nvrtc 12.8 or newer"
        raise BackendUnavailable(f"this NVRTC compiles for none of {', '.join(TARGETS)}: {hint}")
    return f"compute_{max(earlier)}"


def _number(name: str) -> int:
    return int("".join(filter(str.isdigit, name)))


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


def build_for(defines: dict[str, int], card: Card, unit: str = "frame.cu") -> Build:
    """Compiles with as many stages of the ring as the card's shared memory holds, by what two take in a build of the
    shared headers, which compile at once; never more than one token's, whose keys and values must be written before the
    ring fetches them for the next one. Raises BackendUnavailable as `compile_kernel`, and where two are too many."""
    least = compile_kernel({**defines, "RING": 2}, card.arch, SHARED)
    used_bytes, stage_bytes = (least.constants[name] for name in ("shared_bytes", "stage_bytes"))
    stages = 2 + (card.shared_bytes - used_bytes) // stage_bytes
    if stages < 2:
        needs = f"the megakernel needs {used_bytes} bytes of shared memory a block for this checkpoint"
        has = f"this GPU has {card.shared_bytes}, {used_bytes - card.shared_bytes} too few"
        raise BackendUnavailable(f"{needs}, {has}: pass backend='torch'")
    return compile_kernel({**defines, "RING": min(stages, 4 * defines["T_L"])}, card.arch, unit)


def compile_kernel(defines: dict[str, int], arch: str, unit: str = "frame.cu") -> Build:
    """Compiles for `arch`, as `Card.arch`, or takes from the cache. Raises BackendUnavailable without NVRTC, and where
    it refuses the source or does not know the architecture."""
    flags = ["--std=c++17", "--ptxas-options=-v"] + [f"-D{name}={value}" for name, value in sorted(defines.items())]
    code = source(unit)
    key = hashlib.sha256(json.dumps([code, arch, flags, nvrtc()[1]]).encode()).hexdigest()[:24]
    kept = cache_folder() / "kernels" / f"{arch}-{key}"
    about = kept.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, TypeError):  # not there, damaged, or of another version of this file
        return Build(kept.with_suffix(".image").read_bytes(), **json.loads(about.read_text(encoding="utf-8")))
    with announced(f"mktts: compiling {unit} for {arch}, once"):
        build = compile_source(code, unit, arch, flags)
    try:
        write_whole(kept.with_suffix(".image"), build.image)
        write_whole(about, json.dumps({"log": build.log, "constants": build.constants}).encode())
    except OSError as error:  # a full or read-only cache costs seconds at the next start, not this one
        print(f"mktts: the compiled kernel could not be kept: {error}", file=sys.stderr)
    return build
