"""Trains the codec's decoder: `python -m mktts train codec`.

From the file of `mktts.training.codec.fit` and the codes of `mktts.training.data.encode`. A run can be cut anywhere:
`state.pt`, saved once a minute, holds everything the next step depends on, and crops depend on the seed and the step
only. `curves.json` holds the printed lines, `speech_tokenizer` the weights averaged over the last steps. Learning
rates fall with the step (`--steps`), not with the clock, so that slices of any length give one schedule. With
`--by-clock` the last slice brings the schedule to its end within its own minutes; no second run repeats such a slice.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mktts.common import write_whole
from mktts.model.backend import device_named
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.losses import mel_distance
from mktts.training.codec.model import Codec, write_codec
from mktts.training.codec.sizes import WIDE
from mktts.training.codec.trainer import CodecRecipe, CodecTrainer, load_codec
from mktts.training.codec.warm import grown
from mktts.training.data.codec_data import Crops

_SHOWN = ("loss", "mel", "fixed_mel", "lag_20_ms", "lag_80_ms", "onset", "judges", "features")
_SAVE_S = 60.0  # between savings: what a cut costs at most
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
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Trains for `minutes`, until step `stop_at`, or until the recipe is done; leaves state, curves and codec in `out`.

    by_clock: the schedule goes from where it is to its end in these minutes, however many steps they hold. clock: gives
    seconds.
    """
    start_s, last_step = clock(), trainer.step
    last_s, saved_s = start_s, 0.0  # when the last line was printed; how long after the start the state was saved
    last, begun = stop_at or trainer.recipe.steps, min(1.0, trainer.step / trainer.recipe.steps)
    if by_clock:
        last = stop_at or math.inf
    before_s, always = trainer.seconds, [part.to(trainer.device) for part in crops.batch(0x7FFF_FFFF, 16)]
    # `always`: the same crops each time, so that lines compare; they are training audio
    batches = crops.batches(trainer.step, trainer.recipe.batch)
    while trainer.step < last and (passed := (clock() - start_s) / (60 * minutes)) < 1:
        if by_clock:
            trainer.progress = begun + (1 - begun) * passed
        found = trainer.train_step(*(part.to(trainer.device, non_blocking=True) for part in next(batches)))
        if trainer.step % every == 0 or trainer.step == 1:
            now_s = clock()
            trainer.seconds = before_s + now_s - start_s
            line = {name: round(float(value), 4) for name, value in found.items()}
            line["fixed_mel"] = measured_mel(trainer.average, *always)
            rate = (trainer.step - last_step) / (now_s - last_s)
            line |= {"step": trainer.step, "seconds": round(trainer.seconds, 1), "steps_per_s": round(rate, 2)}
            trainer.curves.append(line)
            print(_shown(line), flush=True)
            last_step, last_s = trainer.step, clock()
        if 60 * minutes * passed - saved_s >= _SAVE_S:
            saved_s = 60 * minutes * passed
            trainer.seconds = before_s + saved_s
            _keep(trainer, out)
    batches.close()
    trainer.seconds = before_s + clock() - start_s
    _keep(trainer, out)


def _keep(trainer: CodecTrainer, out: Path) -> None:
    trainer.save(out / STATE)
    write_whole(out / CURVES, json.dumps(trainer.curves).encode())
    write_codec(out / TOKENIZER, trainer.average)


def _shown(line: Mapping) -> str:
    parts = [f"{line['step']:6d}  {line['seconds']:7.1f} s  {line['steps_per_s']:5.1f} steps/s"]
    parts += [f"{name} {line[name]:.3f}" for name in _SHOWN if name in line]
    return "  ".join(parts)


EXAMPLES = """examples:
  python -m mktts train codec --codec codec.pt --data AUDIO --codes CODES --out CODEC --minutes 60
  python -m mktts train codec --codec codec.pt --data AUDIO --codes CODES --out CODEC --minutes 60 --resume

A run can be cut anywhere and go on with --resume: CODEC/state.pt holds everything. CODEC/speech_tokenizer is the codec
in the layout of a checkpoint, CODEC/curves.json the printed lines. The last line of standard output is JSON: what was
reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", type=Path, required=True, help="file of the fitted codec, or a state to begin from")
    parser.add_argument(
        "--wide", action="store_true", help="in the sizes of `train fit --wide`, whatever the file's are"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--codes", type=Path, required=True, metavar="CODES", help="folder of their codes")
    parser.add_argument("--out", type=Path, required=True, help="folder for state, curves and the trained codec")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after this time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--hours", type=float, default=math.inf, help="of audio to hold in memory (default: all)")
    parser.add_argument("--stop-at", type=int, help="stop at this step, of a schedule that goes on")
    parser.add_argument("--by-clock", action="store_true", help="end the schedule in this slice's minutes")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, help="bfloat16 (default: on CUDA)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoder")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    parser.add_argument("--every", type=int, default=100, help="steps between progress lines (default: %(default)s)")
    recipe = parser.add_argument_group("recipe")
    for name, what in (
        ("seed", "of weights, crops and draws"),
        ("batch", "crops a step"),
        ("crop_frames", "frames of 80 ms a crop"),
        ("steps", "length of the schedule"),
        ("rate", "learning rate"),
        ("adversarial_from", "step at which discriminators join; -1: never"),
        ("draws", "renderings of a crop by independent noise: 2, or 1 for a codec without noise"),
        ("repetition", "weight of what repeats after 20, 40, 60 or 80 ms"),
        ("onset", "weight of the first 21 ms of a clip"),
        ("onsets", "share of the crops that begin where a clip does"),
    ):
        default = getattr(CodecRecipe, name)
        default = -1 if default is None else default
        flag, shown = f"--{name.replace('_', '-')}", f"{what} (default: %(default)s)"
        recipe.add_argument(flag, type=type(default), default=default, help=shown)


def main(arguments: argparse.Namespace) -> int:
    """Trains for a slice of time. Raises CheckpointError for codec and state, AudioError for the shards."""
    device, out = device_named(arguments.device), arguments.out
    recipe = CodecRecipe(
        seed=arguments.seed,
        batch=arguments.batch,
        crop_frames=arguments.crop_frames,
        steps=arguments.steps,
        rate=arguments.rate,
        adversarial_from=arguments.adversarial_from if arguments.adversarial_from >= 0 else None,
        draws=arguments.draws,
        repetition=arguments.repetition,
        onset=arguments.onset,
        onsets=arguments.onsets,
    )
    autocast = device.type == "cuda" if arguments.autocast is None else arguments.autocast
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    choices = {"autocast": autocast, "compile_codec": arguments.compile, "graphs": arguments.graphs}
    codec = load_codec(arguments.codec)
    if arguments.wide and codec.sizes != WIDE:
        codec = grown(codec, WIDE)
    trainer = CodecTrainer(recipe, codec, device, **choices)
    if arguments.resume and (out / STATE).exists():
        trainer.load(out / STATE)
    crops = Crops(arguments.data, arguments.codes, recipe.crop_frames, recipe.seed, recipe.onsets, arguments.hours)
    audio_s = recipe.batch * recipe.crop_frames * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
    print(f"{crops.hours:.2f} h of audio, {audio_s:.0f} s a step, from step {trainer.step}", flush=True)
    train(trainer, crops, out, arguments.minutes, arguments.every, arguments.stop_at, arguments.by_clock)
    reached = {"step": trainer.step, "of_steps": recipe.steps, "seconds": round(trainer.seconds, 1)}
    print(json.dumps({**(trainer.curves[-1] if trainer.curves else {}), **reached}))  # the last line's losses with it
    return 0
