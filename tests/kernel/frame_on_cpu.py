"""csrc/frame.cu compiled for the CPU and launched there, lane by lane: host/ stands in for csrc/ptx.cuh."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import torch

from mktts.kernel.backend import MegakernelStream, new_state_tensors
from mktts.kernel.build import CSRC, source
from mktts.kernel.grid import Shape
from mktts.kernel.params import FRAME_WORDS, MADE, STATUS_WORDS, Params, point
from mktts.kernel.weights import model_weights
from mktts.measure.cards import FORCED_FRAMES, Model
from mktts.measure.parity.probe import Observed, vocabularies
from mktts.model.sampling import Sampling
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")
_TIMEOUT_NS = 10**13


def build(shape: Shape, folder: Path, most_rows: int) -> ctypes.CDLL:
    """Compiles into `folder`. most_rows: in the place of csrc's MOST_ROWS, so that small shares come in matrices."""
    shutil.copytree(CSRC, folder / "csrc")
    shutil.copy(HOST / "ptx.cuh", folder / "csrc")
    code = source(folder=folder / "csrc") + (HOST / "launch.h").read_text()
    for csrcs, ours in (
        (r"MOST_ROWS = 8 \* TILE_ROWS", f"MOST_ROWS = {most_rows}"),
        (r"extern __shared__ .* dynamic\[\];", "u8* dynamic = now->block->shared.data();"),
        (r'(#define EXPORT\(.*\) extern "C") __device__', r"\1"),
    ):
        code, count = re.subn(csrcs, ours, code)
        assert count == 1, csrcs
    (folder / "frame.cpp").write_text(code)
    flags = [f"-D{name}={value}" for name, value in {**shape.defines, "RING": 4}.items()]
    command = [COMPILER, "-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "-o", folder / "frame.so", folder / "frame.cpp"], check=True)
    return ctypes.CDLL(str(folder / "frame.so"))


def observed(model: Model, shape: Shape, folder: Path, most_rows: int, seed: int) -> list[Observed]:
    """The first frames, greedy, after the model's prompt, whose rows go through the kernel one by one."""
    frames = FORCED_FRAMES
    library = build(shape, folder, most_rows)
    talker, embeds = model.config.talker, model.prompt.embeds.bfloat16().contiguous()
    rows = len(embeds)
    words = torch.zeros(library.host_exchange_bytes() // 4 + 32, dtype=torch.int32)
    exchange = words[-words.data_ptr() % 128 // 4 :]
    out, status = torch.zeros(STATUS_WORDS + frames * FRAME_WORDS, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    own = new_state_tensors(shape, rows + frames, torch.bfloat16, torch.device("cpu"))
    sampling = Sampling().greedy()
    weights = model_weights(shape, lambda name: model.tensors[name].bfloat16(), _projected(model))
    fixed = Params()
    logits = torch.zeros(frames, NUM_CODEBOOKS, talker.vocab_size, dtype=torch.bfloat16)
    hidden = torch.zeros(frames, talker.num_hidden_layers, talker.hidden_size, dtype=torch.bfloat16)
    point(fixed, weights | {"exchange": exchange, "status": status})
    fixed.ends[:] = [model.config.codec_ids.eos, -1, -1, -1]
    fixed.min_frames, fixed.suppress_from = MIN_NEW_FRAMES, talker.vocab_size - SUPPRESSED_TAIL
    fixed.timeout_ns, fixed.tag = _TIMEOUT_NS, 1
    state = MegakernelStream(
        **own, out=out, sampling=sampling, seed=0, prompt_rows=rows, max_frames=frames, fixed=fixed
    )
    params = state.params
    params.stream.rows, params.prefill, params.frames = embeds.data_ptr(), 1, rows
    library.host_launch(ctypes.byref(params), ctypes.c_ulonglong(seed))
    text = torch.stack([torch.zeros_like(embeds[0]), *(model.prompt.row(i).bfloat16() for i in range(frames - 1))])
    layer_exchanges = ctypes.c_uint32.in_dll(library, "mktts_layer_exchanges").value
    params.tag += rows * talker.num_hidden_layers * layer_exchanges
    params.stream.rows, params.prefill, params.frames = text.data_ptr(), 0, frames
    params.stream.position = rows - 1
    point(params, {"debug_logits": logits, "debug_hidden": hidden})
    library.host_launch(ctypes.byref(params), ctypes.c_ulonglong(seed + 1))
    assert not status.any() and out[MADE] == frames
    codes, sizes = out[STATUS_WORDS:].view(frames, FRAME_WORDS)[:, :NUM_CODEBOOKS].long(), vocabularies(model.config)
    heads = [[head[:size].float() for head, size in zip(frame, sizes, strict=True)] for frame in logits]
    return [Observed(codes[i], heads[i], hidden[i].float() if i else None) for i in range(frames)]


def _projected(model: Model) -> bool:
    return "talker.code_predictor.small_to_mtp_projection.weight" in model.tensors
