"""Two processes that train one talker together on the CPU."""

from __future__ import annotations

import atexit
import json
import os

import numpy as np
import pytest
import torch
from commands import run
from safetensors.torch import load_file
from test_training_talker import TEXTS, synthetic_clips, write_random_codec

from mktts.errors import EngineError
from mktts.training.data.talker_data import Batch
from mktts.training.talker import sizes
from mktts.training.talker.team import Gradients, Team, run_team
from mktts.training.talker.train import open_data
from mktts.training.talker.trainer import TalkerRecipe, TalkerTrainer

RECIPE = TalkerRecipe(steps=8, warmup_steps=2, batch_rows=160, dropout=0.0, code_noise=0.0, frame_noise=0.0)


def trainer_of(out, team=None) -> TalkerTrainer:
    data = open_data(synthetic_clips(TEXTS * 4), out, sizes.TINY, "cpu")
    return TalkerTrainer(data, RECIPE, team=team)


def learn_together(team: Team, device: str, out) -> None:
    """Work of one process: three steps, then its weights and the batches that it had."""
    trainer = trainer_of(out, team)
    seen = [trainer.batches[i] for i in range(3)]
    for _ in range(3):
        trainer.train_step()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    agreed = team.agreed(float(team.rank + 5))
    np.savez(out / f"rank{team.rank}.npz", weights=weights, clips=np.concatenate(seen), agreed=agreed)


def fail(team: Team, device: str) -> None:
    raise ValueError(f"rank {team.rank} of {team.size}")


def leave_badly(team: Team, device: str) -> None:
    atexit.register(os.abort)


@pytest.mark.slow
def test_how_a_process_is_torn_down_is_nothing_to_the_run(tmp_path):
    """Interpreters abort now and then where native threads are left at their end; the work is done by then."""
    run_team(leave_badly, ["cpu", "cpu"], tmp_path)


@pytest.mark.slow
def test_a_team_learns_what_one_learns_of_all_batches(tmp_path):
    trainer_of(tmp_path)  # the files of its folder
    run_team(learn_together, ["cpu", "cpu"], tmp_path, tmp_path)
    found = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    np.testing.assert_array_equal(found[0]["weights"], found[1]["weights"])
    assert not np.array_equal(found[0]["clips"], found[1]["clips"]), "each has its own batches"
    assert float(found[0]["agreed"]) == float(found[1]["agreed"]) == 5.0, "the first one's clock counts"
    assert not list(tmp_path.glob(".meeting*"))

    # the same by hand: gradients of both batches in one process, their mean, the optimizer's step
    alone = [trainer_of(tmp_path, Team(rank, 2)) for rank in range(2)]
    for _ in range(3):
        for rank, trainer in enumerate(alone):
            generator = np.random.default_rng((RECIPE.seed, 1, trainer.step, rank))
            batch = trainer.data.batch(trainer._next(), generator, RECIPE.predictor_share)
            trainer._look(*(getattr(batch, name) for name in Batch.__dataclass_fields__))
        mean = (alone[0].gradients.flat + alone[1].gradients.flat) / 2
        for trainer in alone:
            trainer.gradients.flat.copy_(mean)
            for group in trainer.optimizer.param_groups:
                group["lr"] = trainer.learning_rate()
            trainer._learn()
            trainer.step += 1
    by_hand = torch.cat([p.detach().flatten() for p in alone[0].model.parameters()])
    np.testing.assert_allclose(found[0]["weights"], by_hand, atol=1e-6)


def test_gradients_are_clipped_as_torch_does():
    layers = [torch.nn.Linear(3, 4) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    whole = Gradients(layers[0].parameters())
    for layer in layers:
        layer(torch.ones(2, 3)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(layers[1].parameters(), 0.1)
    whole.clip(0.1)
    for ours, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    whole.clear()
    assert all(not p.grad.any() for p in layers[0].parameters())


def test_one_that_fails_ends_the_team(tmp_path):
    with pytest.raises(EngineError, match="rank . of 2"):
        run_team(fail, ["cpu", "cpu"], tmp_path)


@pytest.mark.slow
def test_the_command_takes_several_devices_and_goes_on_with_one(tmp_path, capsys):
    clips = synthetic_clips(TEXTS * 4)
    (tmp_path / "codes").mkdir()
    shard = {"codes": clips.codes, "frames": np.diff(clips.starts), "speaker": clips.speakers, "text": clips.texts}
    np.savez(tmp_path / "codes" / "a.npz", **shard)
    codec = write_random_codec(tmp_path / "codec")
    command = [
        "train talker",
        "--codes",
        tmp_path / "codes",
        "--out",
        tmp_path / "out",
        "--size",
        "tiny",
        "--minutes",
        5,
    ]
    command += ["--codec", codec, "--batch-rows", 160, "--every", 2, "--resume"]
    run(*command, "--steps", 4, "--device", "cpu,cpu")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 4
    run(*command, "--steps", 6, "--device", "cpu")
    curves = json.loads((tmp_path / "out" / "talker_curves.json").read_text())
    assert [line["step"] for line in curves] == [2, 4, 4, 6, 6]
    assert load_file(tmp_path / "out" / "voice" / "model.safetensors")
