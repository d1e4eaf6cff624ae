"""csrc/frame.cu and csrc/rows.cu compiled for the CPU and launched there, lane by lane: host/ stands in for
csrc/ptx.cuh."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import torch
from other_cards import FORCED_FRAMES, Model

from mktts.kernel.backend import MegakernelStream, frame_of, new_state_tensors
from mktts.kernel.build import CSRC, source
from mktts.kernel.grid import MOST_ROWS, Shape
from mktts.kernel.launch import FRAME_WORDS, MADE, STATUS_WORDS, WAITS, Params, point
from mktts.kernel.tape import model_weights
from mktts.kernel.tape_stack import Launch, RowsParams
from mktts.measure.parity.ratio import Observed, vocabularies
from mktts.model.sampling import Sampling
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL

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
    """Launches of csrc/rows.cu as `mktts.kernel.tape_stack` wants them; compiles in `folder`."""
    library = _compiled("rows.cu", "launch_rows.h", folder, most_rows, [], {**shape.defines, "__shared__": "static"})
    seeds = itertools.count(1)

    def launch(name: str, grid: tuple[int, int], parameters: RowsParams) -> None:
        library.host_launch(name.encode(), *grid, ctypes.byref(parameters), ctypes.c_ulonglong(next(seeds)))

    return launch


def _compiled(
    unit: str, host: str, folder: Path, most_rows: int, changes: list[tuple[str, str]], defines: dict[str, int | str]
) -> ctypes.CDLL:
    """A library of csrc/`unit` with what launches it on the CPU, host/`host`, behind it; each change is made once."""
    shutil.copytree(CSRC, folder / "csrc")
    shutil.copy(HOST / "ptx.cuh", folder / "csrc")
    code = source(unit, folder / "csrc") + (HOST / host).read_text()
    for csrcs, ours in ((r"MOST_ROWS = 8 \* TILE_ROWS", f"MOST_ROWS = {most_rows}"), *changes):
        code, count = re.subn(csrcs, ours, code)
        assert count == 1, csrcs
    (folder / "kernel.cpp").write_text(code)
    flags = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    flags += [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run([COMPILER, *flags, "-o", folder / "kernel.so", folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def observed(
    model: Model, shape: Shape, library: ctypes.CDLL, seed: int, frames: int = FORCED_FRAMES
) -> list[Observed]:
    """The first frames, greedy, after the model's prompt, whose rows go through the kernel one by one."""
    talker, embeds = model.config.talker, model.prompt.embeds.bfloat16().contiguous()
    rows = len(embeds)
    words = torch.zeros(library.host_exchange_bytes() // 4 + 32, dtype=torch.int32)
    exchange = words[-words.data_ptr() % 128 // 4 :]
    out, status = torch.zeros(STATUS_WORDS + frames * FRAME_WORDS, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    own = new_state_tensors(shape, rows + frames, torch.bfloat16, torch.device("cpu"))
    sampling = Sampling().greedy()
    projected = "talker.code_predictor.small_to_mtp_projection.weight" in model.tensors
    weights = model_weights(shape, lambda name: model.tensors[name].bfloat16(), projected)
    fixed = Params()
    logits = torch.zeros(frames, NUM_CODEBOOKS, talker.vocab_size, dtype=torch.bfloat16)
    hidden = torch.zeros(frames, talker.num_hidden_layers, talker.hidden_size, dtype=torch.bfloat16)
    point(fixed, weights | {"exchange": exchange, "status": status})
    fixed.ends[:] = [model.config.codec_ids.eos, -1, -1, -1]
    fixed.min_frames, fixed.suppress_from = MIN_NEW_FRAMES, talker.vocab_size - SUPPRESSED_TAIL
    fixed.timeout_ns, fixed.tag = _TIMEOUT_TURNS, 1
    state = MegakernelStream(
        **own, out=out, sampling=sampling, seed=0, prompt_rows=rows, max_frames=frames, fixed=fixed
    )
    params = state.params
    params.stream.rows, params.prefill, params.frames = embeds.data_ptr(), 1, rows
    _launch(library, params, seed)
    text = torch.stack([torch.zeros_like(embeds[0]), *(model.prompt.row(i).bfloat16() for i in range(frames - 1))])
    layer_exchanges = ctypes.c_uint32.in_dll(library, "mktts_layer_exchanges").value
    params.tag += rows * talker.num_hidden_layers * layer_exchanges
    params.stream.rows, params.prefill, params.frames = text.data_ptr(), 0, frames
    params.stream.position = rows - 1
    point(params, {"debug_logits": logits, "debug_hidden": hidden})
    _launch(library, params, seed + 1)
    assert out[MADE] == frames
    codes, sizes = torch.stack([frame_of(out.numpy(), i, 0.0).codes for i in range(frames)]), vocabularies(model.config)
    heads = [[head[:size].float() for head, size in zip(frame, sizes, strict=True)] for frame in logits]
    return [Observed(codes[i], heads[i], hidden[i].float() if i else None) for i in range(frames)]


def _launch(library: ctypes.CDLL, params: Params, seed: int) -> None:
    """Fails with what the kernel's watchdog left, or where a loop that it does not reach did not end."""
    library.host_launch.restype = ctypes.c_char_p
    why = library.host_launch(ctypes.byref(params), ctypes.c_ulonglong(seed))
    error, block, thread, wait, _ = (ctypes.c_int * 5).from_address(params.status)
    named = f"block {block}, thread {thread} waited too long for {WAITS.get(wait, wait)}" if error else ""
    assert not (why or error), "; ".join(filter(None, (named, why and why.decode())))
