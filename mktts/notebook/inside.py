"""What `09_megakernel` shows: which rows a block has, and a trace's tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mktts.errors import OptionsError
from mktts.kernel.grid import Shape
from mktts.kernel.tape import pack, pack_layer, unpack
from mktts.measure.trace import BUILDS
from mktts.notebook import evidence

MATRICES = ("queries, keys, values", "output projection", "gate and up", "down projection")
LIVE_LAUNCHES = 5  # of each build, in a notebook


def rows_of_block(shape: Shape, block: int) -> list[dict[str, Any]]:
    """What a block multiplies in a layer of the talker, read off a tape of row and of column numbers.

    Raises OptionsError for a block that is not there.
    """
    if not 0 <= block < shape.blocks:
        raise OptionsError(f"BLOCK must be in 0..{shape.blocks - 1}, found {block}")
    t, heads = shape.talker, shape.talker.num_key_value_heads
    h, f, inner = t.hidden_size, t.intermediate_size, t.num_attention_heads * t.head_dim
    sizes = {"q": (inner, h), "k": (heads * t.head_dim, h), "v": (heads * t.head_dim, h), "o": (h, inner)}
    names = {f"self_attn.{name}_proj.weight": size for name, size in sizes.items()}
    names |= {"mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h), "mlp.down_proj.weight": (h, f)}
    blocks, group = shape.blocks, shape.group
    shares = [((inner + 2 * heads * t.head_dim) // blocks, h), (h // group, inner // heads)]
    shares += [(2 * f // blocks, h), (h // group, f // heads)]
    counts = [pack(torch.zeros(1, *share, dtype=torch.int8)).shape[1] for share in shares]

    def numbers(axis: int) -> list[np.ndarray]:
        """The block's shares of matrices that hold their own row (axis 0) or column (1) numbers."""
        filled = {name: _numbers(size, axis) for name, size in names.items()}
        if axis == 0:  # keys and values stand below the queries
            filled["self_attn.k_proj.weight"] += inner
            filled["self_attn.v_proj.weight"] += inner + heads * t.head_dim
        tape = pack_layer(shape, t, filled)[block : block + 1]
        return [unpack(part, *share)[0].numpy() for part, share in zip(tape.split(counts, 1), shares, strict=True)]

    of_rows, of_columns = numbers(0), numbers(1)
    return [
        {"matrix": name, "rows": len(rows), "of the matrix": ranges(rows[:, 0]), "inputs": ranges(columns[0])}
        for name, rows, columns in zip(MATRICES, of_rows, of_columns, strict=True)
    ]


def _numbers(size: tuple[int, int], axis: int) -> torch.Tensor:
    """A matrix that holds its own row or column numbers."""
    numbers = torch.arange(size[axis], dtype=torch.int32)
    return (numbers[:, None] if axis == 0 else numbers[None]).expand(size).contiguous()


def ranges(numbers: np.ndarray) -> str:
    """[4, 5, 6, 9] as "4–6, 9"; more than three ranges are counted."""
    found = np.split(numbers, np.flatnonzero(np.abs(np.diff(numbers)) != 1) + 1)
    if len(found) > 3:
        found_pairs = np.unique(numbers)
        return ranges(found_pairs) if len(found_pairs) < len(numbers) else f"{len(found)} ranges"
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


# ---- the trace


def trace_of(path: str, live: bool, why_not: str | None, run_dir: Path) -> dict[str, Any] | None:
    """The trace in `path`, or one recorded now where the kernel can run (`why_not` None) and `live`, or the committed
    one; None where none is committed. What is recorded goes to `run_dir`/trace.json."""
    if path:
        return evidence.document(path)
    if not live or why_not is not None:
        return evidence.stored("trace")
    from mktts.checkpoint import open_checkpoint
    from mktts.common import write_json
    from mktts.measure.trace import record

    found = record(open_checkpoint("random:0.6b"), launches=LIVE_LAUNCHES)
    write_json(run_dir / "trace.json", found)
    return found


def absent() -> str:
    """What to say where no trace is there."""
    return (
        f"outputs/reference/h200/trace.json is not committed yet; on a machine with a GPU: {evidence.COMMANDS['trace']}"
    )


def frames(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a build: microseconds of a frame, and what differs from the build before it."""
    words = {"without marks": "as it speaks", BUILDS[0]: "with marks", BUILDS[1]: "with marks, no weights copied"}
    return [{"build": words.get(build, build), "frame (µs)": us} for build, us in found["frame_us"].items()]


def frame_metrics(found: Mapping[str, Any] | None) -> dict[str, float]:
    """What a notebook records of a trace: microseconds of a frame as the kernel speaks, and of its chain alone."""
    if found is None:
        return {}
    return {"frame_us": found["frame_us"]["without marks"], "frame_alone_us": found["frame_us"][BUILDS[1]]}


def phases(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a phase: its times in a frame, of one beside the stream and alone, of all of them, waiting for weights."""
    rows = []
    for row, alone in zip(*(found["phases"][build] for build in BUILDS), strict=True):
        times = {"one (µs)": row["us"], "alone (µs)": alone["us"], "frame (µs)": row["frame_us"]}
        waits = {"alone, frame": alone["frame_us"], "weights": row["weights_us"]}
        rows.append({"stack": row["stack"], "phase": row["phase"], "n": row["count"], **times, **waits})
    return rows


def least_us(found: Mapping[str, Any], gb_s: float = evidence.H200_READ_GB_S) -> dict[str, float]:
    """Of each stack, the microseconds that its weights' bytes take at `gb_s`."""
    return {stack: size_bytes / gb_s / 1e3 for stack, size_bytes in found["settings"]["weight_bytes"].items()}
