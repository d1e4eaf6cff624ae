"""What the frame kernel's backend holds on a device, byte by byte, without one.

The functions that allocate are run on torch's meta device, where a tensor has a shape and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mktts.kernel.backend import new_state_tensors
from mktts.kernel.exchange import layout
from mktts.kernel.grid import Shape
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape_rows import TapeRows
from mktts.kernel.tape_stack import TapeStack
from mktts.kernel.trace import frame_points, room_of
from mktts.kernel.weights import model_weights

_META = torch.device("meta")
# Row of the account -> names of csrc/state.cuh: struct Params, then struct Exchange.
WEIGHTS = {
    "talker tape": ("talker_tape",),
    "predictor tape": ("predictor_tape",),
    "heads": ("talker_head_tape", "predictor_head_tape"),
    "code embeddings": ("embeddings0", "embeddings"),
    "projection into the predictor, embeddings projected": (
        *("projection_tape", "projection_bias"),
        *("inputs0", "inputs"),
    ),
    "norms": tuple(f"{stack}_{kind}" for stack in ("talker", "predictor") for kind in ("norms", "qk", "final")),
    "rotary tables": tuple(f"{stack}_{kind}" for stack in ("talker", "predictor") for kind in ("cos", "sin")),
}
MAILBOXES = {
    "mailboxes: sums over groups": ("h", "x", "counts"),
    "mailboxes: within a group": ("part", "qkv", "att", "act"),
    "mailboxes: logits, projected row, text, host's answer": ("logits", "projected", "offers", "sums", "go"),
}


def account(shape: Shape, shapes: Mapping[str, tuple[int, ...]], positions: int) -> dict[str, int]:
    """Row -> bytes. `shapes`: of the checkpoint's tensors by Hub name. `positions`: of a stream, prompt and frames."""

    def get(name: str) -> Tensor:
        return torch.empty(shapes[name], dtype=torch.bfloat16, device=_META)

    projected = "talker.code_predictor.small_to_mtp_projection.weight" in shapes
    weights = model_weights(shape, get, projected)
    found = {row: _bytes(weights.get(name) for name in names) for row, names in WEIGHTS.items()}
    if not projected:  # the predictor takes the talker's rows
        del found["projection into the predictor, embeddings projected"]
    stack = TapeStack(shape, weights)
    found["prefill: one layer unpacked"] = stack.room_bytes
    few = TapeRows(shape, weights, launch=lambda name, grid, parameters: None)
    found["prefill: keys, values, rotary tables, inputs"] = Prefill(stack, graphs=False, few=few).nbytes
    state = new_state_tensors(shape, positions, torch.bfloat16, _META)
    found[f"a stream: keys and values of {positions} positions"] = state["kv"].nbytes
    found["a stream: its newest state, codes seen"] = _bytes(t for name, t in state.items() if name != "kv")
    fields = layout(shape)
    found |= {row: sum(fields[name].itemsize for name in names) for row, names in MAILBOXES.items()}
    points = frame_points(shape.talker.num_hidden_layers, shape.predictor.num_hidden_layers)
    found["marks, only while a trace is recorded"] = 8 * shape.blocks * room_of(points)
    return found


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
