"""Trains encoder, quantiser and decoder together: `python -m mktts train codec`.

First by spectra and by what repeats, from `adversarial_from` on also by discriminators. From `joint_steps` on encoder
and codebooks stand still: codes made from then on are final, and talker and decoder can learn side by side.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mktts.model.backend import device_named
from mktts.spec import FRAME_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.losses import Discriminators, adversarial_losses, mel_distance, mel_loss, repetition
from mktts.training.codec.model import SIZES, Codec, CodecSizes
from mktts.training.data.audio import Crops
from mktts.training.state import STATE, StepGraphs, Trainer, adam, set_rate, train

_ALWAYS = 0x7FFF_FFFF  # step whose crops are measured after every block, so that lines compare
_DOUBLINGS = 9
_QUIET = 1e-4  # of levels at the start: -80 dBFS


@dataclass(frozen=True)
class CodecRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    steps: int = 40_000  # the learning rate falls to a twentieth over these
    block: int = 250  # steps, after which it is measured
    warmup_steps: int = 500
    batch: int = 16
    crop_frames: int = 28
    ahead_frames: int = 2  # at the end of a crop: heard by the encoder, not judged
    unheard_frames: int = 3  # at its beginning, but of a clip's: the decoder has not heard what comes before
    judged_frames: int = 12  # go to the discriminators
    joint_steps: int = 20_000
    adversarial_from: int = 4_000
    rate: float = 4e-4
    judge_rate: float = 2e-4
    averaged_steps: int = 1_000  # the weights that are kept are the mean over about as many
    onsets: float = 0.25  # share of the crops that begin where a clip does
    mel: float = 20.0
    repetition: float = 20.0
    onset: float = 0.02  # of few and faint samples: at 0.1 its gradient is twice that of mel
    commitment: float = 1.0
    spread: float = 1.0  # until `adversarial_from`
    adversarial: float = 3.0
    features: float = 10.0


class CodecTrainer(Trainer):
    """Codec and discriminators."""

    def __init__(
        self, recipe: CodecRecipe, sizes: CodecSizes, crops: Crops, device: str = "cpu", graphs: bool = False
    ) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`). On CUDA, products are in bf16 but near the waveform."""
        super().__init__(recipe, sizes)
        torch.manual_seed(recipe.seed)
        self.device, self.crops = torch.device(device), crops
        self.audio_s = recipe.batch * recipe.crop_frames / FRAME_RATE_HZ
        self.codec, self.judges = Codec(sizes).to(device), Discriminators(sizes.judges).to(device)
        self.modules = {"codec": self.codec, "judges": self.judges}
        self.steps = StepGraphs(self.device, graphs)
        for name, module in self.modules.items():
            self.optimizers[name] = adam(module.parameters(), self.device, betas=(0.8, 0.99), weight_decay=0.01)
        self.average = {
            f"codec.{name}": p.detach().clone()
            for name, p in self.codec.named_parameters()
            if not name.startswith("encoder.")  # of which the live weights make the codes
        }
        self._share = torch.ones((), device=self.device)  # of the newest weights in the average
        self._batches: Iterator[Tensor] | None = None
        self._first = round(recipe.onsets * recipe.batch)  # so many crops of a batch begin where a clip does
        heard = torch.ones(recipe.batch, recipe.crop_frames - recipe.ahead_frames)
        heard[self._first :, : recipe.unheard_frames] = 0
        self._heard = heard.repeat_interleave(SAMPLES_PER_FRAME, 1).bool().to(device)
        self._always = crops.batch(_ALWAYS, recipe.batch).to(device)

    def train_step(self) -> dict[str, Tensor]:
        r = self.recipe
        if self._batches is None:
            self._batches = self.crops.batches(self.step, r.batch)
        pcm = next(self._batches).to(self.device, non_blocking=True)
        torch.manual_seed(1_000_003 * r.seed + self.step)  # so a resumed run draws what this one would have
        if self.step == 0:
            with torch.no_grad():
                self.codec.quantizer.begin(self.codec.encoder(pcm))
        for optimizer, rate in zip(self.optimizers.values(), (r.rate, r.judge_rate), strict=True):
            set_rate(optimizer, rate * self.schedule())
        self._share.fill_(max(1 / (1 + self.step), 1 / r.averaged_steps))
        joint, adversarial = self.step < r.joint_steps, self.step >= r.adversarial_from
        judged = (r.crop_frames - r.ahead_frames - r.judged_frames) * SAMPLES_PER_FRAME
        start = torch.randint(judged + 1, (1,)).to(self.device)
        work = partial(self._step, joint=joint, adversarial=adversarial)
        losses = self.steps.run((joint, adversarial), work, pcm, start)
        self.step += 1
        return losses

    def _step(self, pcm: Tensor, start: Tensor, joint: bool, adversarial: bool) -> dict[str, Tensor]:
        r, quantizer = self.recipe, self.codec.quantizer
        losses: dict[str, Tensor] = {}
        with torch.set_grad_enabled(joint):
            rows = self.codec.encoder(pcm)  # in fp32, as `encoded` has it: codes depend on small differences
        if joint:
            if not adversarial:
                losses["spread"] = spread(rows)
            rows, losses["commitment"] = quantizer.learn(rows)
        else:
            rows = quantizer.summed(quantizer.encode(rows))
        with self._cast():
            heard = rows[:, : r.crop_frames - r.ahead_frames].transpose(1, 2)
            output = self.codec.decoder(quantizer.output_proj(heard))
        pcm = pcm[:, : output.shape[1]]
        output = torch.where(self._heard, output.float(), pcm)
        losses["mel"] = mel_loss(output, pcm)
        losses["repetition"], more = repetition(output, pcm)
        if self._first:
            losses["onset"] = onset(output[: self._first], pcm[: self._first])
        if adversarial:
            at = start + torch.arange(r.judged_frames * SAMPLES_PER_FRAME, device=self.device)
            real, fake = pcm.index_select(1, at), output.index_select(1, at)
            with self._cast():
                losses |= adversarial_losses(self.judges(real), self.judges(fake))
        goals = {"judges": losses.pop("judges")} if adversarial else {}
        goals = {"codec": sum(getattr(r, name) * loss for name, loss in losses.items()), **goals}
        for name, goal in goals.items():  # both have looked at the same copies once
            self.optimizers[name].zero_grad(set_to_none=True)
            goal.backward(inputs=list(self.modules[name].parameters()), retain_graph=name != list(goals)[-1])
        for name in goals:
            torch.nn.utils.clip_grad_norm_(self.modules[name].parameters(), 10.0)
            self.optimizers[name].step()
        self.follow(self._share)
        found = {"loss": goals.pop("codec"), **losses, "comb": more.max(), **goals}
        return {name: value.detach() for name, value in found.items()}

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Log-mel distance and comb of the live codec's copy of the same crops every time; and how many numbers the
        encoder says in a frame: of variances along the principal axes, (sum)^2 / sum of squares."""
        rows = self.codec.encoder(self._always)
        copy = self.codec.decode(self.codec.quantizer.encode(rows)).clone()
        distance, comb = mel_distance(copy, self._always), repetition(copy, self._always)[1].max()
        covariance = torch.cov(rows.flatten(0, 1).T)
        numbers = covariance.trace().square() / covariance.square().sum()
        return {"fixed_mel": float(distance), "fixed_comb": float(comb), "numbers": float(numbers)}

    def _cast(self) -> torch.autocast:
        # a cache of casts made while recording would not be made again when the graph is replayed
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=cuda, cache_enabled=not self.steps.recording)


def spread(rows: Tensor) -> Tensor:
    """How far the numbers of rows (B, T, vector) are from independent ones of variance 1.

    Alone, the encoder says what the decoder asks for, one number after the other, and commitment takes away the rest.
    """
    rows = rows.flatten(0, 1) - rows.mean((0, 1))
    covariance = rows.T @ rows / len(rows)  # not torch.cov, which looks at a value: a recorded step must not
    return (covariance - torch.eye(len(covariance), device=rows.device)).square().sum() / len(covariance)


def onset(pcm: Tensor, target: Tensor) -> Tensor:
    """Mean |difference| of levels (natural log, down to -80 dBFS) of parts of the first 21 ms of PCM (B, n).

    The parts are sample 0, sample 1, and from there each as long as all before it. The first samples count for
    themselves: layers that begin with a history of zeros, and not of what silence is to them, make a click of one.
    """
    heads = torch.stack((pcm, target))[..., : 2**_DOUBLINGS].square()
    parts = [heads[..., :1], *(heads[..., n : 2 * n] for n in map((2).__pow__, range(_DOUBLINGS)))]
    x, y = ((torch.stack([part.mean(-1) for part in parts]) + _QUIET**2).log() / 2).unbind(1)
    return (x - y).abs().mean()


EXAMPLES = """examples:
  python -m mktts train codec --data AUDIO --out CODEC --minutes 8.5
  python -m mktts train codec --data AUDIO --out CODEC --minutes 8.5 --resume --graphs

