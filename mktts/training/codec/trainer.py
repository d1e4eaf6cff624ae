"""One step of the codec's training, and all state that the next step depends on."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.spec import SAMPLES_PER_FRAME
from mktts.training.codec.defects import LAGS_S, onset, repetition
from mktts.training.codec.losses import Discriminators, deceiving_losses, judges_loss, spectral_losses
from mktts.training.codec.model import Codec
from mktts.training.codec.sizes import CodecSizes
from mktts.training.talker.step_graph import StepGraphs, adam, set_rate

_SAVED = ("codec", "average", "judges", "optimizer", "judge_optimizer")


@dataclass(frozen=True)
class CodecRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    batch: int = 12
    crop_frames: int = 26
    steps: int = 12_000  # the learning rate falls to a fiftieth over these: silence takes small steps
    warmup_steps: int = 200
    rate: float = 1e-3
    judge_rate: float = 3e-4
    adversarial_from: int | None = None  # step at which discriminators join; None: never
    judged_frames: int = 12  # of each crop go to the discriminators, which cost five times the decoder's work
    mel: float = 15.0
    stft: float = 5.0
    wave: float = 0.0  # codes do not say phases: of all waveforms they may stand for, the middle is silence
    adversarial: float = 1.0
    features: float = 5.0
    draws: int = 2  # renderings of a crop by independent noise; 1: the plain distances, for a codec without noise
    repetition: float = 5.0
    onset: float = 1.0
    onsets: float = 0.25  # share of the crops that begin where a clip does
    unheard_frames: int = 3  # of all other crops: their decoder has not heard what comes before
    averaged_steps: int = 1_000  # the weights that are kept are the mean over about as many


class CodecTrainer:
    """Codec, discriminators, optimisers and the step they are at."""

    def __init__(
        self,
        recipe: CodecRecipe,
        codec: Codec | None = None,
        device: torch.device | str = "cpu",
        *,
        autocast: bool = False,
        compile_codec: bool = False,
        graphs: bool = False,
    ) -> None:
        """codec: fitted (`mktts.training.codec.fit`). autocast: bf16 but in Snake, the last block and the spectra.

        graphs: steps as CUDA graphs (`StepGraphs`).
        """
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.autocast = recipe, torch.device(device), autocast
        self.codec = (Codec() if codec is None else codec).to(self.device).train()
        self.average = copy.deepcopy(self.codec).requires_grad_(False)
        self.judges = Discriminators().to(self.device)
        self.graphs = StepGraphs(self.device) if graphs else None
        self.optimizer = self._adam(self.codec.parameters())
        self.judge_optimizer = self._adam(self.judges.parameters())
        self._decode = torch.compile(self.codec) if compile_codec else self.codec
        self._share = torch.ones((), device=self.device)  # of the newest weights in the average
        self.step = 0
        self.progress: float | None = None  # of the schedule; None: step over steps
        self.seconds = 0.0
        self.curves: list[dict[str, float]] = []

    def train_step(self, pcm: Tensor, codes: Tensor) -> dict[str, Tensor]:
        """One step on PCM (B, T * samples per frame) and its codes (B, T, 16); the losses as scalars on the device."""
        r = self.recipe
        torch.manual_seed(1_000_003 * r.seed + self.step)  # so a resumed run draws what this one would have
        adversarial = r.adversarial_from is not None and self.step >= r.adversarial_from
        self._set_rates()
        start = torch.randint(pcm.shape[1] - self._judged_samples(pcm) + 1, (1,)).to(self.device)
        work = self._adversarial_step if adversarial else self._plain_step
        losses = self.graphs.run(adversarial, work, pcm, codes, start) if self.graphs else work(pcm, codes, start)
        self.step += 1
        return losses

    def _plain_step(self, pcm: Tensor, codes: Tensor, start: Tensor) -> dict[str, Tensor]:
        renderings, pcm = self._renderings(codes, pcm)
        return self._learn(self._losses(renderings, pcm))

    def _adversarial_step(self, pcm: Tensor, codes: Tensor, start: Tensor) -> dict[str, Tensor]:
        """start (1,): of the samples that the discriminators are shown."""
        renderings, pcm = self._renderings(codes, pcm)
        losses = self._losses(renderings, pcm)
        judged = start + torch.arange(self._judged_samples(pcm), device=self.device)
        real_pcm, fake_pcm = pcm.index_select(1, judged), renderings[0].index_select(1, judged)
        losses["judges"] = self._judge_step(real_pcm, fake_pcm.detach())
        self.judges.requires_grad_(False)
        with self._cast():
            real, fake = self.judges(real_pcm), self.judges(fake_pcm)
        losses = self._learn(losses | deceiving_losses(real, fake))
        self.judges.requires_grad_(True)
        return losses

    def _renderings(self, codes: Tensor, pcm: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """PCM (B, n) for each draw of noise, and the target; both without what nothing can be learnt from."""
        draws = torch.cat([self.codec.quantizer.redrawn(codes) for _ in range(self.recipe.draws)])
        with self._cast():
            output = self._decode(draws)
        heard = torch.ones_like(pcm)
        heard[self.onset_crops :, : self.recipe.unheard_frames * SAMPLES_PER_FRAME] = 0
        return tuple(part * heard for part in output.chunk(self.recipe.draws)), pcm * heard

    def _losses(self, renderings: tuple[Tensor, ...], pcm: Tensor) -> dict[str, Tensor]:
        losses = spectral_losses(renderings, pcm)
        losses["repetition"], lags = repetition(renderings[0], pcm)
        losses |= {f"lag_{round(1_000 * s)}_ms": lag for s, lag in zip(LAGS_S, lags, strict=True)}
        if self.onset_crops:
            losses["onset"] = onset(renderings[0][: self.onset_crops], pcm[: self.onset_crops])
        return losses

    @property
    def onset_crops(self) -> int:
        """The first crops of a batch, which begin where a clip does."""
        return round(self.recipe.onsets * self.recipe.batch)

    def _learn(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = ("mel", "stft", "wave", "adversarial", "features", "repetition", "onset")
        losses["loss"] = sum(getattr(self.recipe, name) * losses[name] for name in parts if name in losses)
        self._descend(self.optimizer, losses["loss"], self.codec.parameters())
        with torch.no_grad():
            kept = list(self.average.parameters())
            change = torch._foreach_sub(list(self.codec.parameters()), kept)
            torch._foreach_mul_(change, self._share)
            torch._foreach_add_(kept, change)
        return {name: loss.detach() for name, loss in losses.items()}

    def _judge_step(self, pcm: Tensor, output: Tensor) -> Tensor:
        with self._cast():
            loss = judges_loss(self.judges(pcm), self.judges(output))
        self._descend(self.judge_optimizer, loss, self.judges.parameters())
        return loss.detach()

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Iterable[Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters), 10.0)
        optimizer.step()

    def _cast(self) -> torch.autocast:
        # a cache of casts made while recording would not be made again when the graph is replayed
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=self.graphs is None
        )

    def _adam(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        return adam(parameters, self.device, self.graphs is not None, betas=(0.8, 0.99), weight_decay=0.01)

    def _judged_samples(self, pcm: Tensor) -> int:
        return min(pcm.shape[1], self.recipe.judged_frames * SAMPLES_PER_FRAME)

    def _set_rates(self) -> None:
        r = self.recipe
        progress = min(1.0, self.step / r.steps) if self.progress is None else self.progress
        factor = min(1.0, (self.step + 1) / r.warmup_steps) * (0.51 + 0.49 * math.cos(math.pi * progress))
        self._share.fill_(max(1 / (1 + self.step), 1 / r.averaged_steps))
        for optimizer, rate in ((self.optimizer, r.rate), (self.judge_optimizer, r.judge_rate)):
            set_rate(optimizer, rate * factor)

    def save(self, path: Path) -> None:
        """Writes the whole state, or leaves the file as it was."""
        data = io.BytesIO()
        modules = {name: getattr(self, name).state_dict() for name in _SAVED}
        place = {"step": self.step, "seconds": self.seconds, "curves": self.curves}
        torch.save(modules | place | {"recipe": asdict(self.recipe), "sizes": asdict(self.codec.sizes)}, data)
        write_whole(path, data.getvalue())

    def load(self, path: Path) -> None:
        """Goes on where `save` was.

        Raises CheckpointError for no file, or one of another recipe, other sizes or another fitted codec.
        """
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a state to resume from, but: {error}") from None
        for name, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.codec.sizes))):
            if state[name] != ours:
                found = {key: value for key, value in state[name].items() if ours.get(key) != value}
                raise CheckpointError(
                    f"{path}: expected the {name} of this run, found {found}: take the same settings, or another --out"
                )
        ours = self.codec.fitted_parts()
        others = [name for name in ours if not torch.equal(state["codec"][name], ours[name])]
        if others:  # the codes would be of the one codec, the decoder of the other
            raise CheckpointError(
                f"{path}: expected the fitted codec of this run (--codec), found another in {', '.join(others)}: "
                "name the file that the state began with, or give the new codec another folder (--out)"
            )
        for name in _SAVED:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.curves = state["step"], state["seconds"], state["curves"]


def load_codec(path: Path, device: torch.device | str = "cpu") -> Codec:
    """The codec alone, in evaluation mode: fitted, or of a training state its averaged weights.

    Raises CheckpointError without a file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a file of `train fit` or `train codec`, but: {error}") from None
    codec = Codec(CodecSizes(**state["sizes"]))
    codec.load_state_dict(state.get("average", state["codec"]))
    return codec.to(device).eval()
