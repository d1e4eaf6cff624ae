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
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.model.backend import device_named
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import ModelConfig
from mktts.training.data.talker_data import Clips, Following, Sequences, held_out, noise_books
from mktts.training.talker.checkpoint import prepare, write_checkpoint
from mktts.training.talker.noise import check_noise_books, with_flat_heads
from mktts.training.talker.sizes import SMALL, TINY, VOICE, TalkerSizes
from mktts.training.talker.team import Team, run_team
from mktts.training.talker.trainer import TalkerRecipe, TalkerTrainer

STATE, CURVES, PREPARED, VOICE_FOLDER = "talker.pt", "talker_curves.json", "prepared", "voice"
SIZES = {"voice": VOICE, "small": SMALL, "tiny": TINY}


def open_data(
    clips: Clips, out: Path, sizes: TalkerSizes, device: torch.device | str, begun: Checkpoint | None = None
) -> Sequences:
    """Sequences with the tokenizer and configuration of `out`, which are made where they are not there yet.

    begun: a voice whose tokenizer is taken instead of one that the texts make.
    """
    folder = out / PREPARED
    if (folder / "config.json").is_file():
        config = ModelConfig.load(folder)
    else:
        texts = dict.fromkeys(text for text in clips.texts if not held_out(text))
        speakers = list(dict.fromkeys(clips.speakers))
        config = prepare(folder, texts, sizes, speakers, begun.folder if begun else None)
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
    parser.add_argument(
        "--begin", metavar="VOICE", help="a folder, or small: its tokenizer, and weights but the codes'"
    )
    parser.add_argument("--same-codec", action="store_true", help="CODES are of VOICE's codec: the codes' weights too")
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
        given = {"default": value, "help": "(default: %(default)s)"}
        if name == "noise_books":
            given = {"help": "the codec's last books, which carry noise (default: what the shards say)"}
        recipe.add_argument(flag, type=type(value), **given)


def main(arguments: argparse.Namespace) -> int:
    """Trains for a slice of time. Raises CheckpointError and AudioError for what does not fit together."""
    devices = arguments.device.split(",")
    if arguments.noise_books is None:
        arguments.noise_books = noise_books(arguments.codes)
    if len(devices) == 1:
        _train(Team(), devices[0], arguments)
    else:
        first = Following(arguments.codes)()
        open_data(first, arguments.out, SIZES[arguments.size], "cpu", _begun(arguments))  # files, and their errors
        run_team(_train, devices, arguments.out, arguments)
    if arguments.codec:
        write_voice(arguments.out, arguments.codec)
    print(json.dumps({"of_steps": arguments.steps, **json.loads((arguments.out / CURVES).read_bytes())[-1]}))
    return 0


def write_voice(out: Path, codec: Path, to: Path | None = None) -> Path:
    """The checkpoint folder `to` (default: `out`/voice) anew, of the state that `out` holds and a codec's folder.

    Heads of noise books are flat (`mktts.training.talker.noise`). Raises CheckpointError without a state, or for a
    codec of other codes or with another number of noise books.
    """
    path = out / STATE
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a state of `train talker`, found nothing: train first")
    state = torch.load(path, map_location="cpu", weights_only=True)
    count = state["recipe"].get("noise_books", 0)
    check_noise_books(codec, count)
    average = with_flat_heads(state["average"], count)
    folder = to or out / VOICE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(folder, out / PREPARED, average, codec)


def _begun(arguments: argparse.Namespace) -> Checkpoint | None:
    """The voice to begin with, if one is named."""
    return open_checkpoint(arguments.begin) if arguments.begin else None


def _train(team: Team, device: str, arguments: argparse.Namespace) -> None:
    """One process's part of a slice."""
    out, following = arguments.out, Following(arguments.codes)
    recipe = TalkerRecipe(**{name: getattr(arguments, name) for name in asdict(TalkerRecipe())})
    begun = _begun(arguments)
    data = open_data(following(), out, SIZES[arguments.size], device_named(device), begun)
    more = following if arguments.follow else None
    trainer = TalkerTrainer(data, recipe, graphs=arguments.graphs, more=more, team=team)
    if begun:
        trainer.begin_from(begun, arguments.same_codec)
    if arguments.resume and (out / STATE).is_file():
        trainer.load(out / STATE)
    train(trainer, out, arguments.minutes, arguments.every, arguments.by_clock, save_every_s=arguments.save_every_s)
