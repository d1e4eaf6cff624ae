"""One step of the talker's training, and all state that the next step depends on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS
from mktts.training.codec.quantizer import redrawn
from mktts.training.data.talker_data import NO_TARGET, Batch, Clips, Sequences, held_out
from mktts.training.talker.model import TalkerModel
from mktts.training.talker.step_graph import StepGraphs, adam, set_rate
from mktts.training.talker.team import Gradients, Team


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
    noise_books: int = 0  # the codec's last ones: drawn anew in every batch, and never foretold


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
        """Cross entropy of code 0 (end of speech included), and mean of codes 1-15 but those of the noise books.

        noisy: as in training, with codes replaced at random, and those of the noise books drawn anew.
        """
        recipe = self.recipe
        previous = self._noise(batch.previous) if noisy else batch.previous
        smoothing = recipe.label_smoothing if noisy else 0.0
        cuda, caching = self.data.device.type == "cuda", self.graphs is None  # a graph cannot keep casts for later
        with torch.autocast(self.data.device.type, torch.bfloat16, enabled=cuda, cache_enabled=caching):
            hidden = self.model.hidden(batch.text, batch.control, previous).flatten(0, 1)
            first = self.model.code0_logits(hidden)
            # not hidden[rows], whose gradient is sorted
            books = NUM_CODEBOOKS - 1 - recipe.noise_books
            rest = self.model.predictor_logits(torch.index_select(hidden, 0, batch.rows), batch.codes, books)
        wanted = batch.codes[:, 1 : books + 1].flatten()
        return (
            F.cross_entropy(first.float(), batch.target, label_smoothing=smoothing, ignore_index=NO_TARGET),
            F.cross_entropy(rest.float().flatten(0, 1), wanted, label_smoothing=smoothing),
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
        then = asdict(TalkerRecipe()) | state["recipe"]  # a choice that came later was the default then
        here, there = ({k: v for k, v in r.items() if k != "steps"} for r in (asdict(self.recipe), then))
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
        """Previous frames (B, T, 16), -1 for none, with what the model is not to rely on drawn anew."""
        recipe, size = self.recipe, self.data.config.predictor.vocab_size
        codes = torch.where(codes >= 0, redrawn(codes, recipe.noise_books, size), codes)
        odds = torch.rand(*codes.shape[:-1], NUM_CODEBOOKS + 1, device=codes.device)
        replaced = (odds[..., 1:] < recipe.code_noise) | (odds[..., :1] < recipe.frame_noise)
        other = torch.randint_like(codes, size)
        return torch.where(replaced & (codes >= 0), other, codes)

    @torch.no_grad()
    def begin_from(self, voice: Checkpoint, same_codec: bool = False) -> None:
        """Weights of another voice, whose tokenizer the data have, instead of random ones.

        What stands for codes (their embeddings and heads) stays random, unless the codes are of that voice's codec
        (`same_codec`): another means something else by them. Raises CheckpointError for weights of other sizes.
        """
        weights, size = voice.files.map(), self.data.config.predictor.vocab_size
        parts = () if same_codec else ("codec_embedding", "codec_head", "lm_head")
        codes = [name for name in weights if any(part in name for part in parts)]
        ours = {name: p[:size].clone() for name, p in self.model.named_parameters() if name in codes}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"{voice.folder}: expected the weights of this model: {error}") from None
        for name, rows in ours.items():  # what comes behind the codes are control ids
            self.model.get_parameter(name)[:size] = rows
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
