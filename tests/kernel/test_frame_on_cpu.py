"""The frame kernel's own source, run on the CPU in grids that do not divide: codes and errors are the oracles'."""

from __future__ import annotations

import pytest
import torch
from frame_on_cpu import COMPILER, observed

from mktts.kernel import grid
from mktts.kernel.grid import Shape
from mktts.measure.cards import FORCED_FRAMES, Model, error_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]


# Blocks of a group; rows that come at once. A share in several matrices; a remainder.
@pytest.mark.parametrize(("name", "group", "most_rows"), [("small", 3, 32), ("tiny-projected", 7, 128)])
def test_blocks_in_an_order_of_chance_make_the_oracles_frames(name, group, most_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    model = Model.make(name, "cpu")
    shape = Shape(model.config.talker, model.config.predictor, group * model.config.talker.num_key_value_heads)
    found = observed(model, shape, tmp_path, most_rows, seed=group)
    assert torch.equal(torch.stack([frame.codes for frame in found]), model.codes[:FORCED_FRAMES])
    ratio = error_of(found, model.exact) / model.bf16_error
    print(f"error {ratio:.3f} of bf16's")
    assert ratio <= 1.25
