"""The frame kernel's own source, run on the CPU in grids that do not divide: codes and errors are the oracles'."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import pytest
import torch
from csrc_on_cpu import COMPILER, RINGS, backend_on_cpu, build, observed
from other_cards import FORCED_FRAMES, Model, error_of

from mktts.errors import EngineError
from mktts.kernel import grid
from mktts.kernel.grid import Shape

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]
model_of = cache(lambda name: Model.make(name, "cpu", FORCED_FRAMES))


def shape_of(model: Model, group: int) -> Shape:
    return Shape(model.config.talker, model.config.predictor, group * model.config.talker.num_key_value_heads)


# Blocks of a group; rows that come at once. A share in several matrices; a remainder.
@pytest.mark.parametrize(("name", "group", "most_rows"), [("small", 3, 32), ("tiny-projected", 7, 128)])
def test_blocks_in_an_order_of_chance_make_the_oracles_frames(name, group, most_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    model = model_of(name)
    shape = shape_of(model, group)
    backend = backend_on_cpu(model, shape, build(shape, tmp_path, most_rows), group, monkeypatch)
    found = observed(backend, model.prompt)
    assert torch.equal(torch.stack([frame.codes for frame in found]), model.codes[:FORCED_FRAMES])
    ratio = error_of(found, model.exact) / model.bf16_error
    print(f"error {ratio:.3f} of bf16's")
    assert ratio <= 1.25


@pytest.mark.parametrize(("ring", "talker_copies", "group"), RINGS)
def test_every_cards_ring_takes_the_copies_of_every_size(ring, talker_copies, group, monkeypatch, tmp_path):
    model = model_of("tiny-projected")
    shape = shape_of(model, group)
    library = build(shape, tmp_path, ring=ring, talker_copies=talker_copies)
    (found,) = observed(backend_on_cpu(model, shape, library, ring, monkeypatch), model.prompt, frames=1)
    assert torch.equal(found.codes, model.codes[0])


def test_a_copy_that_never_ends_ends_the_launch_by_name(monkeypatch, tmp_path):
    model = model_of("tiny-projected")
    shape = shape_of(model, 6)
    library = build(shape, tmp_path, ring=2)
    library.host_lose_copy(ctypes.c_ulonglong(1000))
    with pytest.raises(AssertionError, match="thread 2.. waited too long for the end of an earlier copy"):
        observed(backend_on_cpu(model, shape, library, 1, monkeypatch), model.prompt, frames=1)


@pytest.mark.parametrize("weight", ["talker.codec_head.weight", "talker.code_predictor.lm_head.14.weight"])
def test_logits_of_no_numbers_end_their_stream_by_name(weight, monkeypatch, tmp_path):
    model = model_of("tiny-projected")
    shape = shape_of(model, 6)
    library = build(shape, tmp_path)
    nan = replace(model, tensors=model.tensors | {weight: torch.full_like(model.tensors[weight], torch.nan)})
    with pytest.raises(EngineError, match="gave no number"):
        observed(backend_on_cpu(nan, shape, library, 1, monkeypatch), model.prompt, frames=1)
