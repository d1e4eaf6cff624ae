"""Compiling csrc/ for one card.

A build is cached by source, definitions, architecture and compiler version. It needs no GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mktts.common import cache_folder, write_whole
from mktts.errors import BackendUnavailable
from mktts.kernel.card import Card
from mktts.kernel.nvrtc import compile_source, nvrtc

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SHARED = "stages.cuh"  # included by frame.cu and text.cu; holds the constants that they export


@dataclass(frozen=True)
class Build:
    """A compiled kernel and what the assembler said of it."""

    image: bytes  # machine code (cubin), or PTX, which the driver translates
    registers: int  # 0 of PTX, as the next
    spill_bytes: int  # stores and loads of spilled registers, all functions
    log: str

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's exported 32-bit constants without their `mktts_`, read from the file: no GPU is needed.

        A float's is its bits.
        """
        return constants_of(self.image) if self.image[:4] == b"\x7fELF" else constants_of_ptx(self.image.decode())


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


def fingerprint(folder: Path = CSRC) -> str:
    """Twelve hex digits of what csrc/ has the compiler do: its sources without comments and blank lines."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cuh"))
    lines = (re.sub(r"\s*//.*", "", line) for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:12]


def build_for(defines: dict[str, int], card: Card, unit: str = "frame.cu") -> Build:
    """Compiles with `ring_stages`. Raises BackendUnavailable as those and `compile_kernel`."""
    return compile_kernel({**defines, "RING": ring_stages(defines, card)}, card.arch, unit)


def ring_stages(defines: dict[str, int], card: Card) -> int:
    """As many stages as the card's shared memory holds.

    What two stages take is read from a build of the shared headers, which have no kernel in them and compile at once.
    Never more stages than one token's: its keys and values must be written before the ring fetches them for the next
    token. A layer has at least four stages.

    Raises BackendUnavailable as `compile_kernel`, and where the checkpoint's dimensions leave no room for two stages.
    """
    least = compile_kernel({**defines, "RING": 2}, card.arch, SHARED)
    used_bytes, stage_bytes = (least.constants[name] for name in ("shared_bytes", "stage_bytes"))
    stages = 2 + (card.shared_bytes - used_bytes) // stage_bytes
    if stages < 2:
        raise BackendUnavailable(
            f"the megakernel needs {used_bytes} bytes of shared memory a block for this checkpoint, this GPU has "
            f"{card.shared_bytes}, {used_bytes - card.shared_bytes} too few: pass backend='torch'"
        )
    return min(stages, 4 * defines["T_L"])


def compile_kernel(defines: dict[str, int], arch: str, unit: str = "frame.cu") -> Build:
    """Compiles, or takes from the cache. `arch`: as `Card.arch`.

    Raises BackendUnavailable without NVRTC, and where it refuses the source or does not know the architecture.
    """
    flags = ["--std=c++17", "--ptxas-options=-v"] + [f"-D{name}={value}" for name, value in sorted(defines.items())]
    code = source(unit)
    key = hashlib.sha256(json.dumps([code, arch, flags, nvrtc()[1]]).encode()).hexdigest()[:24]
    kept = cache_folder() / "kernels" / f"{arch}-{key}"
    if kept.with_suffix(".json").exists():
        return Build(kept.with_suffix(".image").read_bytes(), **json.loads(kept.with_suffix(".json").read_text()))
    print(f"mktts: compiling {unit} for {arch}, once ...", end="", file=sys.stderr, flush=True)
    begun_s = time.perf_counter()
    build = _compile(code, unit, arch, flags)
    print(f" {time.perf_counter() - begun_s:.1f} s", file=sys.stderr)
    about = {name: value for name, value in asdict(build).items() if name != "image"}
    try:
        write_whole(kept.with_suffix(".image"), build.image)
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


def constants_of_ptx(ptx: str) -> dict[str, int]:
    """As `constants_of`, from PTX: `.global .align 4 .u32 mktts_warps = 8;`, floats as 0f and eight hex digits."""
    found = re.findall(r"\.[uf]32 mktts_(\w+) = (?:0f([0-9A-F]{8})|(\d+));", ptx)
    return {name: int(bits, 16) if bits else int(number) for name, bits, number in found}


def _compile(code: str, unit: str, arch: str, flags: list[str]) -> Build:
    image, log = compile_source(code, unit, arch, flags)
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    return Build(image, registers, sum(map(int, re.findall(r"(\d+) bytes spill", log))), log)
