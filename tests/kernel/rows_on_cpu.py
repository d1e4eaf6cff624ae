"""csrc/rows.cu compiled for the CPU and launched there, lane by lane: host/ stands in for csrc/ptx.cuh."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

from frame_on_cpu import HOST, compiled

from mktts.kernel.build import CSRC, source
from mktts.kernel.grid import Shape
from mktts.kernel.tape_stack import Launch, RowsParams


def launches(shape: Shape, folder: Path, most_rows: int) -> Launch:
    """As `mktts.kernel.tape_stack` wants it; compiles in `folder`. most_rows: as for `frame_on_cpu.build`."""
    shutil.copytree(CSRC, folder / "csrc")
    shutil.copy(HOST / "ptx.cuh", folder / "csrc")
    code = source("rows.cu", folder / "csrc") + (HOST / "launch_rows.h").read_text()
    code, count = re.subn(r"MOST_ROWS = 8 \* TILE_ROWS", f"MOST_ROWS = {most_rows}", code)
    assert count == 1
    library, seed = compiled(code, folder, {**shape.defines, "__shared__": "static"}), 0

    def launch(name: str, grid: tuple[int, int], parameters: RowsParams) -> None:
        nonlocal seed
        seed += 1
        library.host_launch(name.encode(), *grid, ctypes.byref(parameters), ctypes.c_ulonglong(seed))

    return launch
