"""Weights in the order in which the frame kernel reads them (csrc/README.md).

Each block has a tape: its rows of every matrix, layer after layer, cut into fragments of 512 bytes. A fragment is the
A operand of one warp's `mma.m16n8k16` (PTX ISA): 16 rows by 16 columns, where the 16 rows are two output rows, each
cut into eight parts along k. Within 16 columns the order is permuted so that a lane's four values are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mktts.errors import BackendUnavailable
from mktts.spec import ModelConfig, StackConfig

# Compared with the kernel's own when it is loaded (mktts.kernel.launch.check_constants).
WARPS = 8  # of a block, that multiply
FRAGMENTS = 4  # a warp takes from one ring stage
EPS = 1e-6  # of every RMSNorm
_WARP_ROWS = 32  # of one matrix: a lane for each


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    talker: StackConfig
    predictor: StackConfig
    blocks: int

    @property
    def group(self) -> int:
        """Blocks that share one key-value head."""
        return self.blocks // self.talker.num_key_value_heads

    def cache(self, positions: int) -> tuple[int, ...]:
        """Dimensions of the talker's keys and values: (layers, kv heads, group, slots, 2, head_dim)."""
        t, slots = self.talker, -(-positions // self.group) + 1
        return t.num_hidden_layers, t.num_key_value_heads, self.group, slots, 2, t.head_dim

    @property
    def defines(self) -> dict[str, int]:
        t, p = self.talker, self.predictor
        sizes = {"T": t, "P": p}
        defines = {"NQ": t.num_attention_heads, "NKV": t.num_key_value_heads, "HD": t.head_dim, "CTAS": self.blocks}
        for name, stack in sizes.items():
            defines |= {
                f"{name}_H": stack.hidden_size,
                f"{name}_F": stack.intermediate_size,
                f"{name}_L": stack.num_hidden_layers,
                f"{name}_VOCAB": stack.vocab_size,
            }
        return defines


def choose_shape(config: ModelConfig, multiprocessors: int) -> Shape:
    """The widest grid that the checkpoint's dimensions divide over and the GPU holds. Raises BackendUnavailable."""
    t, p = config.talker, config.predictor
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(t, name) != getattr(p, name):
            raise BackendUnavailable(f"the megakernel needs talker and predictor with the same {name}")
    return _widest(t, p, multiprocessors, head_rows=max(t.vocab_size, p.vocab_size))


def choose_text_shape(stack: StackConfig, multiprocessors: int) -> Shape:
    """As `choose_shape`, for a text model, which has no predictor: its place takes the least that compiles."""
    return _widest(stack, replace(stack, num_hidden_layers=1, vocab_size=16), multiprocessors, head_rows=0)


def _widest(t: StackConfig, p: StackConfig, multiprocessors: int, head_rows: int) -> Shape:
    if (t.rms_norm_eps, p.rms_norm_eps) != (EPS, EPS):
        raise BackendUnavailable(f"the megakernel is built for rms_norm_eps {EPS}")
    for blocks in (128, 64, 32, 16, 8):
        fits = head_rows <= _WARP_ROWS * WARPS * blocks and all(_divides(stack, blocks) for stack in (t, p))
        if blocks <= multiprocessors and fits:
            return Shape(t, p, blocks)
    raise BackendUnavailable(
        f"the megakernel's grid does not fit hidden sizes {t.hidden_size} and {p.hidden_size}, feed-forward "
        f"{t.intermediate_size} and {p.intermediate_size} on {multiprocessors} multiprocessors: pass backend='torch'"
    )


def _divides(stack: StackConfig, blocks: int) -> bool:
    heads, each = stack.num_key_value_heads, stack.num_attention_heads // stack.num_key_value_heads
    if blocks % heads or stack.hidden_size % blocks or stack.intermediate_size % blocks:
        return False
    group, owned = blocks // heads, stack.hidden_size // blocks
    shared = ((each + 2) * stack.head_dim, each * stack.head_dim)  # rows and outputs that a group deals out
    if group > 32 or any(n % group for n in shared) or shared[1] // group > 32 or owned % 4 or 32 % owned:
        return False
    most = max(shared[0] / group, 2 * stack.intermediate_size / blocks, owned * heads)
    return most <= _WARP_ROWS * WARPS


def pack(rows: Tensor) -> Tensor:
    """(blocks, R, k) bf16 -> (blocks, elements): fragments in the order of use, R and k padded with zeros."""
    blocks, count, k = rows.shape
    tiles, steps = -(-count // (2 * WARPS)), -(-k // 128)
    padded = rows.new_zeros(blocks, 2 * WARPS * tiles, 128 * steps)
    padded[:, :count, :k] = rows
    # block, warp, tile, row, part, step, lane in part, half, value
    parts = padded.view(blocks, WARPS, tiles, 2, 8, steps, 4, 2, 2)
    fragments = parts.permute(0, 1, 5, 2, 4, 6, 7, 3, 8).reshape(blocks, WARPS, steps * tiles, 256)
    return torch.cat([stage.reshape(blocks, -1) for stage in fragments.split(FRAGMENTS, 2)], 1)


def unpack(tape: Tensor, rows: int, k: int) -> Tensor:
    """The inverse of `pack`: (blocks, elements) -> (blocks, rows, k)."""
    blocks, tiles, steps = len(tape), -(-rows // (2 * WARPS)), -(-k // 128)
    stages = tape.split(WARPS * FRAGMENTS * 256, 1)
    fragments = torch.cat([stage.reshape(blocks, WARPS, -1, 256) for stage in stages], 2)
    # block, warp, step, tile, part, lane in part, half, row, value
    parts = fragments.view(blocks, WARPS, steps, tiles, 8, 4, 2, 2, 2)
    padded = parts.permute(0, 1, 3, 7, 4, 2, 5, 6, 8).reshape(blocks, 2 * WARPS * tiles, 128 * steps)
    return padded[:, :rows, :k]


def pack_layer(shape: Shape, stack: StackConfig, get: Mapping[str, Tensor]) -> Tensor:
    """One decoder layer, by names without their prefix: (blocks, elements) bf16."""
    group, blocks, heads = shape.group, shape.blocks, stack.num_key_value_heads
    h, f, d = stack.hidden_size, stack.intermediate_size, stack.head_dim
    attention = stack.num_attention_heads // heads * d
    q, k, v = (get[f"self_attn.{name}_proj.weight"].view(heads, -1, h) for name in "qkv")
    qkv = torch.cat((q, k, v), 1).reshape(blocks, -1, h)
    gate, up = (get[f"mlp.{name}_proj.weight"].view(blocks, -1, h) for name in ("gate", "up"))

    def by_group(weight: Tensor, inputs: int) -> Tensor:  # a group takes its inputs, a block a share of the rows
        return weight.view(group, h // group, heads, inputs).permute(2, 0, 1, 3).reshape(blocks, -1, inputs)

    out = by_group(get["self_attn.o_proj.weight"], attention)
    down = by_group(get["mlp.down_proj.weight"], f // heads)
    return torch.cat([pack(m) for m in (qkv, out, torch.stack((gate, up), 2).flatten(1, 2), down)], 1)


def unpack_layer(shape: Shape, stack: StackConfig, tape: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack_layer`, as the matrices that `LayerWeights.fused` makes: qkv, o, gate_up, down.

    What csrc/unpack.cu does on a GPU.
    """
    group, blocks, heads = shape.group, shape.blocks, stack.num_key_value_heads
    h, f, d = stack.hidden_size, stack.intermediate_size, stack.head_dim
    attention = stack.num_attention_heads // heads * d
    sizes = [(heads * (attention + 2 * d) // blocks, h), (h // group, attention)]
    sizes += [(2 * f // blocks, h), (h // group, f // heads)]  # rows and inputs of a block
    counts = [-(-rows // (2 * WARPS)) * 2 * WARPS * -(-k // 128) * 128 for rows, k in sizes]
    qkv, out, gate_up, down = (unpack(part, *s) for part, s in zip(tape.split(counts, 1), sizes, strict=True))

    def whole(share: Tensor) -> Tensor:
        return share.reshape(heads, group, h // group, -1).permute(1, 2, 0, 3).reshape(h, -1)

    qkv = qkv.reshape(heads, -1, h).split((attention, d, d), 1)
    return {
        "qkv": torch.cat([part.flatten(0, 1) for part in qkv]),
        "o": whole(out),
        "gate_up": gate_up.reshape(f, 2, h).transpose(0, 1).reshape(2 * f, h),
        "down": whole(down),
    }


def pack_rows(shape: Shape, weight: Tensor) -> Tensor:
    """A head: rows dealt out to the blocks in order, each block's padded to whole tiles."""
    tile_rows = 2 * WARPS
    each = -(-weight.shape[0] // (shape.blocks * tile_rows)) * tile_rows
    padded = weight.new_zeros(shape.blocks * each, weight.shape[1])
    padded[: weight.shape[0]] = weight
    return pack(padded.view(shape.blocks, each, -1))


def pack_wide_head(shape: Shape, weight: Tensor) -> Tensor:
    """A text model's head in the chunks of csrc/text.cu: each block's rows, a lane for each row of a chunk."""
    each = -(-weight.shape[0] // shape.blocks)
    chunks = -(-each // (_WARP_ROWS * WARPS))
    rows = -(-each // (chunks * 2 * WARPS)) * 2 * WARPS
    padded = weight.new_zeros(shape.blocks * chunks * rows, weight.shape[1])
    padded[: weight.shape[0]] = weight
    return pack(padded.view(shape.blocks * chunks, rows, -1))


def pack_projection(shape: Shape, weight: Tensor) -> Tensor:
    """(P_H, T_H) dealt out evenly."""
    return pack(weight.view(shape.blocks, -1, weight.shape[1]))
