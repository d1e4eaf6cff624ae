"""Prefill in padded pieces against the oracle's one pass, by operators and by kernels between products, which run on
the CPU with TRITON_INTERPRET=1; keys and values in the frame kernel's layout. The weight tape: unpacked into layers
again, and multiplied as it lies by csrc/rows.cu, on the CPU by the tensor core's definition, and on a GPU."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from csrc_on_cpu import COMPILER, row_launches, unpack_launch
from torch import Tensor

import mktts.kernel
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import stack_shapes, tensor_specs
from mktts.errors import CapacityError
from mktts.kernel import grid
from mktts.kernel.grid import Shape, choose_shape
from mktts.kernel.prefill import Prefill, copy_into_cache, kept_of_cache, row_kernels
from mktts.kernel.tape import KERNELS, MOST_POSITIONS, ROWS, Launch, TapeStack, pack_rows, stack_weights, unpack
from mktts.measure.inspection import config_at
from mktts.model.qwen3 import Qwen3Stack, Stack
from mktts.spec import StackConfig

FOLDER = tempfile.TemporaryDirectory()  # of what is compiled
SMALL = replace(
    config_at("tiny").talker, hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=16, vocab_size=8
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of the root mean square: a few roundings a layer differ where sums are ordered otherwise.
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}  # fp16: 2.2e-3 seen on an H200
WIDE = replace(SMALL, hidden_size=64)  # of widths that the kernels take
MHA = replace(WIDE, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
MANY = replace(WIDE, num_attention_heads=8, num_key_value_heads=8, head_dim=8, intermediate_size=1_100)
LENGTHS = (1, 2, 16, 17, 64, 65, 127, 129, 256, 300, 512, 513, 1024)
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")


def weights_of(c: StackConfig, device: str = "cpu") -> dict[str, Tensor]:
    """bf16, by their names in the stack: the same on every device."""
    made = random_tensors(tensor_specs(stack_shapes("", c)), 1, torch.bfloat16)
    return {name: tensor.to(device) for name, tensor in made.items()}


def stack(dtype: torch.dtype = torch.float32, config: StackConfig = SMALL, device: str = "cpu") -> Qwen3Stack:
    return Qwen3Stack(config, weights_of(config), "", torch.device(device), dtype)


def prompt(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = SMALL.hidden_size) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * rows + seed)).to(dtype)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float = 1e-5) -> bool:
    return all(f.shape == e.shape and (f - e).abs().max() <= error for f, e in zip(found, expected, strict=True))


def rms_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest of root mean squares, as a part of what was expected."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e.double()).norm() / e.double().norm()) for f, e in pairs)


def in_two_pieces(prefill: Prefill, x: Tensor) -> tuple[Tensor, ...]:
    """Hidden state, keys and values of rows of which the first nine come first."""
    prefill.run(x[:9])
    return prefill.run(x[9:], 9), prefill.keys_values


@torch.inference_mode()
def oracle(rows: Tensor, of: Qwen3Stack) -> tuple[Tensor, Tensor]:
    """Hidden state of the last row; keys and values."""
    cache = of.new_cache(len(rows))
    hidden = of.advance(rows, [cache], [len(rows)])[-1]
    return hidden, cache.memory[:, :, 0].transpose(0, 1)


@pytest.mark.parametrize(
    ("past", "rows"),
    [*((0, rows) for rows in LENGTHS), *((past, rows) for past in (1, 9, 63, 64, 130) for rows in (1, 2, 70))],
)
def test_a_prompt_of_any_length_and_one_in_two_pieces_give_the_oracles_single_pass(past, rows):
    prefill, x = Prefill(stack()), prompt(past + rows)
    if past:
        prefill.run(x[:past])
    hidden = prefill.run(x[past:], past)
    assert close((hidden, prefill.keys_values), oracle(x, stack())) and prefill.length == past + rows


def test_in_bf16_it_is_no_further_from_fp64_than_the_oracle():
    errors = []
    for rows in (12, 40, 90):
        x = prompt(rows, dtype=torch.bfloat16)
        exact = oracle(x.double(), stack(torch.float64))
        prefill = Prefill(stack(torch.bfloat16))
        ours = (prefill.run(x), prefill.keys_values)
        theirs = oracle(x, stack(torch.bfloat16))
        for found in (ours, theirs):
            errors.append([(a.double() - e).square().mean() for a, e in zip(found, exact, strict=True)])
    ours, theirs = torch.tensor(errors).view(-1, 2, 2).mean(0).sqrt()
    assert theirs.min() > 1e-4 and (ours <= 1.1 * theirs).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [1, 2, 25, 200])
def test_a_restored_prefix_gives_the_bits_of_one_just_made_whatever_was_prefilled_before(dtype, rest):
    # oneDNN with AMX multiplies what lies behind a row of 80 by zero, so that NaN of padding reaches its result
    before = torch.full((333, SMALL.hidden_size), torch.nan if dtype == torch.float32 else 1e4, dtype=dtype)
    x, prefill = prompt(9 + rest, dtype=dtype), Prefill(stack(dtype))
    prefill.run(x[:9])
    kept = prefill.keys_values.clone()
    expected = (prefill.run(x[9:], 9), prefill.keys_values.clone())
    prefill.run(before)
    assert expected[0].isfinite().all()  # a result is the caller's
    prefill._kv[:, :, :, :9].copy_(kept)
    found = (prefill.run(x[9:], 9), prefill.keys_values)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    prefill.run(before)
    assert torch.equal(prefill.run(x), Prefill(stack(dtype)).run(x))


def test_warm_up_makes_every_pass_that_a_prompt_needs():
    prefill = Prefill(stack())
    assert prefill.length == 0
    made = set(prefill._passes)
    for past in (0, 1, 63, 64, 112, 127, 128, 129, 300, 511, 512, 1023):
        for rows in (1, 16, 17, 63, 64, 65, 128, 129, 200, 512, 1024):
            if past + rows <= 1024:
                prefill.run(prompt(rows), past)
    assert set(prefill._passes) == made


def test_a_fused_stack_shares_its_weights_and_gives_the_same_results():
    plain, fused = stack(), stack()
    for index, old in enumerate(plain.layers):
        w = fused.layer_weights(index)
        assert w.q.data_ptr() == w.qkv.data_ptr() and w.gate.data_ptr() == w.gate_up.data_ptr()
        assert w.v.untyped_storage().data_ptr() == w.qkv.untyped_storage().data_ptr()
        assert all(torch.equal(getattr(w, name), getattr(old, name)) for name in ("q", "k", "v", "gate", "up"))
    assert close(oracle(prompt(20), fused), oracle(prompt(20), plain))


@pytest.mark.parametrize("count", [1, 3, 4, 10, 19, 20, 0])
def test_dealt_positions_lie_where_the_kernel_looks_for_them(count):
    layers, heads, group, slots, head_dim = 2, 3, 4, 5, 8
    kv = torch.full((layers, heads, group, slots, 2, head_dim), -1.0)
    keys, values = torch.rand(2, layers, heads, count, head_dim)
    copy_into_cache(torch.stack((keys, values)), kv)
    assert torch.equal(kept_of_cache(kv, count), torch.stack((keys, values)))
    for position in range(group * slots):
        found = kv[:, :, position % group, position // group]
        if position < count:
            assert torch.equal(found[:, :, 0], keys[:, :, position])
            assert torch.equal(found[:, :, 1], values[:, :, position])
        else:
            assert (found == -1).all()


@pytest.mark.parametrize(
    "change, device, dtype",
    [
        ({}, "cpu", torch.float32),
        ({}, "meta", torch.float32),
        ({}, "cuda", torch.float64),
        ({"hidden_size": 48}, "cuda", torch.bfloat16),
        ({"head_dim": 48}, "cuda", torch.bfloat16),
    ],
)
def test_what_the_kernels_do_not_take_goes_through_operators(change, device, dtype, caplog):
    assert row_kernels(replace(WIDE, **change), torch.device(device), dtype) is None and not caplog.records


@pytest.mark.parametrize("missing", [True, False], ids=["triton", "compiler"])
def test_without_triton_or_what_it_needs_prompts_go_through_operators_with_a_warning(missing, monkeypatch, caplog):
    if missing:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "mktts.kernel.rows", raising=False)
        monkeypatch.delattr(mktts.kernel, "rows", raising=False)
    else:  # on a machine without CUDA it fails a line earlier
        monkeypatch.setattr(mktts.kernel, "rows", SimpleNamespace(silu_mul={}), raising=False)
    assert row_kernels(WIDE, torch.device("cuda"), torch.bfloat16) is None
    (record,) = caplog.records
    assert "prompt rows take plain operators: prefill needs triton" in record.getMessage()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [10, 70, 300])
def test_in_bf16_on_a_gpu_it_is_no_further_from_fp32_than_the_oracle(rows):
    config = replace(config_at("0.6b").talker, num_hidden_layers=4)
    exact, prefill = stack(torch.float32, config, "cuda"), Prefill(stack(torch.bfloat16, config, "cuda"))
    x = prompt(rows, dtype=torch.bfloat16, width=config.hidden_size).cuda()
    expected = oracle(x.float(), exact)
    ours = (prefill.run(x), prefill.keys_values)
    theirs = oracle(x, prefill.stack)
    for place in (0, 1):  # keys, values: many numbers, so the figures are steady
        errors = [(found[1][place].float() - expected[1][place]).square().mean().sqrt() for found in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("config", [WIDE, MHA, MANY], ids=["gqa", "mha", "many"])
def test_the_kernels_give_what_operators_give(config, dtype):
    from mktts.kernel import rows as kernels

    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter cuts to bfloat16, it does not round")
    device, found = "cpu" if INTERPRETED else "cuda", []
    for used in (kernels, None):
        prefill = Prefill(stack(dtype, config, device))
        prefill._kernels, prefill.graphs = used, False
        prefill._passes.clear()
        x = prompt(40, dtype=dtype, width=64).to(device)
        prefill.run(torch.full_like(x, torch.nan))  # an earlier prompt that left nothing of use
        found.append(in_two_pieces(prefill, x))
    assert rms_error(*found) < LIMITS[dtype]


# ---- the weight tape


def shape_of(size: str, layers: int, multiprocessors: int = 132) -> Shape:
    shape = choose_shape(config_at(size), multiprocessors)
    return replace(shape, talker=replace(shape.talker, num_hidden_layers=layers))


def tape_of(shape: Shape, weights: dict[str, Tensor], few: Launch | None = None) -> TapeStack:
    """Unpacked by csrc/unpack.cu, on the CPU too, where few rows go by `few`."""
    packed = stack_weights(shape, "talker", shape.talker, weights.__getitem__, "")
    if weights["norm.weight"].is_cuda:
        return TapeStack(shape, packed)
    unpack = unpack_launch(shape, Path(tempfile.mkdtemp(dir=FOLDER.name)))
    return TapeStack(shape, packed, lambda name, *of: (few if name in KERNELS else unpack)(name, *of))


def unpacking(stack: Stack) -> Prefill:
    """Few rows by operators, too."""
    prefill = Prefill(stack)
    prefill._few = False
    prefill._passes.clear()
    return prefill


def stack_of(shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Qwen3Stack:
    return Qwen3Stack(shape.talker, weights, "", weights["norm.weight"].device, dtype)


def rows_of(shape: Shape, count: int) -> Tensor:
    return prompt(count, dtype=torch.bfloat16, width=shape.talker.hidden_size)


def test_head_rows_are_dealt_out_in_order(tiny):
    shape = choose_shape(tiny.config, 132)
    head = torch.randn(tiny.config.talker.vocab_size, 64).bfloat16()
    each = -(-len(head) // (shape.blocks * 16)) * 16
    rows = unpack(pack_rows(shape, head), each, 64).reshape(-1, 64)
    assert torch.equal(rows[: len(head)], head) and not rows[len(head) :].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("size", "multiprocessors"),
    [*((size, 132) for size in SIZES), *(("0.6b", count) for count in (16, 24, 46, 58, 84, 108)), ("1.7b", 58)],
)
@NEEDS_COMPILER
def test_the_kernel_unpacks_what_the_stack_holds_in_every_grid(size, multiprocessors, device):
    parts = 1 if device == "cuda" or size.startswith("tiny") else 2  # half the work
    shape = shape_of(size, 3 if device == "cuda" else 1, multiprocessors)
    shape = replace(shape, talker=replace(shape.talker, intermediate_size=shape.talker.intermediate_size // parts))
    weights = weights_of(shape.talker, device)
    stack, expected = tape_of(shape, weights), stack_of(shape, weights)
    for matrix in stack._room.values():
        matrix.fill_(torch.nan)
    for index in (*range(shape.talker.num_hidden_layers), 0):
        ours, theirs = stack.layer_weights(index), expected.layer_weights(index)
        for name in vars(theirs):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (index, name)


@NEEDS_COMPILER
def test_a_prompt_beyond_the_capacity_is_refused_without_matrices_and_computed_with_them():
    shape = shape_of("tiny", 1)
    weights, c = weights_of(shape.talker), shape.talker
    kv = torch.zeros(1, c.num_key_value_heads, shape.group, 200, 2, c.head_dim, dtype=torch.bfloat16)
    x = rows_of(shape, 1025)
    with pytest.raises(CapacityError, match="may have 1024 rows with the megakernel, this one has 1025"):
        unpacking(tape_of(shape, weights)).fill(x, kv)
    assert not kv.any()
    assert Prefill(stack_of(shape, weights)).fill(x, kv).shape == (c.hidden_size,)
    assert kv.any()


def exact(shape: Shape, weights: dict[str, Tensor]) -> Prefill:
    weights = {name: tensor.float().cpu() for name, tensor in weights.items()}
    return Prefill(stack_of(shape, weights, torch.float32))


# Blocks; rows that come at once. A share in several matrices; a remainder; released sizes on two cards.
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("size", "blocks", "most_rows"),
    [
        ("tiny", 12, 32),
        ("tiny-projected", 14, 128),
        *(pytest.param(size, blocks, 128, marks=pytest.mark.slow) for size in ("0.6b", "1.7b") for blocks in (56, 128)),
    ],
)
def test_few_rows_are_no_further_from_fp32_than_the_stack_in_bf16(size, blocks, most_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    shape = replace(shape_of(size, 2 if size.startswith("tiny") else 1), blocks=blocks)
    weights = weights_of(shape.talker)
    found = Prefill(tape_of(shape, weights, row_launches(shape, tmp_path, most_rows)))
    found._kv.fill_(torch.nan)  # what nobody has filled is not read
    found._input.fill_(torch.nan)  # nor is what pads few rows
    for rows in (10, 25):
        x = rows_of(shape, rows)
        expected = in_two_pieces(exact(shape, weights), x.float())
        ours = rms_error(in_two_pieces(found, x), expected)
        assert ours <= 1.25 * rms_error(in_two_pieces(Prefill(stack_of(shape, weights)), x), expected)
        assert found._kv[:, :, :, rows:].isnan().all()


@NEEDS_COMPILER
def test_many_rows_go_on_where_few_ended_and_few_where_many_did(tmp_path):
    shape = shape_of("tiny", 1, multiprocessors=12)
    weights = weights_of(shape.talker)
    found = Prefill(tape_of(shape, weights, row_launches(shape, tmp_path, grid.MOST_ROWS)))
    plain = Prefill(stack_of(shape, weights))
    x = rows_of(shape, 40)
    for cuts in ((5, 35), (30, 10), (16, 17, 7)):
        results = []
        for prefill in (found, plain):
            past = 0
            for piece in x.split(cuts):
                hidden = prefill.run(piece, past)
                past += len(piece)
            results.append((hidden, prefill.keys_values))
        assert rms_error(*results) < 0.02


@NEEDS_COMPILER
def test_rows_at_more_positions_than_the_kernels_hold_weights_of_go_through_operators():
    shape, launched = shape_of("tiny", 1), []
    weights = weights_of(shape.talker)
    stack = tape_of(shape, weights, lambda name, grid, parameters: launched.append(name))
    found, plain = Prefill(stack), unpacking(stack)
    launched.clear()
    x = rows_of(shape, MOST_POSITIONS - 3)
    assert torch.equal(found.run(x), Prefill(stack_of(shape, weights)).run(x)) and not launched
    plain.run(x)
    found.run(x[:3], MOST_POSITIONS - 3)
    assert tuple(launched) == KERNELS
    results = [prefill.run(x[:5], MOST_POSITIONS - 4) for prefill in (found, plain)]
    assert torch.equal(*results) and tuple(launched) == KERNELS


@pytest.mark.gpu
def test_graphs_from_the_tape_and_from_the_stack_give_the_bits_of_the_stacks_eager_passes():
    shape = shape_of("0.6b", 4)
    weights = weights_of(shape.talker, "cuda")
    tape, graphed, eager = unpacking(tape_of(shape, weights)), *(Prefill(stack_of(shape, weights)) for _ in range(2))
    eager.graphs = False
    eager._passes.clear()
    for _ in range(3):  # captured, then replayed back to back
        for count in (1, 10, 17, 64, 100, 500):
            x = rows_of(shape, count).cuda()
            hidden = eager.run(x)
            for ours in (tape, graphed):
                assert torch.equal(ours.run(x), hidden)
                assert torch.equal(ours.keys_values, eager.keys_values)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "multiprocessors"),
    [("tiny", 132), ("tiny-projected", 132), *(("0.6b", count) for count in (16, 58, 132)), ("1.7b", 132)],
)
def test_graphs_of_few_rows_are_no_further_from_fp32_than_those_of_operators(size, multiprocessors):
    shape = shape_of(size, 3, multiprocessors)
    weights = weights_of(shape.talker, "cuda")
    found = Prefill(tape_of(shape, weights))
    plain = Prefill(stack_of(shape, weights))
    for rows in (10, 9 + ROWS):
        x = rows_of(shape, rows)
        expected = in_two_pieces(exact(shape, weights), x.float())
        ours, theirs = (tuple(t.cpu() for t in in_two_pieces(prefill, x.cuda())) for prefill in (found, plain))
        assert rms_error(ours, expected) <= 1.25 * rms_error(theirs, expected)
        for _ in range(20):
            again = in_two_pieces(found, x.cuda())
            assert all(torch.equal(a.cpu(), b) for a, b in zip(again, ours, strict=True))
