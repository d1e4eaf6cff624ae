"""Prompt rows through the tape as it is: csrc/rows.cu on the CPU, lane by lane, against the stack in bf16 and fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from frame_on_cpu import COMPILER
from rows_on_cpu import launches
from test_tape_stack import rows_of, shape_of, stack_of, tape_of, tensors_of
from torch import Tensor

from mktts.kernel import grid
from mktts.kernel.grid import Shape
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape import stack_weights
from mktts.kernel.tape_stack import KERNELS, MOST_POSITIONS, ROWS, TapeRows
from mktts.model.qwen3 import Qwen3Stack

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SETTINGS = {"capacity": 64, "buckets": (4, 16, 64)}


def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest of root mean squares, as a part of what was expected."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e.double()).norm() / e.double().norm()) for f, e in pairs)


def results(prefill: Prefill, x: Tensor) -> tuple[Tensor, ...]:
    """Of rows in two pieces, the second of them past the first."""
    prefill.run(x[:9])
    return prefill.run(x[9:], 9), prefill.keys, prefill.values


def exact(shape: Shape, tensors: dict[str, Tensor], **settings: object) -> Prefill:
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    return Prefill(Qwen3Stack(shape.talker, weights, "", torch.device("cpu"), torch.float32), **SETTINGS | settings)


def on_cpu(shape: Shape, tensors: dict[str, Tensor], folder: Path, most_rows: int = grid.MOST_ROWS) -> Prefill:
    stack = tape_of(shape, tensors)
    weights = stack_weights(shape, "talker", shape.talker, tensors.__getitem__, "")
    return Prefill(stack, **SETTINGS, few=TapeRows(shape, weights, launch=launches(shape, folder, most_rows)))


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
    tensors = tensors_of(shape)
    found = on_cpu(shape, tensors, tmp_path, most_rows)
    found._kv.fill_(torch.nan)  # what nobody has filled is not read
    found._input.fill_(torch.nan)  # nor is what pads few rows
    for rows in (10, 25):
        x = rows_of(shape, rows)
        expected = results(exact(shape, tensors), x.float())
        ours = error(results(found, x), expected)
        assert ours <= 1.25 * error(results(Prefill(stack_of(shape, tensors), **SETTINGS), x), expected)
        assert found._kv[:, :, :, rows:].isnan().all()


@NEEDS_COMPILER
def test_many_rows_go_on_where_few_ended_and_few_where_many_did(tmp_path):
    shape = shape_of("tiny", 1, multiprocessors=12)
    tensors = tensors_of(shape)
    found, plain = on_cpu(shape, tensors, tmp_path), Prefill(stack_of(shape, tensors), **SETTINGS)
    x = rows_of(shape, 40)
    for cuts in ((5, 35), (30, 10), (16, 17, 7)):
        for prefill in (found, plain):
            past = 0
            for piece in x.split(cuts):
                hidden = prefill.run(piece, past)
                past += len(piece)
            if prefill is found:
                ours = hidden.clone()
        assert error((ours, found.keys, found.values), (hidden, plain.keys, plain.values)) < 0.02


def test_rows_at_more_positions_than_the_kernels_hold_weights_of_go_through_operators():
    shape = shape_of("tiny", 1)
    tensors, launched = tensors_of(shape), []
    weights = stack_weights(shape, "talker", shape.talker, tensors.__getitem__, "")
    few = TapeRows(shape, weights, launch=lambda name, grid, parameters: launched.append(name))
    found, plain = (Prefill(tape_of(shape, tensors), few=f) for f in (few, None))
    x = rows_of(shape, MOST_POSITIONS - 3)
    for prefill in (found, plain):
        prefill.run(x)
    assert not launched
    found.run(x[:3], MOST_POSITIONS - 3)
    assert tuple(launched) == KERNELS
    results = [prefill.run(x[:5], MOST_POSITIONS - 4) for prefill in (found, plain)]
    assert torch.equal(*results) and tuple(launched) == KERNELS


# ---- on a GPU


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("size", "multiprocessors"),
    [("tiny", 132), ("tiny-projected", 132), *(("0.6b", count) for count in (16, 58, 132)), ("1.7b", 132)],
)
def test_graphs_of_few_rows_are_no_further_from_fp32_than_those_of_operators(size, multiprocessors):
    shape = shape_of(size, 3, multiprocessors)
    tensors = tensors_of(shape, "cuda")
    weights = stack_weights(shape, "talker", shape.talker, tensors.__getitem__, "")
    found = Prefill(tape_of(shape, tensors), few=TapeRows(shape, weights))
    plain = Prefill(stack_of(shape, tensors, "cuda"))
    for rows in (10, 9 + ROWS):
        x = rows_of(shape, rows)
        expected = results(exact(shape, {name: tensor.cpu() for name, tensor in tensors.items()}), x.float())
        ours, theirs = (tuple(t.cpu() for t in results(prefill, x.cuda())) for prefill in (found, plain))
        assert error(ours, expected) <= 1.25 * error(theirs, expected)
        for _ in range(20):
            again = results(found, x.cuda())
            assert all(torch.equal(a.cpu(), b) for a, b in zip(again, ours, strict=True))
