"""Trains talker and code predictor: `python -m mktts train talker`.

A run can be cut anywhere and go on with `--resume`: `talker.pt` holds everything the next step depends on; batches,
noise and dropout follow from the seed and the step. The learning rate falls with the step (`--steps`), so that slices
of any length give one schedule (`--by-clock` ends it within the slice instead). `talker_curves.json` holds the printed
lines, `prepared/` the tokenizer and JSON files. With `--follow`, shards that arrive during training join at the next
epoch: teacher, encoder and training can run side by side (which no second run repeats). With `--codec` (a
speech_tokenizer folder) the whole checkpoint is written to `voice/` at the end of a slice.

Several devices (`--device cuda:0,cuda:1`) are one process each: every one has its own batches of the same epoch, and
gradients are averaged. The first one reports, evaluates and saves.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.model.backend import device_named
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import NUM_CODEBOOKS, ModelConfig
from mktts.training.data.forms import spread
from mktts.training.data.talker_data import NO_TARGET, Batch, Clips, Following, Sequences, held_out
from mktts.training.talker.checkpoint import prepare, write_checkpoint
from mktts.training.talker.model import TalkerModel
from mktts.training.talker.sizes import SMALL, TINY, VOICE, TalkerSizes
from mktts.training.talker.step_graph import StepGraphs, adam, set_rate
from mktts.training.talker.team import Gradients, Team, run_team

STATE, CURVES, PREPARED, VOICE_FOLDER = "talker.pt", "talker_curves.json", "prepared", "voice"
SIZES = {"voice": VOICE, "small": SMALL, "tiny": TINY}


@dataclass(frozen=True)
class TalkerRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    steps: int = 12_000  # the learning rate falls to a twentieth over these
    warmup_steps: int = 300
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    batch_rows: int = 16_384  # padded
    predictor_share: float = 0.375  # of the padded rows: so many frames the predictor is trained on in a step
    predictor_weight: float = 1.0
    label_smoothing: float = 0.0
    dropout: float = 0.08
    code_noise: float = 0.05  # previous codes replaced at random: the model must recover from its own slips
    frame_noise: float = 0.05  # previous frames replaced altogether
    ema: float = 0.9995


class TalkerTrainer:
    """Model, moving average, optimizer and place in the data."""

    def __init__(
        self,
        data: Sequences,
        recipe: TalkerRecipe,
        *,
        graphs: bool = False,
        more: Callable[[], Clips] | None = None,
        team: Team | None = None,
    ) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`). more: clips that have come since it was last called.

        team: the processes that train together, all with the same data and recipe; None: this one alone.
        """
        self.recipe, self.data, self.more, self.team = recipe, data, more, team or Team()
        self.model = TalkerModel(data.config, recipe.seed, recipe.dropout).to(data.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.graphs = StepGraphs(data.device) if graphs else None
        self.optimizer = adam(groups, data.device, graphs, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
        self.gradients = Gradients(self.model.parameters())
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.step = self.epoch = self.position = 0
        self.progress: float | None = None  # of the schedule; None: step over steps
        self.curves: list[dict[str, float]] = []
        self.kept = self.training = np.empty(0, np.int64)
        self._sort(0)
        if not len(self.training):
            raise CheckpointError("expected clips to train on, found none outside the held-out texts")
        self._deal()

    def losses(self, batch: Batch, noisy: bool) -> tuple[Tensor, Tensor]:
        """Cross entropy of code 0 (end of speech included), and mean of codes 1-15."""
        recipe = self.recipe
        previous = self._noise(batch.previous) if noisy else batch.previous
        smoothing = recipe.label_smoothing if noisy else 0.0
        cuda, caching = self.data.device.type == "cuda", self.graphs is None  # a graph cannot keep casts for later
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=cuda, cache_enabled=caching):
            hidden = self.model.hidden(batch.text, batch.control, previous).flatten(0, 1)
            first = self.model.code0_logits(hidden)
            # not hidden[rows], whose gradient is sorted
            rest = self.model.predictor_logits(torch.index_select(hidden, 0, batch.rows), batch.codes)
        return (
            F.cross_entropy(first.float(), batch.target, label_smoothing=smoothing, ignore_index=NO_TARGET),
            F.cross_entropy(rest.float().flatten(0, 1), batch.codes[:, 1:].flatten(), label_smoothing=smoothing),
        )

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step; the losses, on the device (nothing here waits for it)."""
        recipe, rank = self.recipe, self.team.rank
        batch = self.data.batch(
            self._next(), np.random.default_rng((recipe.seed, 1, self.step, rank)), recipe.predictor_share
        )
        torch.manual_seed(recipe.seed * 1_000_003 + self.step + 7_919 * rank)
        self.model.train()
        set_rate(self.optimizer, self.learning_rate())
        parts = tuple(getattr(batch, name.name) for name in fields(batch))
        run = self.graphs.run if self.graphs else lambda _, work, *inputs: work(*inputs)
        found = run("gradients", self._look, *parts)
        found = {name: loss.clone() for name, loss in found.items()}  # the next graph may write where they lie
        self.team.average(self.gradients.flat)  # between two graphs: an exchange is no part of either
        run("update", self._learn)
        self.step += 1
        keep = min(recipe.ema, self.step / (self.step + 10))  # a young average forgets the start quickly
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.model.parameters()], 1 - keep)
        return found

    def _look(self, *parts: Tensor) -> dict[str, Tensor]:
        """Losses and gradients on the tensors of a `Batch`."""
        first, rest = self.losses(Batch(*parts), noisy=True)
        self.gradients.clear()
        (first + self.recipe.predictor_weight * rest).backward()
        return {"code0": first.detach(), "codes": rest.detach()}

    def _learn(self) -> dict[str, Tensor]:
        """The optimizer's step."""
        self.gradients.clip(1.0)
        self.optimizer.step()
        return {}

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        recipe = self.recipe
        done = min(1.0, self.step / recipe.steps) if self.progress is None else self.progress
        warm = min(1.0, (self.step + 1) / recipe.warmup_steps)
        return recipe.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def evaluate(self, batches: int = 8) -> dict[str, float]:
        """Losses of the averaged weights on held-out texts (on training ones where none are held out)."""
        live = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._load(self.average)
        self.model.eval()
        generator = np.random.default_rng(self.recipe.seed)
        chosen = self.kept if len(self.kept) else self.training
        found = []
        for clips in self.data.epoch(chosen, self.recipe.batch_rows, generator)[:batches]:
            found.append(torch.stack(self.losses(self.data.batch(clips, generator), noisy=False)))
        self._load(live)
        first, rest = torch.stack(found).mean(0).tolist()
        return {"held_out_code0": first, "held_out_codes": rest}

    def save(self, path: Path) -> None:
        data = io.BytesIO()
        state = {"recipe": asdict(self.recipe), "model": self.model.state_dict(), "average": self.average}
        state |= {"optimizer": self.optimizer.state_dict(), "curves": self.curves}
        torch.save(state | {"place": (self.step, self.epoch, self.position)}, data)
        write_whole(path, data.getvalue())

    def load(self, path: Path) -> None:
        """Raises CheckpointError for a state of another recipe (`steps` may differ)."""
        state = torch.load(path, map_location=self.data.device, weights_only=True)
        here, there = ({k: v for k, v in r.items() if k != "steps"} for r in (asdict(self.recipe), state["recipe"]))
        if here != there:
            raise CheckpointError(f"{path}: expected the recipe {here}, found {there}: use another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.curves = state["average"], state["curves"]
        self.step, self.epoch, self.position = state["place"]
        self._deal()

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def _noise(self, codes: Tensor) -> Tensor:
        recipe = self.recipe
        odds = torch.rand(*codes.shape[:-1], NUM_CODEBOOKS + 1, device=codes.device)
        replaced = (odds[..., 1:] < recipe.code_noise) | (odds[..., :1] < recipe.frame_noise)
        other = torch.randint_like(codes, self.data.config.predictor.vocab_size)
        return torch.where(replaced & (codes >= 0), other, codes)

    def begin_from(self, path: Path) -> None:
        """Weights of a model.safetensors, instead of random ones. Raises CheckpointError for another model's."""
        weights = load_file(path)
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: expected the weights of this model: {error}") from None
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _sort(self, first: int) -> None:
        """Clips from number `first` on are to train on, or held out."""
        data = self.data
        usable = [first + i for i in np.flatnonzero(data.spoken[first:])]
        apart = [held_out(data.clips.texts[i]) for i in usable]
        numbers, kept = np.array(usable, np.int64), np.array(apart, bool)
        self.kept = np.concatenate((self.kept, numbers[kept]))
        self.training = np.concatenate((self.training, numbers[~kept]))

    def _deal(self) -> None:
        generator = np.random.default_rng((self.recipe.seed, 0, self.epoch))
        dealt = self.data.epoch(self.training, self.recipe.batch_rows, generator)
        size = self.team.size
        dealt += dealt[: -len(dealt) % size] if len(dealt) >= size else dealt * size  # as many for each
        self.batches = dealt[self.team.rank :: size][: -(-len(dealt) // size)]

    def _next(self) -> np.ndarray:
        if self.position == len(self.batches):
            self.epoch, self.position = self.epoch + 1, 0
            if self.more is not None:
                first, new = len(self.data.frames), self.more()
                if new.texts:  # adding copies all that is there
                    self.data.add(new)
                    self._sort(first)
            self._deal()
        self.position += 1
        return self.batches[self.position - 1]


def open_data(clips: Clips, out: Path, sizes: TalkerSizes, device: torch.device | str) -> Sequences:
    """Sequences with the tokenizer and configuration of `out`, which are made where they are not there yet."""
    folder = out / PREPARED
    if (folder / "config.json").is_file():
        config = ModelConfig.load(folder)
    else:
        texts = dict.fromkeys(text for text in clips.texts if not held_out(text))
        config = prepare(folder, spread(texts), sizes, list(dict.fromkeys(clips.speakers)))
    if strange := set(clips.speakers) - set(config.speakers):
        known = ", ".join(config.speakers)
        raise CheckpointError(f"expected the speakers {known}, found {', '.join(sorted(strange))}: use another --out")
    if int(clips.codes.max()) >= config.predictor.vocab_size:
        raise CheckpointError(f"expected codes below {config.predictor.vocab_size}, found {int(clips.codes.max())}")
    return Sequences(clips, config, TextTokenizer.load(folder), device)


def train(
    trainer: TalkerTrainer,
    out: Path,
    minutes: float,
    every: int = 100,
    by_clock: bool = False,
    clock: Callable[[], float] = time.monotonic,
    save_every_s: float = 60.0,
) -> None:
    """Trains until the minutes or the recipe's steps end; reports every so many steps, evaluates every tenth time.

    The state is saved with a report, once `save_every_s` have passed since it was last.

    by_clock: the schedule goes from where it is to its end in these minutes, however many steps they hold. clock: gives
    seconds.
    """
    started_s = reported_s = saved_s = clock()
    recipe, team = trainer.recipe, trainer.team
    begun, last = min(1.0, trainer.step / recipe.steps), math.inf if by_clock else recipe.steps
    while trainer.step < last and (passed := team.agreed((clock() - started_s) / (60 * minutes))) < 1:
        if by_clock:
            trainer.progress = begun + (1 - begun) * passed
        losses = trainer.train_step()
        if trainer.step % every == 0 and team.leads:
            line = {"step": trainer.step, "epoch": trainer.epoch, "lr": trainer.learning_rate()}
            line |= {name: float(value) for name, value in losses.items()}
            line["step_s"] = (clock() - reported_s) / every
            line["seconds"] = clock() - started_s
            if trainer.step % (10 * every) == 0:
                line |= trainer.evaluate()
            reported_s = clock()
            _report(trainer, line, out)
            if clock() - saved_s >= save_every_s:
                trainer.save(out / STATE)
                saved_s = clock()
    if team.leads:
        _report(trainer, {"step": trainer.step, "epoch": trainer.epoch, **trainer.evaluate()}, out)
        trainer.save(out / STATE)


def _report(trainer: TalkerTrainer, line: dict[str, float], out: Path) -> None:
    """Prints a line and puts it beside the others; the file is whole at any time."""
    trainer.curves.append(line)
    print(" ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)
    write_whole(out / CURVES, json.dumps(trainer.curves, indent=1).encode())


EXAMPLES = """examples:
  python -m mktts train talker --codes CODES --codec CODEC/speech_tokenizer --out OUT --minutes 60
  python -m mktts train talker --codes CODES --codec CODEC/speech_tokenizer --out OUT --minutes 60 --resume
  python -m mktts train talker --codes CODES --out OUT --minutes 20 --by-clock --graphs --device cuda:0,cuda:1

A run can be cut anywhere and go on with --resume: OUT/talker.pt holds everything. OUT/voice is the checkpoint, with
--codec, and OUT/talker_curves.json the printed lines. The last line of standard output is JSON: what was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codes", type=Path, required=True, help="folder of codes shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for state, curves and the checkpoint")
    parser.add_argument("--minutes", type=float, required=True, help="stop after this time")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/talker.pt where it is")
    parser.add_argument("--by-clock", action="store_true", help="end the schedule in this slice's minutes")
    parser.add_argument("--weights", type=Path, help="model.safetensors to begin from, instead of random weights")
    parser.add_argument("--follow", action="store_true", help="shards that arrive later join at the next epoch")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    parser.add_argument("--codec", type=Path, help="speech_tokenizer folder: the checkpoint is then written")
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="voice", help="tiny is for tests (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:1, or several: cuda:0,cuda:1 (default: auto)")
    parser.add_argument("--every", type=int, default=100, help="steps between progress lines (default: %(default)s)")
    parser.add_argument("--save-every-s", type=float, default=60.0, help="seconds (default: %(default)s)")
    recipe = parser.add_argument_group("recipe")
    for name, value in asdict(TalkerRecipe()).items():
        flag = f"--{name.replace('_', '-')}"
        recipe.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Trains for a slice of time. Raises CheckpointError and AudioError for what does not fit together."""
    devices = arguments.device.split(",")
    if len(devices) == 1:
        _train(Team(), devices[0], arguments)
    else:
        open_data(Following(arguments.codes)(), arguments.out, SIZES[arguments.size], "cpu")  # files, and their errors
        run_team(_train, devices, arguments.out, arguments)
    if arguments.codec:
        write_voice(arguments.out, arguments.codec)
    print(json.dumps({"of_steps": arguments.steps, **json.loads((arguments.out / CURVES).read_bytes())[-1]}))
    return 0


def write_voice(out: Path, codec: Path, to: Path | None = None) -> Path:
    """The checkpoint folder `to` (default: `out`/voice) anew, of the state that `out` holds and a codec's folder.

    Raises CheckpointError without a state, or for a codec of other codes.
    """
    path = out / STATE
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a state of `train talker`, found nothing: train first")
    average = torch.load(path, map_location="cpu", weights_only=True)["average"]
    folder = to or out / VOICE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(folder, out / PREPARED, average, codec)


def _train(team: Team, device: str, arguments: argparse.Namespace) -> None:
    """One process's part of a slice."""
    out, following = arguments.out, Following(arguments.codes)
    recipe = TalkerRecipe(**{name: getattr(arguments, name) for name in asdict(TalkerRecipe())})
    data = open_data(following(), out, SIZES[arguments.size], device_named(device))
    more = following if arguments.follow else None
    trainer = TalkerTrainer(data, recipe, graphs=arguments.graphs, more=more, team=team)
    if arguments.weights:
        trainer.begin_from(arguments.weights)
    if arguments.resume and (out / STATE).is_file():
        trainer.load(out / STATE)
    train(trainer, out, arguments.minutes, arguments.every, arguments.by_clock, save_every_s=arguments.save_every_s)
