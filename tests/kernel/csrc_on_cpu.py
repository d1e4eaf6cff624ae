"""csrc/frame.cu, rows.cu and unpack.cu, compiled for the CPU and run lane by lane: host/ stands in for csrc/ptx.cuh."""

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

from mktts.kernel.build import CSRC, source
from mktts.kernel.grid import MOST_ROWS, Shape
from mktts.kernel.tape import Launch, RowsParams

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")
# Stages of the ring, the talker's copies, blocks of a group: in groups of 7 a matrix's last stage is short, in those of
# 6 only keys and values are. Rings of the released sizes on all cards (test_build.py) and of the small voice on most.
RINGS = [(2, 1, 7), (2, 2, 6), (3, 1, 7), (5, 1, 7), (6, 2, 7), (10, 2, 6)]


def row_launches(shape: Shape, folder: Path, most_rows: int) -> Launch:
    """Launches of csrc/rows.cu as `mktts.kernel.tape` wants them; compiles in `folder`."""
    library = compiled("rows.cu", "launch_rows.h", folder, most_rows, [], {**shape.defines, "__shared__": "static"})
    seeds = itertools.count(1)

    def run(name: str, grid: tuple[int, int], parameters: RowsParams) -> None:
        library.host_launch(name.encode(), *grid, ctypes.byref(parameters), ctypes.c_ulonglong(next(seeds)))

    return run


def unpack_launch(shape: Shape, folder: Path) -> Launch:
    """As `row_launches`, of csrc/unpack.cu."""
    library = compiled("unpack.cu", "launch_unpack.h", folder, MOST_ROWS, [], shape.defines)
    return lambda name, grid, parameters: library.host_launch(*grid, ctypes.byref(parameters))


def compiled(
    unit: str, host: str, folder: Path, most_rows: int, changes: list[tuple[str, str]], defines: dict[str, int | str]
) -> ctypes.CDLL:
    """A library of csrc/`unit` with what launches it on the CPU, host/`host`, behind it; each change is made once."""
    shutil.copytree(CSRC, folder / "csrc")
    shutil.copy(HOST / "ptx.cuh", folder / "csrc")
    (folder / "csrc" / "on_cpu.cu").write_text(f'#include "ptx.cuh"\n#include "{unit}"\n')
    code = source("on_cpu.cu", folder / "csrc") + (HOST / host).read_text()
    for csrcs, ours in ((r"MOST_ROWS = 8 \* TILE_ROWS", f"MOST_ROWS = {most_rows}"), *changes):
        code, count = re.subn(csrcs, ours, code)
        assert count == 1, csrcs
    (folder / "kernel.cpp").write_text(code)
    flags = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([COMPILER, *flags, "-o", folder / "kernel.so", folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))
