"""State in small files: that a run which was cut goes on exactly, and what another session begins with."""

import itertools
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


def test_a_run_that_was_cut_repeats_the_whole_one(tmp_path):
    whole, cut = Line(Recipe()), Line(Recipe())
    state.train(whole, tmp_path / "whole", 1)
    seconds = itertools.chain((0, 0), itertools.repeat(40))
    state.train(cut, tmp_path / "cut", 1, seconds.__next__)  # the second block would not end in time
    assert cut.step == 3
    resumed = Line(Recipe())
    resumed.load(tmp_path / "cut")
    state.train(resumed, tmp_path / "cut", 1)
    found, expected = resumed.state(), whole.state()
    assert whole.step == resumed.step == 12
    for part in ("weights", "average", "moments"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
    losses = [[line["loss"] for line in trainer.curves] for trainer in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1] < losses[0][0]


def test_a_missing_or_damaged_file_is_named(tmp_path):
    state.train(Line(Recipe(steps=3)), tmp_path, 1)
    path = tmp_path / state.STATE
    assert state.read_state(tmp_path)["step"] == 3
    for change in (lambda: path.write_bytes(path.read_bytes()[:-100]), path.unlink):
        change()
        with pytest.raises(CheckpointError, match=path.name):
            Line(Recipe()).load(tmp_path)


def test_another_recipe_is_refused_but_a_longer_schedule_is_not(tmp_path):
    state.train(Line(Recipe(steps=3)), tmp_path, 1)
    with pytest.raises(CheckpointError, match="seed"):
        Line(Recipe(seed=4)).load(tmp_path)
    longer = Line(replace(Recipe(), steps=6))
    longer.load(tmp_path)
    state.train(longer, tmp_path, 1)
    assert longer.step == 6 and {path.name for path in tmp_path.iterdir()} == {state.STATE, state.LIGHT}


def test_another_session_begins_with_light_weights_and_warms_up_again(tmp_path):
    line = Line(Recipe(steps=6))
    state.train(line, tmp_path, 1)
    size, light = ((f / state.STATE).stat().st_size for f in (tmp_path, tmp_path / state.LIGHT))
    assert light < size / 2
    again = Line(Recipe())
    again.load(tmp_path / state.LIGHT)
    assert again.step == again.begun == 6 and again.schedule() < 0.4 and again.curves == line.curves
    assert torch.equal(again.line.weight, line.average["line.weight"].bfloat16().float())
    assert torch.equal(again.average["line.weight"], again.line.weight)
    state.train(again, tmp_path, 1)
    longer = Line(replace(Recipe(), steps=15))
    longer.load(tmp_path)
    assert longer.step == 12 and longer.begun == 6


def test_the_steps_become_what_fits_into_the_time(tmp_path):
    line = Line(Recipe(steps=100_000))
    state.train(line, tmp_path, 1, itertools.count(0, 5).__next__, plan_minutes=2)
    assert 3 <= line.step < line.recipe.steps < 60 and state.read_state(tmp_path)["step"] == line.step


def test_a_loss_that_is_no_number_is_never_written(tmp_path):
    line = Line(Recipe())
    line.line.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="expected numbers"):
        state.train(line, tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_the_rate_rises_and_falls_to_a_twentieth():
    line = Line(Recipe(steps=100, warmup_steps=10))
    found = []
    for line.step in (0, 9, 100):
        found.append(line.schedule())
    assert found[0] == pytest.approx(0.1, abs=0.01) and found[1] > 0.95 and found[2] == pytest.approx(0.05)
