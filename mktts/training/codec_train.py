"""Trains the codec: `python -m mktts.training.codec_train --data FOLDER --out FOLDER --minutes M [--resume]`.

A run can be cut anywhere: `state.pt` holds everything the next step depends on, and crops, codebook moves and
quantiser dropout depend on the seed and the step only. `curves.json` holds the printed lines.
Learning rates fall with the step (`--steps`), not with the clock, so that slices of any length give one schedule.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mktts.errors import CheckpointError
from mktts.files import write_whole
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec_data import Crops
from mktts.training.codec_losses import Discriminators, deceiving_losses, judges_loss, mel_distance, spectral_losses
from mktts.training.codec_model import Codec, write_codec
from mktts.training.codec_sizes import VOICE, CodecSizes

STATE, CURVES, TOKENIZER = "state.pt", "curves.json", "speech_tokenizer"


@dataclass(frozen=True)
class CodecRecipe:
    """Everything that decides the result, apart from the data."""

    seed: int = 0
    batch: int = 64
    crop_frames: int = 26
    steps: int = 12_000  # the learning rate falls to a tenth over these
    warmup_steps: int = 200
    rate: float = 1e-3
    judge_rate: float = 3e-4
    adversarial_from: int | None = 6_000  # step at which discriminators join; None: never
    dropout: float = 0.3  # share of examples that use a random number of the later books
    mel: float = 15.0
    stft: float = 5.0
    wave: float = 10.0
    commitment: float = 1.0
    adversarial: float = 1.0
    features: float = 5.0


class CodecTrainer:
    """Codec, discriminators, optimisers and the step they are at."""

    def __init__(
        self,
        recipe: CodecRecipe,
        sizes: CodecSizes = VOICE,
        device: torch.device | str = "cpu",
        *,
        autocast: bool = False,
        compile_codec: bool = False,
    ) -> None:
        """autocast: bf16 in decoder and discriminators; encoder, codebooks, Snake and spectra stay in fp32."""
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.autocast = recipe, torch.device(device), autocast
        self.codec = Codec(sizes).to(self.device).train()
        self.judges = Discriminators().to(self.device)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), recipe.rate, betas=(0.8, 0.99), weight_decay=0.01, fused=fused
        )
        self.judge_optimizer = torch.optim.AdamW(
            self.judges.parameters(), recipe.judge_rate, betas=(0.8, 0.99), weight_decay=0.01, fused=fused
        )
        # only what has no random choices and no state of its own is compiled
        self._decode = torch.compile(self.codec.decoder) if compile_codec else self.codec.decoder
        self.step = 0
        self.seconds = 0.0
        self.curves: list[dict[str, float]] = []

    def train_step(self, pcm: Tensor) -> dict[str, Tensor]:
        """One step on PCM (B, samples); the losses as scalars on the device, and `codes` (B, T, 16)."""
        r = self.recipe
        torch.manual_seed(1_000_003 * r.seed + self.step)  # so a resumed run draws what this one would have
        adversarial = r.adversarial_from is not None and self.step >= r.adversarial_from
        self._set_rates()
        latent, codes, commitment = self.codec.quantizer(self.codec.encoder(pcm), self._kept(len(pcm)), self.step == 0)
        with self._cast():
            output = self._decode(latent)
        losses = spectral_losses(output, pcm) | {"commitment": commitment}
        if adversarial:
            losses["judges"] = self._judge_step(pcm, output.detach())
            self.judges.requires_grad_(False)
            with self._cast():
                real, fake = self.judges(pcm), self.judges(output)
            losses |= deceiving_losses(real, fake)
        parts = ("mel", "stft", "wave", "commitment", "adversarial", "features")
        losses["loss"] = sum(getattr(r, name) * losses[name] for name in parts if name in losses)
        self._descend(self.optimizer, losses["loss"], self.codec.parameters())
        self.judges.requires_grad_(True)
        self.step += 1
        return {name: loss.detach() for name, loss in losses.items()} | {"codes": codes}

    def _judge_step(self, pcm: Tensor, output: Tensor) -> Tensor:
        with self._cast():
            loss = judges_loss(self.judges(pcm), self.judges(output))
        self._descend(self.judge_optimizer, loss, self.judges.parameters())
        return loss.detach()

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters), 10.0)
        optimizer.step()

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def _kept(self, size: int) -> Tensor:
        """How many later books each example uses: mostly all, else any number, none included."""
        later = NUM_CODEBOOKS - 1
        some = torch.randint(later + 1, (size,), device=self.device)
        dropped = torch.rand(size, device=self.device) < self.recipe.dropout
        return torch.where(dropped, some, later)

    def _set_rates(self) -> None:
        r = self.recipe
        progress = min(1.0, self.step / r.steps)
        factor = min(1.0, (self.step + 1) / r.warmup_steps) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for optimizer, rate in ((self.optimizer, r.rate), (self.judge_optimizer, r.judge_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def save(self, path: Path) -> None:
        """Writes the whole state, or leaves the file as it was."""
        data = io.BytesIO()
        modules = {name: getattr(self, name).state_dict() for name in _SAVED}
        progress = {"step": self.step, "seconds": self.seconds, "curves": self.curves}
        torch.save(modules | progress | {"recipe": asdict(self.recipe), "sizes": asdict(self.codec.sizes)}, data)
        write_whole(path, data.getvalue())

    def load(self, path: Path) -> None:
        """Goes on where `save` was. Raises CheckpointError for no file, or one of another recipe or other sizes."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a state to resume from, but: {error}") from None
        for name, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.codec.sizes))):
            if state[name] != ours:
                found = {key: value for key, value in state[name].items() if ours.get(key) != value}
                raise CheckpointError(f"{path}: expected the {name} of this run, found {found}: start it alike")
        for name in _SAVED:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds, self.curves = state["step"], state["seconds"], state["curves"]


