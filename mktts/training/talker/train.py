"""Trains talker and code predictor: `python -m mktts train talker`.

A run can be cut anywhere and go on with `--resume`: `talker.pt` holds everything the next step depends on; batches,
noise and dropout follow from the seed and the step. The learning rate falls with the step (`--steps`), so that slices
of any length give one schedule (`--by-clock` ends it within the slice instead). `talker_curves.json` holds the printed
lines, `prepared/` the tokenizer and JSON files. With `--follow`, shards that arrive during training join at the next
epoch: teacher, encoder and training can run side by side (which no second run repeats). With `--codec` (a
speech_tokenizer folder) the whole checkpoint is written to `voice/` at the end of a slice.
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
from mktts.training.data.talker_data import NO_TARGET, Batch, Clips, Following, Sequences, held_out
from mktts.training.talker.checkpoint import prepare, write_checkpoint
from mktts.training.talker.model import TalkerModel
from mktts.training.talker.sizes import TINY, VOICE, TalkerSizes
from mktts.training.talker.step_graph import StepGraphs, adam, set_rate

STATE, CURVES, PREPARED, VOICE_FOLDER = "talker.pt", "talker_curves.json", "prepared", "voice"
_SIZES = {"voice": VOICE, "tiny": TINY}


@dataclass(frozen=True)
class TalkerRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    steps: int = 12_000  # the learning rate falls to a twentieth over these
    warmup_steps: int = 300
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    batch_rows: int = 16_384  # padded
    predictor_share: float = 0.375  # of the padded rows: so many frames the predictor is trained on in a step
    predictor_weight: float = 1.0
    label_smoothing: float = 0.0
    dropout: float = 0.05
    code_noise: float = 0.05  # previous codes replaced at random: the model must recover from its own slips
    frame_noise: float = 0.05  # previous frames replaced altogether
    ema: float = 0.999


class TalkerTrainer:
    """Model, moving average, optimizer and place in the data."""

    def __init__(
        self,
        data: Sequences,
        recipe: TalkerRecipe,
        *,
        graphs: bool = False,
        more: Callable[[], Clips] | None = None,
    ) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`). more: clips that have come since it was last called."""
        self.recipe, self.data, self.more = recipe, data, more
        self.model = TalkerModel(data.config, recipe.seed, recipe.dropout).to(data.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.graphs = StepGraphs(data.device) if graphs else None
        self.optimizer = adam(groups, data.device, graphs, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
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
        recipe = self.recipe
        batch = self.data.batch(
            self._next(), np.random.default_rng((recipe.seed, 1, self.step)), recipe.predictor_share
        )
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)
        self.model.train()
        set_rate(self.optimizer, self.learning_rate())
        parts = tuple(getattr(batch, name.name) for name in fields(batch))
        found = self.graphs.run("step", self._learn, *parts) if self.graphs else self._learn(*parts)
        self.step += 1
        keep = min(recipe.ema, self.step / (self.step + 10))  # a young average forgets the start quickly
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in self.model.parameters()], 1 - keep)
        return found

    def _learn(self, *parts: Tensor) -> dict[str, Tensor]:
        """Forward, backward and the optimizer's step on the tensors of a `Batch`."""
        first, rest = self.losses(Batch(*parts), noisy=True)
        self.optimizer.zero_grad(set_to_none=True)
        (first + self.recipe.predictor_weight * rest).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"code0": first.detach(), "codes": rest.detach()}

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
        usable = [i for i in range(first, len(data.frames)) if data.frames[i] and len(data.ids[i])]
        apart = [held_out(data.clips.texts[i]) for i in usable]
        numbers, kept = np.array(usable, np.int64), np.array(apart, bool)
        self.kept = np.concatenate((self.kept, numbers[kept]))
        self.training = np.concatenate((self.training, numbers[~kept]))

    def _deal(self) -> None:
        generator = np.random.default_rng((self.recipe.seed, 0, self.epoch))
        self.batches = self.data.epoch(self.training, self.recipe.batch_rows, generator)

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
        config = prepare(folder, dict.fromkeys(t for t in clips.texts if not held_out(t)), sizes)
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
) -> None:
    """Trains until the minutes or the recipe's steps end; saves, reports and evaluates every so often.

    by_clock: the schedule goes from where it is to its end in these minutes, however many steps they hold. clock: gives
    seconds.
    """
    started_s = reported_s = clock()
    recipe = trainer.recipe
    begun, last = min(1.0, trainer.step / recipe.steps), math.inf if by_clock else recipe.steps
    while trainer.step < last and (passed := (clock() - started_s) / (60 * minutes)) < 1:
        if by_clock:
            trainer.progress = begun + (1 - begun) * passed
        losses = trainer.train_step()
        if trainer.step % every == 0:
            line = {"step": trainer.step, "epoch": trainer.epoch, "lr": trainer.learning_rate()}
            line |= {name: float(value) for name, value in losses.items()}
            line["step_s"] = (clock() - reported_s) / every
            if trainer.step % (10 * every) == 0:
                line |= trainer.evaluate()
                trainer.save(out / STATE)
            reported_s = clock()
            trainer.curves.append(line)
            print(" ".join(f"{k} {v:.4g}" for k, v in line.items()), flush=True)
    trainer.curves.append({"step": trainer.step, "epoch": trainer.epoch, **trainer.evaluate()})
    print(" ".join(f"{k} {v:.4g}" for k, v in trainer.curves[-1].items()), flush=True)
    trainer.save(out / STATE)
    write_whole(out / CURVES, json.dumps(trainer.curves, indent=1).encode())


EXAMPLES = """examples:
  python -m mktts train talker --codes CODES --codec CODEC/speech_tokenizer --out OUT --minutes 60
  python -m mktts train talker --codes CODES --codec CODEC/speech_tokenizer --out OUT --minutes 60 --resume

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
    parser.add_argument("--size", choices=tuple(_SIZES), default="voice", help="tiny: for tests (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    recipe = parser.add_argument_group("recipe")
    for name, value in asdict(TalkerRecipe()).items():
        flag = f"--{name.replace('_', '-')}"
        recipe.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Trains for a slice of time. Raises CheckpointError and AudioError for what does not fit together."""
    out = arguments.out
    recipe = TalkerRecipe(**{name: getattr(arguments, name) for name in asdict(TalkerRecipe())})
    following = Following(arguments.codes)
    data = open_data(following(), out, _SIZES[arguments.size], device_named(arguments.device))
    trainer = TalkerTrainer(data, recipe, graphs=arguments.graphs, more=following if arguments.follow else None)
    if arguments.weights:
        trainer.begin_from(arguments.weights)
    if arguments.resume and (out / STATE).is_file():
        trainer.load(out / STATE)
    train(trainer, out, arguments.minutes, by_clock=arguments.by_clock)
    if arguments.codec:
        shutil.rmtree(out / VOICE_FOLDER, ignore_errors=True)
        write_checkpoint(out / VOICE_FOLDER, out / PREPARED, trainer.average, arguments.codec)
    print(json.dumps({"of_steps": recipe.steps, **trainer.curves[-1]}))
    return 0
