"""The weight tape, read back by the definition of the tensor core's A operand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mktts.kernel.grid import FRAGMENTS, WARPS, choose_shape
from mktts.kernel.tape import pack, pack_layer, pack_rows


def unpack(tape: Tensor, rows: int, k: int) -> Tensor:
    """(blocks, rows, k) from a tape, lane by lane (PTX ISA, mma.m16n8k16: lane 4 g + q holds rows g and g + 8)."""
    blocks, tiles, steps = len(tape), -(-rows // (2 * WARPS)), -(-k // 128)
    out = torch.zeros(blocks, 2 * WARPS * tiles, 128 * steps, dtype=tape.dtype)
    at = 0
    for stage in range(-(-tiles * steps // FRAGMENTS)):
        here = range(stage * FRAGMENTS, min((stage + 1) * FRAGMENTS, tiles * steps))
        for warp in range(WARPS):
            for fragment in here:
                step, tile = divmod(fragment, tiles)
                for lane in range(32):
                    part, q = divmod(lane, 4)
                    values = tape[:, at : at + 8].reshape(blocks, 2, 2, 2)  # half of k, row of the pair, value
                    column = part * 16 * steps + step * 16 + q * 4
                    for half in range(2):
                        for row in range(2):
                            first = column + half * 2
                            out[:, (warp * tiles + tile) * 2 + row, first : first + 2] = values[:, half, row]
                    at += 8
    assert at == tape.shape[1]
    assert not out[:, rows:].any() and not out[:, :, k:].any()
    return out[:, :rows, :k]


@pytest.mark.parametrize(("rows", "k"), [(32, 1024), (48, 256), (24, 64), (12, 96), (64, 384), (16, 128)])
def test_a_tape_holds_every_weight_where_the_tensor_core_looks_for_it(rows, k):
    weights = torch.randn(3, rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
    assert torch.equal(unpack(pack(weights), rows, k), weights)


def layer_of(stack, generator: torch.Generator) -> dict[str, Tensor]:
    heads, pairs, d = stack.num_attention_heads, stack.num_key_value_heads, stack.head_dim
    h, f = stack.hidden_size, stack.intermediate_size
    sizes = {
        "self_attn.q_proj": (heads * d, h),
        "self_attn.k_proj": (pairs * d, h),
        "self_attn.v_proj": (pairs * d, h),
        "self_attn.o_proj": (h, heads * d),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
    }
    return {f"{n}.weight": torch.randn(size, generator=generator).bfloat16() for n, size in sizes.items()}


def test_a_layer_multiplied_from_the_tape_is_the_layer(tiny):
    """Groups and blocks put together again: every product a group sums, against the plain matrices."""
    shape = choose_shape(tiny.config, 132)
    stack = tiny.config.talker
    layer = layer_of(stack, torch.Generator().manual_seed(1))
    tape = pack_layer(shape, stack, layer)
    heads, group, h, f = stack.num_key_value_heads, shape.group, stack.hidden_size, stack.intermediate_size
    each = stack.num_attention_heads // heads * stack.head_dim
    sizes = [((each + 2 * stack.head_dim) // group, h), (h // group, each)]
    sizes += [(2 * f // shape.blocks, h), (h // group, f // heads)]
    elements = [pack(torch.zeros(1, *size)).shape[1] for size in sizes]
    qkv, out, gate_up, down = (unpack(part, *size) for part, size in zip(tape.split(elements, 1), sizes, strict=True))
    q, k, v = (layer[f"self_attn.{n}_proj.weight"].view(heads, -1, h) for n in "qkv")
    assert torch.equal(qkv.reshape(heads, -1, h), torch.cat((q, k, v), 1))
    pairs = gate_up.reshape(-1, 2, h)
    assert torch.equal(pairs[:, 0], layer["mlp.gate_proj.weight"])
    assert torch.equal(pairs[:, 1], layer["mlp.up_proj.weight"])
    for part, name in ((out, "self_attn.o_proj"), (down, "mlp.down_proj")):
        whole = part.reshape(heads, h, -1).transpose(0, 1).reshape(h, -1)
        assert torch.equal(whole, layer[f"{name}.weight"])


def test_head_rows_are_dealt_out_in_order(tiny):
    shape = choose_shape(tiny.config, 132)
    head = torch.randn(tiny.config.talker.vocab_size, 64).bfloat16()
    each = -(-len(head) // (shape.blocks * 16)) * 16
    rows = unpack(pack_rows(shape, head), each, 64).reshape(-1, 64)
    assert torch.equal(rows[: len(head)], head) and not rows[len(head) :].any()
