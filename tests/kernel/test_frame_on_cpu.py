"""The frame kernel's own source, run on the CPU in grids that do not divide: codes are the fp32 oracle's."""

from __future__ import annotations

import pytest
import torch
from frame_on_cpu import COMPILER, codes

from mktts.kernel import grid
from mktts.kernel.grid import Shape
from mktts.measure.cards import Model

FRAMES = 2
pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]


# Blocks of a group; rows that come at once. A share in several matrices and owners of 64 rows; blocks that own none.
@pytest.mark.parametrize(
    ("name", "group", "most_rows"), [("small", 3, 32), ("small", 3, 128), ("tiny-projected", 7, 128)]
)
def test_codes_are_the_oracles_in_an_order_of_chance(name, group, most_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    model = Model.make(name, "cpu")
    shape = Shape(model.config.talker, model.config.predictor, group * model.config.talker.num_key_value_heads)
    assert torch.equal(codes(model, shape, FRAMES, tmp_path, most_rows, seed=group), model.codes[:FRAMES])
