"""csrc/frame.cu, rows.cu and unpack.cu compiled for the CPU and launched there, lane by lane: host/ stands in for
csrc/ptx.cuh."""

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from driver_on_cpu import backend_without_a_card, launcher_without_a_card, put_stand_in
from other_cards import FORCED_FRAMES, Model

from mktts.kernel import backend as backend_module
from mktts.kernel import launch
from mktts.kernel.backend import Debug, MegakernelBackend
from mktts.kernel.build import CSRC, source
from mktts.kernel.grid import MOST_ROWS, Shape
from mktts.kernel.launch import WAITS, Params
from mktts.kernel.tape import Launch, RowsParams, model_weights
from mktts.measure.parity.kernel import Observed, vocabularies
from mktts.model.backend import PromptRows
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")
# Stages of the ring, the talker's copies, blocks of a group: in groups of 7 a matrix's last stage is short, in those of
# 6 only keys and values are. Rings of the released sizes on all cards (test_build.py) and of the small voice on most.
RINGS = [(2, 1, 7), (2, 2, 6), (3, 1, 7), (5, 1, 7), (6, 2, 7), (10, 2, 6)]
_TIMEOUT_TURNS = 10**6  # the clock here counts turns of warps


def build(shape: Shape, folder: Path, most_rows: int = MOST_ROWS, ring: int = 4, talker_copies: int = 1) -> ctypes.CDLL:
    """Compiles into `folder`, otherwise than for a card, so that a small shape meets what a large one has.

    most_rows: a block multiplies at once: with fewer, small shares come in several matrices. ring: stages.
    talker_copies: under way at once, before the ring's stages bound them.
    """
    changes = [
        (r"Talker::LAYER_BYTES \* CTAS > 50 << 20 \? 2 : 1", str(talker_copies)),
        (r"MOST_NAPS = 1 << 23", "MOST_NAPS = 1 << 10"),
        (r"extern __shared__ .* dynamic\[\];", "u8* dynamic = now->block->shared.data();"),
        (r'(#define EXPORT\(.*\) extern "C") __device__', r"\1"),
    ]
    return _compiled("frame.cu", "launch.h", folder, most_rows, changes, {**shape.defines, "RING": ring})


def row_launches(shape: Shape, folder: Path, most_rows: int) -> Launch:
    """Launches of csrc/rows.cu as `mktts.kernel.tape` wants them; compiles in `folder`."""
    library = _compiled("rows.cu", "launch_rows.h", folder, most_rows, [], {**shape.defines, "__shared__": "static"})
    seeds = itertools.count(1)

    def run(name: str, grid: tuple[int, int], parameters: RowsParams) -> None:
        library.host_launch(name.encode(), *grid, ctypes.byref(parameters), ctypes.c_ulonglong(next(seeds)))

    return run


def unpack_launch(shape: Shape, folder: Path) -> Launch:
    """As `row_launches`, of csrc/unpack.cu."""
    library = _compiled("unpack.cu", "launch_unpack.h", folder, MOST_ROWS, [], shape.defines)
    return lambda name, grid, parameters: library.host_launch(*grid, ctypes.byref(parameters))


def _compiled(
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


def backend_on_cpu(
    model: Model, shape: Shape, library: ctypes.CDLL, seed: int, patch: pytest.MonkeyPatch
) -> MegakernelBackend:
    """A backend whose launches run to their end on the CPU, in an order of chance. All rows of a prompt go through the
    kernel, one by one."""
    driver, seeds = put_stand_in(patch), itertools.count(seed)
    driver.cuLaunchCooperativeKernel = lambda *given: _launch(library, Params.from_address(given[-1][0]), next(seeds))
    patch.setattr(launch, "_TIMEOUT_NS", _TIMEOUT_TURNS)
    patch.setattr(backend_module, "_KERNEL_ROWS", 10**6)
    launcher = launcher_without_a_card(patch)
    launcher.library = library
    launcher.layer_exchanges = ctypes.c_uint32.in_dll(library, "mktts_layer_exchanges").value
    words = torch.zeros(library.host_exchange_bytes() // 4 + 32, dtype=torch.int32)
    launcher._exchange = words[-words.data_ptr() % 128 // 4 :]
    weights = model_weights(shape, lambda name: model.tensors[name].bfloat16())
    return backend_without_a_card(model.config, shape, launcher, weights, tags_per_frame=1_000)


def observed(backend: MegakernelBackend, prompt: Prompt, frames: int = FORCED_FRAMES) -> list[Observed]:
    """The first frames, greedy, of one launch."""
    talker, sizes = backend.config.talker, vocabularies(backend.config)
    state = backend.start(PromptRows(prompt.embeds), Sampling().greedy(), 0, frames)
    logits = torch.zeros(frames, NUM_CODEBOOKS, talker.vocab_size, dtype=torch.bfloat16)
    hidden = torch.zeros(frames, talker.num_hidden_layers, talker.hidden_size, dtype=torch.bfloat16)
    rows = [None, *(prompt.row(index) for index in range(frames - 1))]
    made = list(backend.frames(state, rows, Debug(logits, hidden)))
    heads = [[head[:size].float() for head, size in zip(frame, sizes, strict=True)] for frame in logits]
    return [Observed(frame.codes, heads[i], hidden[i].float() if i else None) for i, frame in enumerate(made)]


def _launch(library: ctypes.CDLL, params: Params, seed: int) -> None:
    """Fails with what the kernel's watchdog left, or where a loop that it does not reach did not end."""
    library.host_launch.restype = ctypes.c_char_p
    why = library.host_launch(ctypes.byref(params), ctypes.c_ulonglong(seed))
    error, block, thread, wait, _ = (ctypes.c_int * 5).from_address(params.status)
    named = f"block {block}, thread {thread} waited too long for {WAITS.get(wait, wait)}" if error else ""
    assert not (why or error), "; ".join(filter(None, (named, why and why.decode())))
