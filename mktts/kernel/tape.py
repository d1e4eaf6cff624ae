"""Weights in the order in which the frame kernel reads them (csrc/README.md).

Each block has a tape: its rows of every matrix, layer after layer, cut into fragments of 512 bytes. A fragment is the
A operand of one warp's `mma.m16n8k16` (PTX ISA): 16 rows by 16 columns, where the 16 rows are two output rows, each
cut into eight parts along k. Within 16 columns the order is permuted so that a lane's four values are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mktts.kernel.grid import FRAGMENTS, TILE_ROWS, WARP_ROWS, WARPS, Dealt, Shape, layer_matrices
from mktts.spec import StackConfig


def pack(rows: Tensor) -> Tensor:
    """(blocks, R, k) bf16 -> (blocks, elements): fragments in the order of use, R and k padded with zeros."""
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
    """(groups, total, inputs) bf16 -> (blocks, elements): each block's rows, in one matrix or one after another."""
    groups, _, inputs = rows.shape
    shared = rows.new_zeros(groups, dealt.group * dealt.each, inputs)
    shared[:, : dealt.total] = rows
    padded = rows.new_zeros(groups * dealt.group, dealt.count * dealt.chunk, inputs)
    padded[:, : dealt.each] = shared.view(-1, dealt.each, inputs)
    return pack(padded.view(-1, dealt.chunk, inputs)).view(len(padded), -1)


def unpack_dealt(dealt: Dealt, tape: Tensor) -> Tensor:
    """The inverse of `pack_dealt`: (blocks, elements) -> (groups, total, inputs)."""
    chunks = unpack(tape.reshape(len(tape) * dealt.count, -1), dealt.chunk, dealt.inputs)
    each = chunks.reshape(len(tape), -1, dealt.inputs)[:, : dealt.each]
    return each.reshape(len(tape) // dealt.group, -1, dealt.inputs)[:, : dealt.total]


def pack_layer(shape: Shape, stack: StackConfig, get: Mapping[str, Tensor]) -> Tensor:
    """One decoder layer, by names without their prefix: (blocks, elements) bf16."""
    heads, h = stack.num_key_value_heads, stack.hidden_size
    q, k, v = (get[f"self_attn.{name}_proj.weight"].view(heads, -1, h) for name in "qkv")
    gate, up = (get[f"mlp.{name}_proj.weight"].view(heads, -1, h) for name in ("gate", "up"))
    o, down = (get[f"{name}_proj.weight"] for name in ("self_attn.o", "mlp.down"))
    rows = {
        "qkv": torch.cat((q, k, v), 1),
        "out": o.view(h, heads, -1).transpose(0, 1),  # a group takes its own inputs, and all rows
        "gate_up": torch.stack((gate, up), 2).flatten(1, 2),
        "down": down.view(h, heads, -1).transpose(0, 1),
    }
    matrices = layer_matrices(stack, shape.group)
    return torch.cat([pack_dealt(dealt, rows[name]) for name, dealt in matrices.items()], 1)


def unpack_layer(shape: Shape, stack: StackConfig, tape: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack_layer`, as the matrices that `LayerWeights.fused` makes: qkv, o, gate_up, down.

    What csrc/unpack.cu does on a GPU.
    """
    h, f, d = stack.hidden_size, stack.intermediate_size, stack.head_dim
    matrices = layer_matrices(stack, shape.group)
    parts = tape.split([dealt.elements for dealt in matrices.values()], 1)
    rows = {name: unpack_dealt(dealt, part) for (name, dealt), part in zip(matrices.items(), parts, strict=True)}
    heads = rows["qkv"].split((matrices["out"].inputs, d, d), 1)
    return {
        "qkv": torch.cat([part.flatten(0, 1) for part in heads]),
        "o": rows["out"].transpose(0, 1).reshape(h, -1),
        "gate_up": rows["gate_up"].reshape(f, 2, h).transpose(0, 1).reshape(2 * f, h),
        "down": rows["down"].transpose(0, 1).reshape(h, -1),
    }


def pack_rows(shape: Shape, weight: Tensor) -> Tensor:
    """A head: rows dealt out to the blocks in order, each block's padded to whole tiles."""
    each = -(-weight.shape[0] // (shape.blocks * TILE_ROWS)) * TILE_ROWS
    padded = weight.new_zeros(shape.blocks * each, weight.shape[1])
    padded[: weight.shape[0]] = weight
    return pack(padded.view(shape.blocks, each, -1))


def pack_wide_head(shape: Shape, weight: Tensor) -> Tensor:
    """A text model's head in the chunks of csrc/text.cu: each block's rows, a lane for each row of a chunk."""
    each = -(-weight.shape[0] // shape.blocks)
    chunks = -(-each // (WARP_ROWS * WARPS))
    rows = -(-each // (chunks * TILE_ROWS)) * TILE_ROWS
    padded = weight.new_zeros(shape.blocks * chunks * rows, weight.shape[1])
    padded[: weight.shape[0]] = weight
    return pack(padded.view(shape.blocks * chunks, rows, -1))


def pack_projection(shape: Shape, weight: Tensor) -> Tensor:
    """(P_H, T_H) dealt out to the blocks in order."""
    each = -(-weight.shape[0] // shape.blocks)
    padded = weight.new_zeros(shape.blocks * each, weight.shape[1])
    padded[: weight.shape[0]] = weight
    return pack(padded.view(shape.blocks, each, -1))
