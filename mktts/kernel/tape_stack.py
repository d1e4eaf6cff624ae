"""A decoder stack on the frame kernel's tape: a few prompt rows go through the tape as it is (csrc/rows.cu), for more
rows a layer at a time is unpacked into matrices (csrc/unpack.cu)."""

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mktts.kernel.build import card_of, compile_kernel
from mktts.kernel.grid import Shape
from mktts.kernel.launch import Kernel, fill_pointers
from mktts.model.qwen3 import LayerWeights, Stack

ROWS = 16  # that one pass takes; the kernels have the same, as of what follows (tests/kernel/test_build.py)
MOST_POSITIONS = 512  # that a row can attend to
KERNELS = tuple(f"mktts_rows_{phase}" for phase in ("qkv", "attend", "out", "gate_up", "down"))
_ROWS_THREADS = 256
_TILE = 16  # rows of a matrix that a block multiplies at a time
# Of csrc/unpack.cu: with 4 loads of 16 bytes a thread, 128 tapes have 8 MiB in flight, more than an H200 needs (3 MB)
# to keep its memory busy.
_UNPACK_THREADS, _SHARES = 512, 2

_ROWS_POINTERS = "input_norm post_norm q_norm k_norm rotary x heads attended active keys values past end".split()
Launch = Callable[[str, tuple[int, int], ctypes.Structure], None]  # of a kernel by name, with grid and parameters


class RowsParams(ctypes.Structure):
    """csrc/rows.cu, struct RowsParams."""

    _fields_ = (
        [("tape", ctypes.c_void_p), ("block_bytes", ctypes.c_ulonglong)]
        + [(name, ctypes.c_void_p) for name in _ROWS_POINTERS]
        + [("positions", ctypes.c_ulonglong)]
    )


class UnpackParams(ctypes.Structure):
    """csrc/unpack.cu, struct Unpack, whose `out` is `o` here as in LayerWeights."""

    _fields_ = [("tape", ctypes.c_void_p), ("block_bytes", ctypes.c_ulonglong)] + [
        (name, ctypes.c_void_p) for name in ("qkv", "o", "gate_up", "down")
    ]


class TapeStack(Stack):
    """The talker whose tape, norms and head norms `mktts.kernel.tape.stack_weights` made, with room for one layer (30
    MiB at 0.6B, 96 MiB at 1.7B): `layer_weights` writes its matrices there, in the work queued on the current CUDA
    stream, so that a CUDA graph holds it too. Writing the next layer ahead, into a second room, was slower on an H200.
    One thread and one CUDA stream at a time."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], launch: Launch | None = None) -> None:
        """launch: in place of CUDA's, for tests. Raises BackendUnavailable where csrc's kernels cannot be used."""
        super().__init__(shape.talker, weights["talker_final"])
        self._shape, self._tape = shape, weights["talker_tape"]  # (blocks, layers, elements)
        self._launch = launch or _launches(shape, self._tape.device)
        c = self.config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        h, inner = c.hidden_size, c.intermediate_size
        widths = {"heads": queries + 2 * keys, "attended": queries, "active": inner}
        self._work = {name: self._tape.new_empty(ROWS, width) for name, width in widths.items()}
        shapes = {"qkv": (queries + 2 * keys, h), "o": (h, queries), "gate_up": (2 * inner, h), "down": (h, inner)}
        self._room = {name: self._tape.new_empty(size) for name, size in shapes.items()}
        q, k, v = self._room["qkv"].split((queries, keys, keys))
        gate, up = self._room["gate_up"].split(inner)
        matrices = {"q": q, "k": k, "v": v, "gate": gate, "up": up, **self._room}
        self._layers = [
            LayerWeights(input_norm=norms[0], post_norm=norms[1], q_norm=heads[0], k_norm=heads[1], **matrices)
            for norms, heads in zip(weights["talker_norms"], weights["talker_qk"], strict=True)
        ]

    def layer_weights(self, index: int) -> LayerWeights:
        parameters = UnpackParams(block_bytes=self._tape.stride(0) * self._tape.itemsize)
        fill_pointers(parameters, {"tape": self._tape[0, index], **self._room})
        self._launch("mktts_unpack", (len(self._tape), _SHARES), parameters)
        return self._layers[index]

    def run_few(self, x: Tensor, past: Tensor, end: Tensor, kv: Tensor, rotary: Tensor) -> None:
        """x (ROWS, H), of positions past.. to end - 1 and padding behind, through all layers, in place: before the last
        norm, without unpacking. Queued on torch's current stream. past, end () int64. kv (2, layers, kv heads,
        positions, head_dim), contiguous: takes the rows' keys and values. rotary (positions, 2, head_dim): cosines,
        then sines, whose first half is negated. All but past and end in bf16."""
        p = RowsParams(block_bytes=self._tape.stride(0) * self._tape.itemsize, positions=kv.shape[3])
        fill_pointers(p, {"x": x, "rotary": rotary, "past": past, "end": end, **self._work})
        c, blocks = self.config, self._shape.blocks
        tiles = (self._shape.group, -(-c.hidden_size // (self._shape.group * _TILE)))
        for i, w in enumerate(self._layers):
            fill_pointers(p, {name: getattr(w, name) for name in ("input_norm", "post_norm", "q_norm", "k_norm")})
            fill_pointers(p, {"tape": self._tape[0, i], "keys": kv[0, i], "values": kv[1, i]})
            self._launch("mktts_rows_qkv", (blocks, 1), p)
            self._launch("mktts_rows_attend", (c.num_attention_heads, ROWS), p)
            self._launch("mktts_rows_out", tiles, p)
            self._launch("mktts_rows_gate_up", (blocks, 1), p)
            self._launch("mktts_rows_down", tiles, p)


def _launches(shape: Shape, device: torch.device) -> Launch:
    """Compiles csrc/rows.cu and csrc/unpack.cu for one shape and returns what launches their kernels. Raises
    BackendUnavailable."""
    early, kernels = torch.cuda.get_device_capability(device) >= (9, 0), {}
    units = {"unpack.cu": (["mktts_unpack"], _UNPACK_THREADS, False), "rows.cu": (KERNELS, _ROWS_THREADS, early)}
    with torch.cuda.device(device):
        for unit, (names, *how) in units.items():
            image = compile_kernel(shape.defines, card_of(device).arch, unit).image
            kernels |= {name: (Kernel(image, name), *how) for name in names}

    def launch(name: str, grid: tuple[int, int], parameters: ctypes.Structure) -> None:
        kernel, threads, early = kernels[name]
        with torch.cuda.device(device):
            kernel.launch_grid(grid, threads, parameters, early)

    return launch
