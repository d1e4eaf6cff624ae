"""A checkpoint's weights as the frame kernel takes them: tapes, norms, rotary tables, embedding rows; all bf16.

Each block has a tape: its rows of every matrix, layer after layer, cut into fragments of 512 bytes. A fragment is the
A operand of one warp's `mma.m16n8k16` (PTX ISA): 16 rows by 16 columns, where the 16 rows are two output rows, each
cut into eight parts along k. Within 16 columns the order is permuted so that a lane's four values are neighbours."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.kernel.grid import FRAGMENTS, TILE_ROWS, WARP_ROWS, WARPS, Dealt, Shape, layer_matrices
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.model.qwen3 import LayerWeights, inverse_frequency
from mktts.spec import NUM_CODEBOOKS, StackConfig


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


def pack_layer(shape: Shape, stack: StackConfig, w: LayerWeights) -> Tensor:
    """The matrices of one decoder layer: (blocks, elements) bf16."""
    heads, h = stack.num_key_value_heads, stack.hidden_size
    q, k, v, gate, up = (matrix.view(heads, -1, h) for matrix in (w.q, w.k, w.v, w.gate, w.up))
    rows = {
        "qkv": torch.cat((q, k, v), 1),
        "out": w.o.view(h, heads, -1).transpose(0, 1),  # a group takes its own inputs, and all rows
        "gate_up": torch.stack((gate, up), 2).flatten(1, 2),
        "down": w.down.view(h, heads, -1).transpose(0, 1),
    }
    matrices = layer_matrices(stack, shape.group)
    return torch.cat([pack_dealt(dealt, rows[name]) for name, dealt in matrices.items()], 1)


def pack_rows(shape: Shape, weight: Tensor) -> Tensor:
    """A head: rows dealt out to the blocks in order, each block's padded to whole tiles."""
    return _pack_in_order(weight, shape.blocks, -(-len(weight) // (shape.blocks * TILE_ROWS)) * TILE_ROWS)


def pack_wide_head(shape: Shape, weight: Tensor) -> Tensor:
    """A text model's head in the chunks of csrc/text.cu: each block's rows, a lane for each row of a chunk."""
    each = -(-len(weight) // shape.blocks)
    chunks = -(-each // (WARP_ROWS * WARPS))
    return _pack_in_order(weight, shape.blocks * chunks, -(-each // (chunks * TILE_ROWS)) * TILE_ROWS)


def _pack_in_order(weight: Tensor, parts: int, rows: int) -> Tensor:
    """`weight` (R, k) in `parts` of `rows` each, zeros behind it: (parts, elements)."""
    padded = weight.new_zeros(parts * rows, weight.shape[1])
    padded[: len(weight)] = weight
    return pack(padded.view(parts, rows, -1))


Get = Callable[[str], Tensor]  # Hub name -> bf16 tensor on the kernel's device


def model_weights(shape: Shape, get: Get) -> dict[str, Tensor]:
    """Talker and code predictor by the names in csrc/state.cuh, struct Params."""
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
    """One Qwen3 stack, its names led by `kind`."""
    tape, norms, heads = None, [], []
    for index in range(stack.num_hidden_layers):  # one layer at a time: the matrices are needed only here
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
