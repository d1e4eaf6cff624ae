"""A checkpoint's weights in the layout of the frame kernel: tapes, norms, rotary tables, embedding rows; all bf16. Also
a decoder stack on a tape: a few prompt rows are computed from the tape directly (csrc/rows.cu); for more rows, one
layer at a time is unpacked into matrices (csrc/unpack.cu).

Each block has a tape: its rows of every matrix, layer after layer, split into fragments of 512 bytes. A fragment is the
A operand of one warp's `mma.m16n8k16` (PTX ISA): 16 rows by 16 columns, where the 16 rows are two output rows, each
split into eight parts along k. Within 16 columns the order is permuted so that a lane's four values are adjacent."""

import ctypes
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.kernel.build import card_of, compile_kernel
from mktts.kernel.grid import FRAGMENTS, TILE_ROWS, WARP_ROWS, WARPS, Dealt, Shape, layer_matrices
from mktts.kernel.launch import Kernel, fill_pointers
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.model.qwen3 import LayerWeights, Stack, inverse_frequency
from mktts.spec import NUM_CODEBOOKS, StackConfig


def pack(rows: Tensor) -> Tensor:
    """(blocks, R, k) bf16 -> (blocks, elements): fragments in the order of their use, R and k padded with zeros."""
    blocks, count, k = rows.shape
    tiles, steps = -(-count // TILE_ROWS), -(-k // 128)
    padded = rows.new_zeros(blocks, TILE_ROWS * tiles, 128 * steps)
    padded[:, :count, :k] = rows
    # block, warp, tile, row, part, step, lane in part, half, value
    parts = padded.view(blocks, WARPS, tiles, 2, 8, steps, 4, 2, 2)
    fragments = parts.permute(0, 1, 5, 2, 4, 6, 7, 3, 8).reshape(blocks, WARPS, steps * tiles, 256)
    return torch.cat([stage.reshape(blocks, -1) for stage in fragments.split(FRAGMENTS, 2)], 1)


def unpack(tape: Tensor, rows: int, k: int) -> Tensor:
    """The inverse of `pack`: (blocks, elements) -> (blocks, rows, k)."""
    blocks, tiles, steps = len(tape), -(-rows // TILE_ROWS), -(-k // 128)
    stages = tape.split(WARPS * FRAGMENTS * 256, 1)
    fragments = torch.cat([stage.reshape(blocks, WARPS, -1, 256) for stage in stages], 2)
    # block, warp, step, tile, part, lane in part, half, row, value
    parts = fragments.view(blocks, WARPS, steps, tiles, 8, 4, 2, 2, 2)
    padded = parts.permute(0, 1, 3, 7, 4, 2, 5, 6, 8).reshape(blocks, TILE_ROWS * tiles, 128 * steps)
    return padded[:, :rows, :k]


def pack_dealt(dealt: Dealt, rows: Tensor) -> Tensor:
    """(groups, total, inputs) bf16 -> (blocks, elements): each block's rows, as one or several consecutive matrices."""
    groups, _, inputs = rows.shape
    shared = rows.new_zeros(groups, dealt.group * dealt.each, inputs)
    shared[:, : dealt.total] = rows
    padded = rows.new_zeros(groups * dealt.group, dealt.count * dealt.chunk, inputs)
    padded[:, : dealt.each] = shared.view(-1, dealt.each, inputs)
    return pack(padded.view(-1, dealt.chunk, inputs)).view(len(padded), -1)


def pack_layer(shape: Shape, stack: StackConfig, w: LayerWeights) -> Tensor:
    """Packs the matrices of one decoder layer: (blocks, elements) bf16."""
    heads, h = stack.num_key_value_heads, stack.hidden_size
    q, k, v, gate, up = (matrix.view(heads, -1, h) for matrix in (w.q, w.k, w.v, w.gate, w.up))
    rows = {
        "qkv": torch.cat((q, k, v), 1),
        "out": w.o.view(h, heads, -1).transpose(0, 1),  # a group has its own inputs (columns) and all rows
        "gate_up": torch.stack((gate, up), 2).flatten(1, 2),
        "down": w.down.view(h, heads, -1).transpose(0, 1),
    }
    matrices = layer_matrices(stack, shape.group)
    return torch.cat([pack_dealt(dealt, rows[name]) for name, dealt in matrices.items()], 1)


def pack_rows(shape: Shape, weight: Tensor) -> Tensor:
    """Packs a head: consecutive rows for each block, padded to whole tiles."""
    return _pack_in_order(weight, shape.blocks, -(-len(weight) // (shape.blocks * TILE_ROWS)) * TILE_ROWS)


def pack_wide_head(shape: Shape, weight: Tensor) -> Tensor:
    """Packs a text model's head in the chunks of csrc/text.cu, with at most one row of a chunk for each lane."""
    each = -(-len(weight) // shape.blocks)
    chunks = -(-each // (WARP_ROWS * WARPS))
    return _pack_in_order(weight, shape.blocks * chunks, -(-each // (chunks * TILE_ROWS)) * TILE_ROWS)


def _pack_in_order(weight: Tensor, parts: int, rows: int) -> Tensor:
    """Packs `weight` (R, k), padded with zeros, as `parts` matrices of `rows` rows each: (parts, elements)."""
    padded = weight.new_zeros(parts * rows, weight.shape[1])
    padded[: len(weight)] = weight
    return pack(padded.view(parts, rows, -1))


Get = Callable[[str], Tensor]  # Hub name -> bf16 tensor on the kernel's device


def model_weights(shape: Shape, get: Get) -> dict[str, Tensor]:
    """The weights of talker and code predictor, by the names of csrc/state.cuh, struct Params."""
    code_predictor = "talker.code_predictor."
    weights = {"talker_head_tape": pack_rows(shape, get("talker.codec_head.weight"))}
    heads = [pack_rows(shape, get(f"{code_predictor}lm_head.{g}.weight")) for g in range(NUM_CODEBOOKS - 1)]
    weights["predictor_head_tape"] = torch.stack(heads)
    first, *others = map(get, CODE_EMBEDDINGS)
    embeddings = torch.stack(others)
    weights |= {"embeddings0": first, "embeddings": embeddings, "inputs0": first, "inputs": embeddings}
    if shape.talker.hidden_size != shape.predictor.hidden_size:
        name = f"{code_predictor}small_to_mtp_projection."
        matrix, bias = get(name + "weight"), get(name + "bias")
        tape = _pack_in_order(matrix, shape.blocks, -(-len(matrix) // shape.blocks))
        weights |= {"projection_tape": tape, "projection_bias": bias}
        weights |= {"inputs0": F.linear(first, matrix, bias), "inputs": F.linear(embeddings, matrix, bias)}
    weights |= stack_weights(shape, "talker", shape.talker, get, "talker.model.")
    return weights | stack_weights(shape, "predictor", shape.predictor, get, f"{code_predictor}model.")


def stack_weights(shape: Shape, kind: str, stack: StackConfig, get: Get, prefix: str) -> dict[str, Tensor]:
    """The weights of one Qwen3 stack. kind: prefix of their names, "talker" or "predictor"."""
    tape, norms, heads = None, [], []
    for index in range(stack.num_hidden_layers):  # one layer at a time, as the matrices are needed only here
        layer = LayerWeights.read(lambda name: get(prefix + name), index)
        packed = pack_layer(shape, stack, layer)
        if tape is None:
            tape = packed.new_empty(len(packed), stack.num_hidden_layers, packed.shape[1])
        tape[:, index] = packed
        norms.append(torch.stack([layer.input_norm, layer.post_norm]))
        heads.append(torch.stack([layer.q_norm, layer.k_norm]))
    final = get(f"{prefix}norm.weight")
    positions = NUM_CODEBOOKS if kind == "predictor" else stack.max_position_embeddings
    frequency = inverse_frequency(stack.head_dim, stack.rope_theta).to(final.device)
    angle = torch.outer(torch.arange(positions, device=final.device).float(), frequency)
    return {
        f"{kind}_tape": tape,
        f"{kind}_norms": torch.stack(norms),
        f"{kind}_qk": torch.stack(heads),
        f"{kind}_final": final,
        f"{kind}_cos": angle.cos().to(final.dtype),
        f"{kind}_sin": angle.sin().to(final.dtype),
    }


ROWS = 16  # rows of one pass; this and the next are also constants in csrc/rows.cu (tests/kernel/test_build.py)
MOST_POSITIONS = 512  # that a row can attend to
KERNELS = tuple(f"mktts_rows_{phase}" for phase in ("qkv", "attend", "out", "gate_up", "down"))
_ROWS_THREADS = 256
_TILE = 16  # rows of a matrix that a block multiplies at a time
# For csrc/unpack.cu: with 4 loads of 16 bytes a thread, 128 tapes have 8 MiB in flight; an H200 needs 3 MB to saturate
# its memory.
_UNPACK_THREADS, _SHARES = 512, 2

_ROWS_POINTERS = "input_norm post_norm q_norm k_norm rotary x heads attended active keys values past end".split()
Launch = Callable[[str, tuple[int, int], ctypes.Structure], None]  # launches a kernel: name, grid, parameters


class RowsParams(ctypes.Structure):
    """csrc/rows.cu, struct RowsParams."""

    _fields_ = (
        [("tape", ctypes.c_void_p), ("block_bytes", ctypes.c_ulonglong)]
        + [(name, ctypes.c_void_p) for name in _ROWS_POINTERS]
        + [("positions", ctypes.c_ulonglong)]
    )


class UnpackParams(ctypes.Structure):
    """csrc/unpack.cu, struct Unpack; its `out` is called `o` here, as in LayerWeights."""

    _fields_ = [("tape", ctypes.c_void_p), ("block_bytes", ctypes.c_ulonglong)] + [
        (name, ctypes.c_void_p) for name in ("qkv", "o", "gate_up", "down")
    ]


class TapeStack(Stack):
    """The talker on the tape, norms and head norms from `stack_weights`, with a buffer for one layer (30 MiB at 0.6B,
    96 MiB at 1.7B): `layer_weights` unpacks a layer into it on the current CUDA stream, so that a CUDA graph can record
    this. Unpacking the next layer ahead into a second buffer was slower on an H200. One thread and one CUDA stream at a
    time."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], launch: Launch | None = None) -> None:
        """launch: replaces CUDA launches in tests. Raises BackendUnavailable if csrc's kernels cannot be used."""
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
        """Runs x (ROWS, H), rows of positions past to end - 1 followed by padding, through all layers in place, up to
        the final norm, without unpacking; queued on torch's current stream. past, end: () int64. kv: (2, layers, kv
        heads, positions, head_dim), contiguous; receives the rows' keys and values. rotary: (positions, 2, head_dim),
        cosines, then sines, whose first half is negated. All in bf16 but past and end."""
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
    """Loads the kernels of csrc/rows.cu and csrc/unpack.cu; returns their launcher. Raises BackendUnavailable."""
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
