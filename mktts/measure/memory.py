"""Device memory of the frame kernel's backend, byte by byte, without a device: a table for csrc/README.md and notebook
09. The functions that allocate are run on torch's meta device, where a tensor has a shape and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.tensors import expected_tensors
from mktts.kernel.backend import new_state_tensors
from mktts.kernel.grid import Shape, choose_shape, power_of_two
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape import model_weights
from mktts.kernel.tape_stack import TapeRows, TapeStack
from mktts.kernel.trace import frame_points, room_of
from mktts.measure.inspection import config_at

MULTIPROCESSORS = 132  # of an H100 or H200
POSITIONS = 260  # of a stream: about 20 s
SIZES = ("small", "0.6B", "1.7B")
_META = torch.device("meta")
# Row of the account -> names of csrc/state.cuh, struct Params.
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
# Of csrc/config.cuh and exchange.cuh.
_POSITIONS, _SUMS, _COPIES, _LINE_ROWS, _LINE_STEP = 2, 3, 4, 16, 4


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
    found["mailboxes between blocks"] = mailbox_bytes(shape)
    points = frame_points(shape.talker.num_hidden_layers, shape.predictor.num_hidden_layers)
    found["marks, only while a trace is recorded"] = 8 * shape.blocks * room_of(points)
    return found


def mailbox_bytes(shape: Shape) -> int:
    """Of state.cuh, struct Exchange: every word of device memory that blocks meet at, rounded up to 8 bytes."""
    t, p, group = shape.talker, shape.predictor, shape.group
    heads, widest = t.num_key_value_heads, max(t.hidden_size, p.hidden_size)
    places = -(-widest // _LINE_ROWS) * _LINE_ROWS * _LINE_STEP
    queries = t.num_attention_heads // heads
    share = power_of_two(-(-queries * t.head_dim // group))
    parts = heads * (queries * t.head_dim // share) * group * (share + 2)
    long_words = 2 * _SUMS * (_COPIES * places + widest) + parts + 8 * shape.blocks  # sums, parts, a text's offers
    words = 4 + heads * t.head_dim * (_POSITIONS * (queries + 2) + queries)  # counts, queries, keys, values, outputs
    words += _POSITIONS * max(t.intermediate_size, p.intermediate_size) + max(t.vocab_size, p.vocab_size)
    words += p.hidden_size + 1  # the projected row, the host's answer
    return 8 * long_words + -(-4 * words // 8) * 8


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def device_memory(positions: int = POSITIONS, multiprocessors: int = MULTIPROCESSORS) -> dict[str, dict[str, int]]:
    """Size -> row -> bytes. Raises BackendUnavailable where the kernel does not fit that many multiprocessors."""
    found = {}
    for size in SIZES:
        config = open_checkpoint(size).config if size == "small" else config_at(size.lower())
        shapes = {name: spec.shape for name, spec in expected_tensors(config).items()}
        found[size] = account(choose_shape(config, multiprocessors), shapes, positions)
    return found


def rows(found: dict[str, dict[str, int]]) -> list[dict[str, str]]:
    """As people read it; the last row is the sum of what every process holds: no stream, no marks."""
    names = list(dict.fromkeys(name for held in found.values() for name in held))
    names.sort(key=lambda name: max(held.get(name, 0) for held in found.values()), reverse=True)
    table = [
        {"what": name, **{size: binary(held[name]) if name in held else "–" for size, held in found.items()}}
        for name in names
    ]
    always = {
        size: sum(held[name] for name in held if not name.startswith(("a stream", "marks")))
        for size, held in found.items()
    }
    return [*table, {"what": "without streams and marks", **{size: binary(n) for size, n in always.items()}}]


def binary(size_bytes: int) -> str:
    """12_345 as "12.1 KiB"."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / (1 << 10):,.1f} KiB"
    return f"{size_bytes / (1 << 20):,.1f} MiB"