_SAVED = ("codec", "judges", "optimizer", "judge_optimizer")


def load_codec(path: Path, device: torch.device | str = "cpu") -> Codec:
    """The codec alone out of a training state, in evaluation mode. Raises CheckpointError where there is none."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a codec's training state, but: {error}") from None
    codec = Codec(CodecSizes(**state["sizes"]))
    codec.load_state_dict(state["codec"])
    return codec.to(device).eval()


def perplexities(codes: Tensor, size: int) -> list[float]:
    """Per book, exp(entropy) of its codes (B, T, 16): how many entries it really uses, at most `size`."""
    found = []
    for book in codes.flatten(0, 1).T:
        share = torch.bincount(book, minlength=size).double() / len(book)
        found.append(float(torch.exp(-torch.xlogy(share, share).sum())))
    return found


@torch.no_grad()
def measured_mel(codec: Codec, pcm: Tensor) -> float:
    """Log-mel distance (natural log, 80 bands) of what the codec gives back of PCM (B, samples), all books in use."""
    training = codec.training
    codec.eval()
    distance = mel_distance(codec(pcm)[0].clamp(-1.0, 1.0), pcm)
    codec.train(training)
    return float(distance)


def train(trainer: CodecTrainer, crops: Crops, out: Path, minutes: float, every: int = 100) -> None:
    """Trains for `minutes`, or until the recipe is done; leaves state, curves and the codec in `out`."""
    start, last_step, last_s = time.monotonic(), trainer.step, time.monotonic()
    before_s, held = trainer.seconds, crops.batch(-1 & 0x7FFF_FFFF, 16).to(trainer.device)
    usage: list[Tensor] = []
    while trainer.step < trainer.recipe.steps and time.monotonic() - start < 60 * minutes:
        pcm = crops.batch(trainer.step, trainer.recipe.batch).to(trainer.device, non_blocking=True)
        found = trainer.train_step(pcm)
        usage = [*usage[-15:], found.pop("codes")]
        if trainer.step % every == 0 or trainer.step == 1:
            now_s = time.monotonic()
            trainer.seconds = before_s + now_s - start
            line = {name: round(float(value), 4) for name, value in found.items()}
            books = perplexities(torch.cat(usage), trainer.codec.sizes.codebook_size)
            line |= {"books": [round(book, 1) for book in books], "held_mel": measured_mel(trainer.codec, held)}
            rate = (trainer.step - last_step) / (now_s - last_s)
            line |= {"step": trainer.step, "seconds": round(trainer.seconds, 1), "steps_per_s": round(rate, 2)}
            trainer.curves.append(line)
            print(_shown(line), flush=True)
            last_step, last_s = trainer.step, time.monotonic()
        if trainer.step % 1000 == 0:
            trainer.save(out / STATE)
    trainer.seconds = before_s + time.monotonic() - start
    trainer.save(out / STATE)
    write_whole(out / CURVES, json.dumps(trainer.curves).encode())
    write_codec(out / TOKENIZER, trainer.codec)


def _shown(line: Mapping) -> str:
    parts = [f"{line['step']:6d}  {line['seconds']:7.1f} s  {line['steps_per_s']:5.1f} steps/s"]
    parts += [f"{name} {line[name]:.3f}" for name in ("loss", "mel", "held_mel", "judges", "features") if name in line]
    books = line["books"]
    return "  ".join([*parts, f"books {books[0]:.0f} | {min(books[1:]):.0f}..{max(books[1:]):.0f}"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mktts.training.codec_train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for state, curves and the trained codec")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after this time")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder")
    parser.add_argument("--every", type=int, default=100, help="steps between progress lines")
    parser.add_argument("--seed", type=int, default=CodecRecipe.seed)
    parser.add_argument("--batch", type=int, default=CodecRecipe.batch)
    parser.add_argument("--crop-frames", type=int, default=CodecRecipe.crop_frames)
    parser.add_argument("--steps", type=int, default=CodecRecipe.steps, help="length of the schedule")
    parser.add_argument("--rate", type=float, default=CodecRecipe.rate)
    parser.add_argument("--adversarial-from", type=int, default=CodecRecipe.adversarial_from, help="step; -1: never")
    options = parser.parse_args(arguments)
    recipe = CodecRecipe(
        seed=options.seed,
        batch=options.batch,
        crop_frames=options.crop_frames,
        steps=options.steps,
        rate=options.rate,
        adversarial_from=options.adversarial_from if options.adversarial_from >= 0 else None,
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    trainer = CodecTrainer(recipe, device=options.device, autocast=options.autocast, compile_codec=options.compile)
    if options.resume and (options.out / STATE).exists():
        trainer.load(options.out / STATE)
    crops = Crops(options.data, recipe.crop_frames, recipe.seed)
    audio_s = recipe.batch * recipe.crop_frames * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
    print(f"{crops.hours:.2f} h of audio, {audio_s:.0f} s a step, from step {trainer.step}", flush=True)
    train(trainer, crops, options.out, options.minutes, options.every)


if __name__ == "__main__":
    main()
