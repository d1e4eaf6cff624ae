"""Trains the codec's decoder.

`python -m mktts.training.codec.train --codec FILE --data FOLDER --codes FOLDER --out FOLDER --minutes M [--resume]`

with the file of `mktts.training.codec.fit` and the codes of `mktts.training.data.encode`. A run can be cut anywhere:
`state.pt` holds everything the next step depends on, and crops depend on the seed and the step only. `curves.json`
holds the printed lines. Learning rates fall with the step (`--steps`), not with the clock, so that slices of any length
give one schedule; the last slice can be told to bring it to its end in its own time (`--by-clock`), which no second
run repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mktts.common import write_whole
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.losses import mel_distance
from mktts.training.codec.model import Codec, write_codec
from mktts.training.codec.trainer import CodecRecipe, CodecTrainer, load_codec
from mktts.training.data.codec_data import Crops

STATE, CURVES, TOKENIZER = "state.pt", "curves.json", "speech_tokenizer"


@torch.no_grad()
def measured_mel(codec: Codec, pcm: Tensor, codes: Tensor) -> float:
    """Log-mel distance (natural log, 80 bands) of what the codec makes of codes (B, T, 16) to PCM (B, samples)."""
    return float(mel_distance(codec(codes).clamp(-1.0, 1.0), pcm))


def train(
    trainer: CodecTrainer,
    crops: Crops,
    out: Path,
    minutes: float,
    every: int = 100,
    stop_at: int | None = None,
    by_clock: bool = False,
) -> None:
    """Trains for `minutes`, until step `stop_at`, or until the recipe is done; leaves state, curves and codec in `out`.

    by_clock: the schedule goes from where it is to its end in these minutes, however many steps they hold.
    """
    start, last_step, last_s = time.monotonic(), trainer.step, time.monotonic()
    last, begun = stop_at or trainer.recipe.steps, min(1.0, trainer.step / trainer.recipe.steps)
    if by_clock:
        last = stop_at or math.inf
    before_s, always = trainer.seconds, [part.to(trainer.device) for part in crops.batch(0x7FFF_FFFF, 16)]
    # `always`: the same crops each time, so that lines compare; they are training audio
    batches = crops.batches(trainer.step, trainer.recipe.batch)
    while trainer.step < last and (passed := (time.monotonic() - start) / (60 * minutes)) < 1:
        if by_clock:
            trainer.progress = begun + (1 - begun) * passed
        found = trainer.train_step(*(part.to(trainer.device, non_blocking=True) for part in next(batches)))
        if trainer.step % every == 0 or trainer.step == 1:
            now_s = time.monotonic()
            trainer.seconds = before_s + now_s - start
            line = {name: round(float(value), 4) for name, value in found.items()}
            line["fixed_mel"] = measured_mel(trainer.codec, *always)
            rate = (trainer.step - last_step) / (now_s - last_s)
            line |= {"step": trainer.step, "seconds": round(trainer.seconds, 1), "steps_per_s": round(rate, 2)}
            trainer.curves.append(line)
            print(_shown(line), flush=True)
            last_step, last_s = trainer.step, time.monotonic()
        if trainer.step % 1000 == 0:
            trainer.save(out / STATE)
    batches.close()
    trainer.seconds = before_s + time.monotonic() - start
    trainer.save(out / STATE)
    write_whole(out / CURVES, json.dumps(trainer.curves).encode())
    write_codec(out / TOKENIZER, trainer.codec)


def _shown(line: Mapping) -> str:
    parts = [f"{line['step']:6d}  {line['seconds']:7.1f} s  {line['steps_per_s']:5.1f} steps/s"]
    parts += [f"{name} {line[name]:.3f}" for name in ("loss", "mel", "fixed_mel", "judges", "features") if name in line]
    return "  ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mktts.training.codec.train", description=__doc__)
    parser.add_argument("--codec", type=Path, required=True, help="file of the fitted codec, or a state to begin from")
    parser.add_argument("--data", type=Path, required=True, help="folder of audio shards")
    parser.add_argument("--codes", type=Path, required=True, help="folder of their codes")
    parser.add_argument("--out", type=Path, required=True, help="folder for state, curves and the trained codec")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after this time")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--stop-at", type=int, help="stop at this step, of a schedule that goes on")
    parser.add_argument("--by-clock", action="store_true", help="end the schedule in this slice's minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
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
    choices = {"autocast": options.autocast, "compile_codec": options.compile, "graphs": options.graphs}
    trainer = CodecTrainer(recipe, load_codec(options.codec), options.device, **choices)
    if options.resume and (options.out / STATE).exists():
        trainer.load(options.out / STATE)
    crops = Crops(options.data, options.codes, recipe.crop_frames, recipe.seed)
    audio_s = recipe.batch * recipe.crop_frames * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
    print(f"{crops.hours:.2f} h of audio, {audio_s:.0f} s a step, from step {trainer.step}", flush=True)
    train(trainer, crops, options.out, options.minutes, options.every, options.stop_at, options.by_clock)


if __name__ == "__main__":
    main()
