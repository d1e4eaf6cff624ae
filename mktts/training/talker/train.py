"""Trains talker and code predictor: `python -m mktts train talker`.

Batches, noise and dropout follow from seed and step. OUT holds the state (`mktts.training.state`), prepared/, tokenizer
and JSON files, and voice/, the whole checkpoint. Speech is encoded when a run begins: codes need not travel.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import read_json
from mktts.errors import CheckpointError, OptionsError
from mktts.model.backend import device_named
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import FRAME_RATE_HZ, NUM_CODEBOOKS, ModelConfig
from mktts.training.codec.model import Codec, load_codec
from mktts.training.codec.train import add_training_arguments
from mktts.training.state import CURVES, STATE, StepGraphs, Trainer, adam, averaged, set_rate, train
from mktts.training.talker.data import NO_TARGET, Batch, Clips, Sequences, held_out, read_clips
from mktts.training.talker.model import SIZES, TalkerModel, TalkerSizes, prepare, write_checkpoint

PREPARED, VOICE_FOLDER = "prepared", "voice"
_MEASURED_BATCHES = 8


@dataclass(frozen=True)
class TalkerRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    steps: int = 40_000  # the learning rate falls to a twentieth over these
    block: int = 250  # steps, after which it is measured
    warmup_steps: int = 300
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    batch_rows: int = 16_384  # padded
    predictor_share: float = 0.375  # of the padded rows: so many frames the predictor is trained on in a step
    predictor_weight: float = 1.0
    dropout: float = 0.05
    code_noise: float = 0.05  # previous codes replaced at random: the model must recover from its own slips
    frame_noise: float = 0.05  # previous frames replaced altogether
    ema: float = 0.9995


class TalkerTrainer(Trainer):
    """Talker and code predictor, and the place in the data."""

    def __init__(self, recipe: TalkerRecipe, sizes: TalkerSizes, data: Sequences, graphs: bool = False) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`). Raises CheckpointError where all texts are held out."""
        super().__init__(recipe, sizes)
        self.data = data
        self.audio_s = recipe.batch_rows / FRAME_RATE_HZ  # padding and prompts included
        self.model = TalkerModel(data.config, recipe.seed, recipe.dropout).to(data.device)
        self.modules = {"model": self.model}
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizers["adam"] = adam(groups, data.device, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
        self.average = {name: tensor.clone() for name, tensor in self.weights().items()}
        self.steps = StepGraphs(data.device, graphs)
        apart = np.array([held_out(text) for text in data.clips.texts])
        self.training, self.kept = np.flatnonzero(data.spoken & ~apart), np.flatnonzero(data.spoken & apart)
        if not len(self.training):
            raise CheckpointError("expected clips to train on, found none outside the held-out texts")
        self._epoch, self._batches, self._per_epoch = -1, list[np.ndarray](), [0]

    def train_step(self) -> dict[str, Tensor]:
        recipe = self.recipe
        generator = np.random.default_rng((recipe.seed, 1, self.step))
        batch = self.data.batch(self._dealt(), generator, recipe.predictor_share)
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)
        self.model.train()
        set_rate(self.optimizers["adam"], recipe.learning_rate * self.schedule())
        found = self.steps.run("step", self._step, *(getattr(batch, field.name) for field in fields(batch)))
        self.step += 1
        self.follow(1 - min(recipe.ema, self.step / (self.step + 10)))  # a young average forgets the start quickly
        return found

    def _step(self, *parts: Tensor) -> dict[str, Tensor]:
        """On the tensors of a `Batch`."""
        first, rest = self.losses(Batch(*parts), noisy=True)
        optimizer = self.optimizers["adam"]
        optimizer.zero_grad(set_to_none=True)
        (first + self.recipe.predictor_weight * rest).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        return {"code0": first.detach(), "codes": rest.detach()}

    def losses(self, batch: Batch, noisy: bool) -> tuple[Tensor, Tensor]:
        """Cross entropy of code 0 (end of speech included), and mean of codes 1-15. noisy: as in training."""
        previous = self._noise(batch.previous) if noisy else batch.previous
        cuda, caching = self.data.device.type == "cuda", not self.steps.recording  # a graph cannot keep casts for later
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=cuda, cache_enabled=caching):
            hidden = self.model.hidden(batch.text, batch.control, previous).flatten(0, 1)
            first = self.model.code0_logits(hidden)
            # not hidden[rows], whose gradient is sorted
            rest = self.model.predictor_logits(torch.index_select(hidden, 0, batch.rows), batch.codes)
        return (
            F.cross_entropy(first.float(), batch.target, ignore_index=NO_TARGET),
            F.cross_entropy(rest.float().flatten(0, 1), batch.codes[:, 1:].flatten()),
        )

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Losses of the averaged weights on held-out texts (on training ones where none are held out)."""
        live = {name: tensor.clone() for name, tensor in self.weights().items()}
        for name, tensor in self.weights().items():
            tensor.copy_(self.average[name])
        self.model.eval()
        generator = np.random.default_rng(self.recipe.seed)
        chosen = self.kept if len(self.kept) else self.training
        batches = self.data.epoch(chosen, self.recipe.batch_rows, generator)[:_MEASURED_BATCHES]
        found = [torch.stack(self.losses(self.data.batch(clips, generator), noisy=False)) for clips in batches]
        for name, tensor in self.weights().items():
            tensor.copy_(live[name])
        first, rest = torch.stack(found).mean(0).tolist()
        return {"held_out_code0": first, "held_out_codes": rest}

    @torch.no_grad()
    def begin_from(self, voice: Checkpoint) -> None:
        """Weights of another voice, whose tokenizer the data have, but for its codes: another codec means something
        else by them. Raises CheckpointError for weights of other sizes."""
        weights, size = voice.files.map(), self.data.config.predictor.vocab_size
        for name, p in self.model.w.hub().items():
            given = weights.get(name)
            if given is None or given.shape != p.shape:
                found = None if given is None else tuple(given.shape)
                raise CheckpointError(f"{voice.folder}: expected {name} of shape {tuple(p.shape)}, found {found}")
            first = size if any(part in name for part in ("codec_embedding", "codec_head", "lm_head")) else 0
            p[first:] = given[first:].to(p)  # what comes behind the codes are control ids
        self.average = {name: tensor.clone() for name, tensor in self.weights().items()}

    def _noise(self, codes: Tensor) -> Tensor:
        """Previous frames (B, T, 16), -1 for none, with what the model is not to rely on drawn anew."""
        recipe, size = self.recipe, self.data.config.predictor.vocab_size
        odds = torch.rand(*codes.shape[:-1], NUM_CODEBOOKS + 1, device=codes.device)
        replaced = (odds[..., 1:] < recipe.code_noise) | (odds[..., :1] < recipe.frame_noise)
        return torch.where(replaced & (codes >= 0), torch.randint_like(codes, size), codes)

    def _dealt(self) -> np.ndarray:
        """The batch of this step: epochs are dealt one after the other, each by its number."""
        while self.step >= self._per_epoch[-1]:
            self._epoch += 1
            generator = np.random.default_rng((self.recipe.seed, 0, self._epoch))
            self._batches = self.data.epoch(self.training, self.recipe.batch_rows, generator)
            self._per_epoch.append(self._per_epoch[-1] + len(self._batches))
        return self._batches[self.step - self._per_epoch[-2]]


def open_data(clips: Clips, out: Path, sizes: TalkerSizes, begun: Checkpoint, device: torch.device | str) -> Sequences:
    """Sequences with the configuration of `out`, which is made where it is not there yet, with the tokenizer of
    `begun`. Raises CheckpointError for clips that it does not suit."""
    folder = out / PREPARED
    if (folder / "config.json").is_file():
        config = ModelConfig.load(folder)
    else:
        config = prepare(folder, begun, sizes, list(dict.fromkeys(clips.speakers)))
    if strange := set(clips.speakers) - set(config.speakers):
        known = ", ".join(config.speakers)
        raise CheckpointError(f"expected the speakers {known}, found {', '.join(sorted(strange))}: use another --out")
    if int(clips.codes.max()) >= config.predictor.vocab_size:
        raise CheckpointError(f"expected codes below {config.predictor.vocab_size}, found {int(clips.codes.max())}")
    return Sequences(clips, config, TextTokenizer.load(folder), device)


def write_voice(out: Path, codec: Codec, sampling: Mapping[str, float] | None = None, best: bool = False) -> Path:
    """`out`/voice anew: the checkpoint of the averaged weights in `out`, the last or the best ones, and a codec.

    Raises CheckpointError without a state, or for a codec of other codes.
    """
    model = averaged(out, TalkerModel(ModelConfig.load(out / PREPARED)), "model", best)
    shutil.rmtree(out / VOICE_FOLDER, ignore_errors=True)
    return write_checkpoint(out / VOICE_FOLDER, out / PREPARED, model.w.hub(), codec, sampling)


EXAMPLES = """examples:
  python -m mktts train talker --data AUDIO --codec CODEC --out TALKER --minutes 8.5 --graphs
  python -m mktts train talker --data AUDIO --codec CODEC --out TALKER --minutes 8.5 --graphs --resume
  python -m mktts train talker --codec CODEC --out TALKER --minutes 0 --temperature 0.5 --best

