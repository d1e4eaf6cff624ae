"""A few rows of a prompt through the frame kernel's tape as it is (csrc/rows.cu): nothing is unpacked for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mktts.errors import BackendUnavailable
from mktts.kernel.build import compile_kernel
from mktts.kernel.card import card_of
from mktts.kernel.driver import PlainKernel
from mktts.kernel.grid import Shape
from mktts.kernel.params import point

ROWS = 16  # that one pass takes; compared with the kernels' own, as is what follows
MOST_POSITIONS = 512  # that a row can attend to
KERNELS = tuple(f"mktts_rows_{phase}" for phase in ("qkv", "attend", "out", "gate_up", "down"))
_THREADS = 256
_TILE = 16  # rows of a matrix that a block multiplies at a time

Launch = Callable[[str, tuple[int, int], "RowsParams"], None]


class RowsParams(ctypes.Structure):
    """csrc/rows.cu, struct RowsParams."""

    _fields_ = [
        ("tape", ctypes.c_void_p),
        ("block_bytes", ctypes.c_ulonglong),
        *(
            (name, ctypes.c_void_p)
            for name in """input_norm post_norm q_norm k_norm rotary x heads attended active keys values past
            end""".split()
        ),
        ("positions", ctypes.c_ulonglong),
    ]


class TapeRows:
    """Passes of up to ROWS rows through all layers of a tape. One thread and one CUDA stream at a time."""

    def __init__(
        self, shape: Shape, weights: Mapping[str, Tensor], kind: str = "talker", launch: Launch | None = None
    ) -> None:
        """shape, weights, kind: as `TapeStack`'s. launch: a kernel by name, in place of CUDA's, for tests.

        Raises BackendUnavailable where csrc/rows.cu cannot be used.
        """
        c = shape.talker
        self._shape, self._tape = shape, weights[f"{kind}_tape"]  # (blocks, layers, elements)
        self._norms, self._heads = weights[f"{kind}_norms"], weights[f"{kind}_qk"]  # (layers, 2, H), (layers, 2, D)
        self._launch = launch or _launches(shape, self._tape)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        widths = {"heads": queries + 2 * keys, "attended": queries, "active": c.intermediate_size}
        self._work = {name: self._tape.new_empty(ROWS, width) for name, width in widths.items()}

    @property
    def nbytes(self) -> int:
        """Device memory of what lies between the kernels."""
        return sum(tensor.nbytes for tensor in self._work.values())

    def run(self, x: Tensor, past: Tensor, end: Tensor, kv: Tensor, rotary: Tensor) -> None:
        """x (ROWS, H), of positions past.. to end - 1 and padding behind, through all layers, in place: before the
        last norm. Queued on torch's current stream.

        past, end () int64. kv (2, layers, kv heads, positions, head_dim), contiguous: takes the rows' keys and values.
        rotary (positions, 2, head_dim): cosines, then sines, whose first half is negated. All but past and end in bf16.
        """
        block_bytes = self._tape.stride(0) * self._tape.itemsize
        p = RowsParams(block_bytes=block_bytes, positions=kv.shape[3])
        point(p, {"x": x, "rotary": rotary, "past": past, "end": end, **self._work})
        c, blocks = self._shape.talker, self._shape.blocks
        tiles = (self._shape.group, -(-c.hidden_size // (self._shape.group * _TILE)))
        for i in range(c.num_hidden_layers):
            norms, heads = self._norms[i], self._heads[i]
            named = {"input_norm": norms[0], "post_norm": norms[1], "q_norm": heads[0], "k_norm": heads[1]}
            point(p, {"tape": self._tape[0, i], "keys": kv[0, i], "values": kv[1, i], **named})
            self._launch("mktts_rows_qkv", (blocks, 1), p)
            self._launch("mktts_rows_attend", (c.num_attention_heads, ROWS), p)
            self._launch("mktts_rows_out", tiles, p)
            self._launch("mktts_rows_gate_up", (blocks, 1), p)
            self._launch("mktts_rows_down", tiles, p)


def _launches(shape: Shape, tape: Tensor) -> Launch:
    with torch.cuda.device(tape.device):
        build = compile_kernel(shape.defines, card_of(tape.device).arch, "rows.cu")
        kernels = {name: PlainKernel(build.image, name) for name in KERNELS}
    names = ("layer_bytes", "params_bytes", "rows", "most_keys")
    sizes = tuple(build.constants[name] for name in names)
    expected = (tape.stride(1) * tape.itemsize, ctypes.sizeof(RowsParams), ROWS, MOST_POSITIONS)
    if sizes != expected:
        raise BackendUnavailable(f"csrc/rows.cu and mktts disagree about {', '.join(names)}: {sizes} and {expected}")
    early = torch.cuda.get_device_capability(tape.device) >= (9, 0)

    def launch(name: str, grid: tuple[int, int], parameters: RowsParams) -> None:
        kernel = kernels[name]
        with torch.cuda.device(tape.device):
            (kernel.launch_early if early else kernel.launch_grid)(grid, _THREADS, parameters)

    return launch
