"""A layer read back from the tape is the layer; prefill from the tape is prefill from the stack, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mktts.errors import CapacityError
from mktts.kernel.grid import Shape, choose_shape
from mktts.kernel.prefill import Prefill
from mktts.kernel.prompts import KernelPrefill
from mktts.kernel.tape import pack_layer, stack_weights, unpack_layer
from mktts.kernel.tape_stack import TapeStack
from mktts.measure.inspection import config_at
from mktts.model.qwen3 import Qwen3Stack

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")
SETTINGS = {"capacity": 512, "buckets": (4, 16, 64)}


def shape_of(size: str, layers: int, multiprocessors: int = 132) -> Shape:
    shape = choose_shape(config_at(size), multiprocessors)
    return replace(shape, talker=replace(shape.talker, num_hidden_layers=layers))


def tensors_of(shape: Shape, device: str = "cpu") -> dict[str, Tensor]:
    """Seeded weights of the talker's layers, by their names in the stack."""
    c, generator = shape.talker, torch.Generator().manual_seed(2)
    d, h, f = c.head_dim, c.hidden_size, c.intermediate_size
    sizes = {
        "self_attn.q_proj": (c.num_attention_heads * d, h),
        "self_attn.k_proj": (c.num_key_value_heads * d, h),
        "self_attn.v_proj": (c.num_key_value_heads * d, h),
        "self_attn.o_proj": (h, c.num_attention_heads * d),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    names = {f"layers.{i}.{name}": size for i in range(c.num_hidden_layers) for name, size in sizes.items()}
    made = {}
    for name, size in (names | {"norm": (h,)}).items():
        noise = torch.randn(size, generator=generator)
        made[f"{name}.weight"] = (1 + 0.3 * noise if len(size) == 1 else noise / size[1] ** 0.5).bfloat16().to(device)
    return made


def tape_of(shape: Shape, tensors: dict[str, Tensor]) -> TapeStack:
    return TapeStack(shape, stack_weights(shape, "talker", shape.talker, tensors.__getitem__, ""))


def stack_of(shape: Shape, tensors: dict[str, Tensor], device: str = "cpu") -> Qwen3Stack:
    return Qwen3Stack(shape.talker, tensors, "", torch.device(device), torch.bfloat16)


def rows_of(shape: Shape, count: int) -> Tensor:
    return torch.randn(count, shape.talker.hidden_size, generator=torch.Generator().manual_seed(count)).bfloat16()


def assert_same_layers(found: TapeStack, expected: Qwen3Stack) -> None:
    for index in (*range(found.config.num_hidden_layers), 0):
        ours, theirs = found.layer_weights(index), expected.layer_weights(index)
        for name in vars(theirs):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (index, name)


@pytest.mark.parametrize("size", SIZES)
def test_an_unpacked_layer_is_the_layer_that_was_packed(size):
    shape = shape_of(size, 1)
    tensors = tensors_of(shape)
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    found = unpack_layer(shape, shape.talker, pack_layer(shape, shape.talker, layer))
    assert torch.equal(found["qkv"], torch.cat([layer[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
    assert torch.equal(found["gate_up"], torch.cat([layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    assert torch.equal(found["o"], layer["self_attn.o_proj.weight"])
    assert torch.equal(found["down"], layer["mlp.down_proj.weight"])


@pytest.mark.parametrize("size", ["tiny", "tiny-projected"])
def test_a_tape_gives_every_weight_of_every_layer_in_any_order(size):
    shape = shape_of(size, 3)
    tensors = tensors_of(shape)
    assert_same_layers(tape_of(shape, tensors), stack_of(shape, tensors))


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_prefill_from_the_tape_is_prefill_from_the_stack(rows):
    shape, x = shape_of("tiny-projected", 3), rows_of(shape_of("tiny-projected", 1), rows)
    tensors = tensors_of(shape)
    ours, theirs = (Prefill(of(shape, tensors), **SETTINGS) for of in (tape_of, stack_of))
    assert torch.equal(ours.run(x), theirs.run(x))
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_a_prompt_beyond_the_capacity_is_refused_without_matrices_and_computed_with_them():
    shape = shape_of("tiny", 1)
    tensors, c = tensors_of(shape), shape.talker
    kv = torch.zeros(1, c.num_key_value_heads, shape.group, 200, 2, c.head_dim, dtype=torch.bfloat16)
    x = rows_of(shape, 1025)
    with pytest.raises(CapacityError, match="may have 1024 rows with the megakernel, this one has 1025"):
        KernelPrefill(tape_of(shape, tensors)).fill(x, kv)
    assert not kv.any()
    assert KernelPrefill(stack_of(shape, tensors)).fill(x, kv).shape == (c.hidden_size,)
    assert kv.any()


# ---- on a GPU


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("size", "multiprocessors"),
    [*((size, 132) for size in SIZES), *(("0.6b", count) for count in (16, 24, 46, 58, 84, 108)), ("1.7b", 58)],
)
def test_the_kernel_unpacks_what_the_stack_holds(size, multiprocessors):
    shape = shape_of(size, 3, multiprocessors)
    tensors = tensors_of(shape, "cuda")
    stack = tape_of(shape, tensors)
    for matrix in stack._room.values():
        matrix.fill_(torch.nan)
    assert_same_layers(stack, stack_of(shape, tensors, "cuda"))


@pytest.mark.gpu
@GPU
def test_graphs_from_the_tape_give_the_bits_of_graphs_from_the_stack():
    shape = shape_of("0.6b", 4)
    tensors = tensors_of(shape, "cuda")
    ours = Prefill(tape_of(shape, tensors))
    theirs = Prefill(stack_of(shape, tensors, "cuda"))
    for _ in range(3):  # captured, then replayed back to back
        for count in (1, 10, 64, 100, 500):
            x = rows_of(shape, count).cuda()
            assert torch.equal(ours.run(x), theirs.run(x))
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