A run can be cut anywhere and go on with --resume. TALKER/voice is the checkpoint, with the codec's decoder as it is;
--minutes 0 only writes it anew. The last line of standard output is JSON: what was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", type=Path, required=True, help="folder of `train codec`, past its joint steps")
    parser.add_argument("--data", type=Path, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, metavar="TALKER", help="folder for state and checkpoint")
    parser.add_argument("--begin", default="small", metavar="VOICE", help="whose tokenizer is taken (default: small)")
    parser.add_argument("--fresh", action="store_true", help="random weights; without it VOICE's, but the codes'")
    for name in ("--temperature", "--subtalker-temperature"):
        parser.add_argument(name, type=float, help="that the checkpoint is to name (default: VOICE's)")
    parser.add_argument("--best", action="store_true", help="write the weights of the least held-out losses")
    parser.add_argument("--size", choices=tuple(SIZES), default="voice", help="tiny is for tests (default: voice)")
    add_training_arguments(parser, TalkerRecipe())


def main(arguments: argparse.Namespace) -> int:
    """Trains for a while and writes the checkpoint. Raises CheckpointError and AudioError for what does not fit."""
    out, sizes, device = arguments.out, SIZES[arguments.size], device_named(arguments.device)
    recipe = TalkerRecipe(**{name: getattr(arguments, name) for name in asdict(TalkerRecipe())})
    if arguments.minutes > 0 and not arguments.data:
        raise OptionsError("expected --data beside --minutes, found none: add the folder of audio shards")
    codec = load_codec(arguments.codec, device)
    if arguments.minutes > 0:
        begun = open_checkpoint(arguments.begin)
        clips = read_clips(arguments.data, codec)
        trainer = TalkerTrainer(recipe, sizes, open_data(clips, out, sizes, begun, device), arguments.graphs)
        if arguments.resume and (out / STATE).is_file():
            trainer.load(out)
        elif not arguments.fresh:
            trainer.begin_from(begun)
        print(f"{len(clips.codes) / FRAME_RATE_HZ / 3600:.2f} h of speech, from step {trainer.step}", flush=True)
        train(trainer, out, arguments.minutes, plan_minutes=arguments.plan)
    names = ("temperature", "subtalker_temperature")
    write_voice(out, codec, {n: v for n in names if (v := getattr(arguments, n)) is not None}, arguments.best)
    print(json.dumps({**read_json(out / CURVES)[-1], "of_steps": recipe.steps}))
    return 0
