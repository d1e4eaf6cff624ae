"""Goes on with a shipped decoder: `python refit.py encoder` makes the encoder that is not shipped anew, and
`python refit.py mean` takes the mean of the decoder before and after.

An encoder learns from nothing which codes of the shipped books make the shipped decoder say what it hears. Its state
is one that `mktts train codec --resume` goes on from, with encoder and books as they are: a better decoder for codes
that keep their meaning, so that the talker stays as it is. On one H200, as the voice in the box was made on 2026-11-28:

    mktts train teacher --kokoro K --texts texts.xz --clips 9000 --out AUDIO --speakers \\
        heart=af_heart:2.4,hearttwo=af_heart:2.4,michael=am_michael:3.9
    python refit.py encoder CODEC AUDIO 3
    mktts train codec --resume --out CODEC --data AUDIO --joint-steps 0 --adversarial-from 0 --judged-frames 8 \\
        --rate 2.5e-4 --plan 10 --minutes 10 --graphs
    python refit.py mean CODEC 0.3 speech_tokenizer/model.safetensors
"""

import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mktts.checkpoint.open import SMALL_FOLDER
from mktts.training.codec.model import VOICE, hub_tensors, load_codec
from mktts.training.codec.train import _MEL_WINDOWS, CodecRecipe, CodecTrainer, mel_distance, repetition
from mktts.training.data.audio import Crops
from mktts.training.state import adam

SHIPPED = SMALL_FOLDER / "speech_tokenizer" / "model.safetensors"
RATE, WARM_UP_STEPS = 1e-3, 300
PITCH = 10.0  # a quarter of the decoder's: pitch is the decoder's to say


def take_over(trainer: CodecTrainer) -> None:
    """Puts the shipped books, their projection and the decoder into a trainer."""
    hub, quantizer = {name: t.float() for name, t in load_file(SHIPPED).items()}, trainer.codec.quantizer
    books = []
    for part, count in (("rvq_first", 1), ("rvq_rest", 15)):
        names = (f"decoder.quantizer.{part}.vq.layers.{i}._codebook." for i in range(count))
        books += [hub[f"{name}embedding_sum"] / hub[f"{name}cluster_usage"][:, None] for name in names]
    with torch.no_grad():
        quantizer.books.copy_(torch.stack(books))
        quantizer.sums.copy_(quantizer.books)
        quantizer.usage.fill_(1)
        quantizer.output_proj.weight.copy_(hub["decoder.quantizer.rvq_first.output_proj.weight"])
        for name, tensor in trainer.codec.decoder.w.hub().items():
            tensor.data.copy_(hub[name])
        for name, parameter in trainer.codec.named_parameters():
            if f"codec.{name}" in trainer.average:
                trainer.average[f"codec.{name}"].copy_(parameter)


def encoder_step(trainer: CodecTrainer, optimizer: torch.optim.Optimizer, pcm: Tensor) -> dict[str, Tensor]:
    """One step of the encoder alone, by what the decoder makes of its codes for PCM (B, n)."""
    recipe, codec = trainer.recipe, trainer.codec
    rows = codec.encoder(pcm)
    left, missed = rows.flatten(0, 1), rows.new_zeros(())
    for book in codec.quantizer.books:
        left = left - book[(book.square().sum(1) - 2 * left.detach() @ book.T).argmin(1)]
        missed = missed + left.square().mean() / len(codec.quantizer.books)
    coded = rows - left.detach().view_as(rows)  # the entries' sum, with the gradient of the rows
    with trainer.steps.cast():
        heard = coded[:, : recipe.crop_frames - recipe.ahead_frames].transpose(1, 2)
        output = codec.decoder(codec.quantizer.output_proj(heard))
    target = pcm[:, : output.shape[1]]
    output = torch.where(trainer._heard, output.float(), target)
    mel = sum(mel_distance(output, target, *size) for size in _MEL_WINDOWS) / len(_MEL_WINDOWS)
    repeats, at_pitch, _ = repetition(output, target)
    loss = recipe.mel * mel + recipe.repetition * repeats + PITCH * at_pitch + recipe.commitment * missed
    optimizer.zero_grad(set_to_none=True)
    loss.backward(inputs=list(codec.encoder.parameters()))
    torch.nn.utils.clip_grad_norm_(codec.encoder.parameters(), 10.0)
    optimizer.step()
    return {"loss": loss.detach(), "mel": mel.detach(), "pitch": at_pitch.detach(), "commitment": missed.detach()}


def encoder(out: Path, audio: Path, minutes: float, device: str = "cuda") -> None:
    """Trains an encoder for `minutes`, and writes the state of a codec at step 1."""
    recipe = CodecRecipe(judged_frames=8, joint_steps=0, adversarial_from=0, rate=2.5e-4)
    crops = Crops(audio, recipe.crop_frames, recipe.seed, recipe.onsets)
    trainer = CodecTrainer(recipe, VOICE, crops, torch.device(device), graphs=device != "cpu")
    take_over(trainer)
    learning = trainer.codec.encoder.parameters()
    optimizer = adam(learning, trainer.device, betas=(0.8, 0.99), weight_decay=0.01)
    trainer.codec.requires_grad_(False)
    trainer.codec.encoder.requires_grad_(True)
    begun_s, step, batches = time.monotonic(), 0, crops.batches(0, recipe.batch)
    while (done := (time.monotonic() - begun_s) / (60 * minutes)) < 1:
        rate = RATE * min(1, (step + 1) / WARM_UP_STEPS) * (0.525 + 0.475 * math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"].fill_(rate)
        pcm = next(batches).to(device, non_blocking=True)
        losses = trainer.steps.run("encoder", lambda pcm: encoder_step(trainer, optimizer, pcm), pcm)
        step += 1
        if step % recipe.block == 0:
            line = {name: round(float(value), 4) for name, value in (losses | trainer.measured()).items()}
            print(step, line, flush=True)
    trainer.codec.requires_grad_(True)
    trainer.step = trainer.begun = 1  # not 0, where the books would begin anew
    trainer.write(out)


def mean(codec: Path, share: float, out: Path) -> None:
    """Writes shipped weights moved `share` of the way to those of a codec's folder."""
    before, after = load_file(SHIPPED), hub_tensors(load_codec(codec))
    moved = {name: t.float().lerp(after[name].float(), share).to(t.dtype) for name, t in before.items()}
    save_file(moved, out)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    command, folder, other, *more = sys.argv[1:]
    if command == "encoder":
        encoder(Path(folder), Path(other), float(more[0]), *more[1:])
    else:
        mean(Path(folder), float(other), Path(more[0]))
