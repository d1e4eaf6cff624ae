"""Grids of any size: what every block, warp and lane reads and mails, against the plain matrices."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from block_reading import Reading
from compiler import needs_nvrtc
from test_tape import layer_of

from mktts.errors import BackendUnavailable
from mktts.kernel.build import compile_kernel
from mktts.kernel.grid import Shape, choose_shape, choose_text_shape, layer_matrices
from mktts.kernel.tape import pack_layer, unpack_layer
from mktts.measure.inspection import config_at

# As many groups and query heads as tiny has, wide enough for every group of blocks: shares of several matrices (2, 3),
# with a remainder (3, 5, 7, 13).
STACK = replace(config_at("tiny").talker, hidden_size=256, intermediate_size=1_144, head_dim=64)
GROUPS = (2, 3, 4, 5, 7, 10, 13, 16, 29)


@pytest.mark.parametrize("group", GROUPS)
def test_blocks_read_mail_and_add_what_the_plain_matrices_give(group):
    shape = Shape(STACK, STACK, group * STACK.num_key_value_heads)
    layer = layer_of(STACK, torch.Generator().manual_seed(group))
    plain = {name.split(".")[1].removesuffix("_proj"): w.double().numpy() for name, w in layer.items()}
    noise = np.random.default_rng(group)
    x, heads, h = noise.standard_normal(STACK.hidden_size), STACK.num_key_value_heads, STACK.hidden_size
    reading = Reading(STACK, shape.blocks, pack_layer(shape, STACK, layer).double().numpy())

    q, k, v = (plain[name].reshape(heads, -1, h) @ x for name in "qkv")
    assert np.allclose(reading.qkv(x), np.concatenate((q, k, v), 1))
    attended = noise.standard_normal((heads, reading.outputs))
    assert np.allclose(reading.projection(attended), plain["o"] @ attended.ravel())
    gates = reading.gates(x)
    assert np.allclose(gates[..., 0].ravel(), plain["gate"] @ x)
    assert np.allclose(gates[..., 1].ravel(), plain["up"] @ x)
    inner = noise.standard_normal((heads, reading.inner))
    assert np.allclose(reading.projection(inner), plain["down"] @ inner.ravel())
    reading.finish()


@pytest.mark.parametrize("group", GROUPS)
def test_blocks_combine_attention_as_one_softmax(group):
    blocks, queries = group * STACK.num_key_value_heads, STACK.num_attention_heads // STACK.num_key_value_heads
    noise = np.random.default_rng(group)
    reading = Reading(STACK, blocks, np.zeros((blocks, 0)))
    maxima, sums = noise.standard_normal((blocks, queries)), noise.uniform(1, 9, (blocks, queries))
    outs = noise.standard_normal((blocks, queries * STACK.head_dim))
    weight = np.exp2(maxima).reshape(-1, group, queries, 1)
    above = (outs.reshape(-1, group, queries, STACK.head_dim) * weight).sum(1)
    expected = above / (sums.reshape(-1, group, queries, 1) * weight).sum(1)
    assert np.allclose(reading.attention(maxima, sums, outs), expected.reshape(len(expected), -1))


@pytest.mark.parametrize("multiprocessors", [16, 24, 46, 58, 84, 108])
def test_an_unpacked_layer_is_the_layer_that_was_packed_in_every_grid(multiprocessors):
    shape = choose_shape(config_at("0.6b"), multiprocessors)
    stack = replace(shape.talker, intermediate_size=shape.talker.intermediate_size // 2)  # half the work
    layer = layer_of(stack, torch.Generator().manual_seed(multiprocessors))
    found = unpack_layer(shape, stack, pack_layer(shape, stack, layer))
    assert torch.equal(found["qkv"], torch.cat([layer[f"self_attn.{name}_proj.weight"] for name in "qkv"]))
    assert torch.equal(found["gate_up"], torch.cat([layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    assert torch.equal(found["o"], layer["self_attn.o_proj.weight"])
    assert torch.equal(found["down"], layer["mlp.down_proj.weight"])


# Multiprocessors -> blocks; H100 and H200 have 132.
@pytest.mark.parametrize(
    ("multiprocessors", "blocks"),
    [(16, 16), (20, 16), (24, 24), (28, 24), (46, 40), (48, 48), (58, 56), (76, 64), (84, 80), (108, 104), (128, 128)]
    + [(132, 128), (142, 128), (148, 128), (170, 128), (188, 128)],
)
@pytest.mark.parametrize("size", ["0.6b", "1.7b"])
def test_the_grid_leaves_few_multiprocessors_idle_unless_more_would_only_read_more(size, multiprocessors, blocks):
    assert choose_shape(config_at(size), multiprocessors).blocks == blocks


@pytest.mark.parametrize("size", ["0.6b", "1.7b"])
@pytest.mark.parametrize("multiprocessors", range(16, 171, 7))
def test_a_wider_grid_reads_at_most_an_eighth_more(size, multiprocessors):
    shape = choose_shape(config_at(size), multiprocessors)
    assert shape.blocks * shape.block_elements <= 1.125 * 128 * choose_shape(config_at(size), 128).block_elements


def test_a_text_model_has_the_grid_of_its_stack():
    shapes = [choose_text_shape(config_at("0.6b").talker, multiprocessors) for multiprocessors in (24, 58, 132)]
    assert [shape.blocks for shape in shapes] == [24, 56, 128]


def test_no_block_of_a_grid_is_without_rows():
    """Who reads a buffer is known to have read it by what it sends next: a block that sends nothing is not known."""
    few = replace(STACK, intermediate_size=2 * 4 * 11)  # 44 pairs over 16 blocks: 3 each, and none for the last
    assert all(
        (shape.group - 1) * dealt.each < dealt.total
        for multiprocessors in range(8, 130)
        for shape in [choose_text_shape(few, multiprocessors)]
        for dealt in layer_matrices(few, shape.group).values()
    )
    assert choose_text_shape(few, 32).group != 16


def test_a_device_too_small_is_named_with_what_lacks():
    with pytest.raises(BackendUnavailable, match="needs 16 multiprocessors .* has 4, 12 too few"):
        choose_shape(config_at("0.6b"), 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 1_022}, "hidden size of 1022"),
        ({"intermediate_size": 3_080}, "feed-forward of 3080"),
        ({"head_dim": 80}, "80 wide"),
        ({"num_attention_heads": 64}, "8 query heads"),
    ],
)
def test_dimensions_that_fit_no_grid_are_named(changes, said):
    with pytest.raises(BackendUnavailable, match=said):
        choose_text_shape(replace(config_at("0.6b").talker, **changes), 132)


@pytest.mark.parametrize("multiprocessors", [16, 24, 46, 58, 108])
@pytest.mark.parametrize("size", ["0.6b", "1.7b"])
@needs_nvrtc
def test_python_deals_rows_out_as_the_kernel_does(size, multiprocessors):
    shape = choose_shape(config_at(size), multiprocessors)
    ptx = compile_kernel(shape.defines, "compute_80", "unpack.cu").image.decode()
    for dealt in layer_matrices(shape.talker, shape.group).values():
        name = f"DealtILi{dealt.total}ELi{dealt.inputs}ELi{dealt.unit}EE"
        found = {n: int(value) for n, value in re.findall(rf"{name}\d([A-Z]+)E = (\d+);", ptx)}
        assert (found["EACH"], found["CHUNK"], found["COUNT"]) == (dealt.each, dealt.chunk, dealt.count)
        assert found["BYTES"] == 2 * dealt.elements