A run can be cut anywhere and go on with --resume. The last line of standard output is JSON: what was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, metavar="CODEC", help="folder for state, curves and codec")
    parser.add_argument("--size", choices=tuple(SIZES), default="voice", help="tiny is for tests (default: voice)")
    add_training_arguments(parser, CodecRecipe())


def add_training_arguments(parser: argparse.ArgumentParser, recipe: object) -> None:
    """What codec and talker have in common, and a flag for each of a recipe's figures."""
    parser.add_argument("--minutes", type=float, required=True, help="stop before this time is over")
    parser.add_argument("--plan", type=float, default=0, metavar="MINUTES", help="set --steps to what fits into these")
    parser.add_argument("--resume", action="store_true", help="go on from the state of --out, where there is one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    group = parser.add_argument_group("recipe")
    for name, value in asdict(recipe).items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Trains for a while. Raises CheckpointError for a state of another recipe, AudioError for the shards."""
    recipe = CodecRecipe(**{name: getattr(arguments, name) for name in asdict(CodecRecipe())})
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # shapes are few
    crops = Crops(arguments.data, recipe.crop_frames, recipe.seed, recipe.onsets)
    trainer = CodecTrainer(recipe, SIZES[arguments.size], crops, device_named(arguments.device), arguments.graphs)
    if arguments.resume and (arguments.out / STATE).is_file():
        trainer.load(arguments.out)
    print(f"{crops.hours:.2f} h of audio, from step {trainer.step}", flush=True)
    train(trainer, arguments.out, arguments.minutes, plan_minutes=arguments.plan)
    print(json.dumps({**trainer.curves[-1], "of_steps": trainer.recipe.steps}))
    return 0
