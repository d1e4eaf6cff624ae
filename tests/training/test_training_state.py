"""State in small files: what rounding loses, and that a run which was cut goes on exactly."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from mktts.errors import CheckpointError
from mktts.training import state


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    steps: int = 12
    warmup_steps: int = 2
    block: int = 3
    rate: float = 0.05


class Line(state.Trainer):
    """Fits a line to points that follow from the step."""

    def __init__(self, recipe: Recipe, width: int = 70) -> None:
        super().__init__(recipe, Recipe())
        torch.manual_seed(recipe.seed)
        self.line = nn.Linear(width, 3)
        self.modules = {"line": self.line}
        self.optimizers = {"adam": torch.optim.AdamW(self.line.parameters(), recipe.rate)}
        self.average = {f"line.{name}": p.detach().clone() for name, p in self.line.named_parameters()}

    def train_step(self):
        torch.manual_seed(self.step)
        x = torch.randn(8, self.line.in_features)
        self.optimizers["adam"].param_groups[0]["lr"] = self.recipe.rate * self.schedule()
        self.optimizers["adam"].zero_grad()
        loss = (self.line(x) - x[:, :3]).square().mean()
        loss.backward()
        self.optimizers["adam"].step()
        self.step += 1
        self.follow(0.5)
        return {"loss": loss.detach()}


def everything(trainer: state.Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor, *_ in trainer.tensors()}


def clock(*seconds: float):
    return itertools.chain(seconds, itertools.repeat(seconds[-1])).__next__


def test_weights_keep_sixteen_bits_of_a_number_and_moments_four():
    values = torch.randn(1000) * torch.logspace(-9, 3, 1000)
    found = state.unpack(state.pack(values, "w"), "w", values.shape)
    assert ((found - values).abs() <= values.abs() * 2.0**-16).all()
    assert torch.equal(state.unpack(state.pack(found, "w"), "w", found.shape), found)
    near = torch.rand(10, 100) + 0.5
    eight = state.unpack(state.pack(near, "m"), "m", near.shape)
    assert ((eight - near).abs() <= near * 2.0**-4).all()
    assert state.pack(values, "w").nbytes == 3 * len(values) and state.pack(values, "m").nbytes < 1.1 * len(values)


def test_what_is_small_beside_others_is_not_rounded_to_nothing_where_that_would_break_a_step():
    values = torch.tensor([1.0, 1e-9, 0.0] + [0.0] * 61 + [0.0] * 64)
    assert state.unpack(state.pack(values, "m"), "m", values.shape)[1] == 0
    up = state.unpack(state.pack(values, "v"), "v", values.shape)
    assert (up[:64] > 0).all() and (up[64:] == 0).all() and up[0] == pytest.approx(1, rel=0.1)


def test_a_run_that_was_cut_repeats_the_whole_one(tmp_path):
    whole, cut = Line(Recipe()), Line(Recipe())
    state.train(whole, tmp_path / "whole", 1)
    state.train(cut, tmp_path / "cut", 1, clock(0, 0, 40))  # the second block would not end in time
    assert cut.step == 3
    resumed = Line(Recipe())
    resumed.load(tmp_path / "cut")
    state.train(resumed, tmp_path / "cut", 1)
    found, expected = everything(resumed), everything(whole)
    assert whole.step == resumed.step == 12 and all(torch.equal(found[name], expected[name]) for name in expected)
    losses = [[line["loss"] for line in trainer.curves] for trainer in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    averaged = state.averaged(tmp_path / "cut", nn.Linear(70, 3), "line")
    assert torch.equal(averaged.weight, whole.average["line.weight"]) and not averaged.training


def test_one_module_is_read_from_the_first_parts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "PART_BYTES", 2**18 + 700)
    line = Line(Recipe(steps=3))
    state.train(line, tmp_path, 1)
    parts = sorted(tmp_path.glob("state-*.safetensors"))
    parts[-1].unlink()
    averaged = state.averaged(tmp_path, nn.Linear(70, 3), "line")
    assert torch.equal(averaged.weight, line.average["line.weight"])


def test_parts_are_small_and_a_missing_or_damaged_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "PART_BYTES", 2**18 + 700)
    line = Line(Recipe(steps=3))
    state.train(line, tmp_path, 1)
    parts = sorted(tmp_path.glob("state-*.safetensors"))
    assert len(parts) > 2 and json.loads((tmp_path / "state.json").read_text())["step"] == 3
    data = parts[1].read_bytes()
    for change in (lambda: parts[1].write_bytes(data[:-1] + b"!"), parts[1].unlink):
        change()
        with pytest.raises(CheckpointError, match=parts[1].name):
            Line(Recipe()).load(tmp_path)


def test_another_recipe_is_refused_but_a_longer_schedule_is_not(tmp_path):
    state.train(Line(Recipe(steps=3)), tmp_path, 1)
    with pytest.raises(CheckpointError, match="seed"):
        Line(Recipe(seed=4)).load(tmp_path)
    longer = Line(replace(Recipe(), steps=6))
    longer.load(tmp_path)
    state.train(longer, tmp_path, 1)
    assert longer.step == 6 and len(list(tmp_path.glob("state-*"))) == 1


def test_the_rate_rises_and_falls_to_a_twentieth():
    line = Line(Recipe(steps=100, warmup_steps=10))
    found = []
    for line.step in (0, 9, 50, 100):
        found.append(line.schedule())
    assert found[0] == pytest.approx(0.1, abs=0.01) and found[1] > 0.95 and found[3] == pytest.approx(0.05)
