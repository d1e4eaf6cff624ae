"""The weight tape: unpacked into layers again, and multiplied as it lies by csrc/rows.cu, on the CPU lane by lane, by
the definition of the tensor core's A operand, and on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from csrc_on_cpu import COMPILER, row_launches
from seeded import in_two_pieces, prompt, rms_error, shape_of, tape_of, unpacking, weights_of
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.checkpoint.tensors import expected_tensors
from mktts.errors import CapacityError
from mktts.kernel import grid
from mktts.kernel.build import CSRC
from mktts.kernel.grid import Shape, choose_shape
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape import KERNELS, MOST_POSITIONS, ROWS, model_weights, pack_rows, unpack
from mktts.measure.inspection import config_at
from mktts.model.qwen3 import Qwen3Stack

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")


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


def test_the_readme_of_csrc_has_what_the_weights_take_on_132_multiprocessors():
    found = []
    for config in (open_checkpoint(SMALL).config, config_at("0.6b"), config_at("1.7b")):
        specs = expected_tensors(config)
        made = {name: torch.empty(spec.shape, dtype=torch.bfloat16, device="meta") for name, spec in specs.items()}
        weights = model_weights(choose_shape(config, 132), made.__getitem__)
        found.append(sum({id(tensor): tensor.nbytes for tensor in weights.values()}.values()) / 2**20)
    line = " | ".join(["| all of them", *(f"{mib:,.1f}" for mib in found)])
    assert line in (CSRC / "README.md").read_text(encoding="utf-8")


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


def on_cpu(shape: Shape, weights: dict[str, Tensor], folder: Path, most_rows: int = grid.MOST_ROWS) -> Prefill:
    return Prefill(tape_of(shape, weights, row_launches(shape, folder, most_rows)))


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
    found = on_cpu(shape, weights, tmp_path, most_rows)
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
    found, plain = on_cpu(shape, weights, tmp_path), Prefill(stack_of(shape, weights))
    x = rows_of(shape, 40)
    for cuts in ((5, 35), (30, 10), (16, 17, 7)):
        hidden = {}
        for prefill in (found, plain):
            past = 0
            for piece in x.split(cuts):
                hidden[prefill] = prefill.run(piece, past)
                past += len(piece)
        ours, theirs = ((hidden[prefill], prefill.keys_values) for prefill in (found, plain))
        assert rms_error(ours, theirs) < 0.02


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
