"""A decoder stack whose matrices are on the frame kernel's tape only: products over many rows take them from there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from mktts.errors import BackendUnavailable
from mktts.kernel.build import compile_kernel, target_of
from mktts.kernel.driver import PlainKernel
from mktts.kernel.params import point
from mktts.kernel.tape import Shape, unpack_layer
from mktts.model.qwen3 import LayerWeights, Stack

# Of csrc/unpack.cu: with 4 loads of 16 bytes a thread, 128 tapes have 8 MiB in flight, more than an H200 needs (3 MB)
# to keep its memory busy.
_THREADS, _SHARES = 512, 2


class UnpackParams(ctypes.Structure):
    """csrc/unpack.cu, struct Unpack."""

    _fields_ = [
        ("tape", ctypes.c_void_p),
        ("block_bytes", ctypes.c_ulonglong),
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")),
    ]


class TapeStack(Stack):
    """The stack whose tape, norms and head norms `mktts.kernel.weights.stack_weights` made, with room for one layer.

    `layer_weights` writes a layer's matrices into that room, in the work queued on the current CUDA stream (on the CPU
    at once), so that a CUDA graph holds it too. Writing the next layer ahead, on a second stream into a second room,
    was slower on an H200: 2.68 ms for ten rows of 28 layers instead of 2.56.
    One thread and one CUDA stream at a time. The room is 30 MiB at 0.6B and 96 MiB at 1.7B.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], kind: str = "talker") -> None:
        """`kind` leads the names in `weights`. Raises BackendUnavailable where csrc/unpack.cu cannot be used."""
        super().__init__(shape.talker, weights[f"{kind}_final"])
        self._shape, self._tape = shape, weights[f"{kind}_tape"]  # (blocks, layers, elements)
        self._kernel = _UnpackKernel(shape, self._tape) if self.device.type == "cuda" else None
        self._room = self._new_room()
        norms, heads = weights[f"{kind}_norms"], weights[f"{kind}_qk"]
        self._layers = [
            _layer(self._room, *norms[i], *heads[i], *self._sizes) for i in range(self.config.num_hidden_layers)
        ]

    def layer_weights(self, index: int) -> LayerWeights:
        """As `Stack.layer_weights`."""
        if self._kernel is not None:
            self._kernel.launch(index, self._room)
        else:
            for name, matrix in unpack_layer(self._shape, self.config, self._tape[:, index]).items():
                self._room[name].copy_(matrix)
        return self._layers[index]

    @property
    def room_bytes(self) -> int:
        """Device memory of the room for one layer."""
        return sum(matrix.nbytes for matrix in self._room.values())

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows of queries; of keys, or values; of gates, or ups."""
        c = self.config
        return c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size

    def _new_room(self) -> dict[str, Tensor]:
        h, (queries, keys, inner) = self.config.hidden_size, self._sizes
        shapes = {"qkv": (queries + 2 * keys, h), "o": (h, queries), "gate_up": (2 * inner, h), "down": (h, inner)}
        return {name: self._tape.new_empty(shape) for name, shape in shapes.items()}


class _UnpackKernel:
    """csrc/unpack.cu for one tape."""

    def __init__(self, shape: Shape, tape: Tensor) -> None:
        with torch.cuda.device(tape.device):
            build = compile_kernel(shape.defines, target_of(torch.cuda.get_device_capability()), "unpack.cu")
            self._kernel = PlainKernel(build.cubin, "mktts_unpack")
        sizes = build.constants["layer_bytes"], build.constants["params_bytes"]
        expected = tape.stride(1) * tape.itemsize, ctypes.sizeof(UnpackParams)
        if sizes != expected:
            raise BackendUnavailable(f"csrc/unpack.cu and mktts disagree about bytes: {sizes} and {expected}")
        self._tape = tape

    def launch(self, index: int, room: Mapping[str, Tensor]) -> None:
        """Queues the writing of layer `index` on torch's current stream."""
        parameters = UnpackParams(block_bytes=self._tape.stride(0) * self._tape.itemsize)
        named = {"out" if name == "o" else name: matrix for name, matrix in room.items()}
        point(parameters, {"tape": self._tape[0, index], **named})
        with torch.cuda.device(self._tape.device):
            self._kernel.launch_grid((len(self._tape), _SHARES), _THREADS, parameters)


def _layer(
    room: Mapping[str, Tensor],
    input_norm: Tensor,
    post_norm: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    queries: int,
    keys: int,
    inner: int,
) -> LayerWeights:
    q, k, v = room["qkv"].split((queries, keys, keys))
    gate, up = room["gate_up"].split(inner)
    return LayerWeights(
        input_norm=input_norm,
        q=q,
        k=k,
        v=v,
        o=room["o"],
        q_norm=q_norm,
        k_norm=k_norm,
        post_norm=post_norm,
        gate=gate,
        up=up,
        down=room["down"],
        qkv=room["qkv"],
        gate_up=room["gate_up"],
    )
