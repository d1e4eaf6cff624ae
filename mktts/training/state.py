"""Training that stops and goes on exactly where it was.

About once a minute all that the next step depends on is written: weights, optimizers, averaged weights, curves. Beside
it, in LIGHT, lies what another session begins with: weights alone in 16 bits, averaged where there are such."""

import argparse
import io
import json
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.model.cuda_graph import Recorded, record

STATE, LIGHT = "state.pt", "light"
_AHEAD = ("steps", "joint_steps", "pitch")  # of a recipe: what may change on the way
_SAVE_S = 60.0  # between writings: what a run that is killed loses at most


class Trainer(ABC):
    """What is trained, and its step. recipe: a dataclass with at least `seed`, `steps`, `warmup_steps` and `block`."""

    def __init__(self, recipe: Any, sizes: Any, device: torch.device | str = "cpu", graphs: bool = False) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`)."""
        self.recipe, self.sizes, self.device = recipe, sizes, torch.device(device)
        self.steps = StepGraphs(self.device, graphs)
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # name in `modules`' state, with the module's name before it
        self.step = self.begun = 0  # begun: the step that had no moments yet
        self.curves: list[dict[str, float]] = []  # a line for each block

    @abstractmethod
    def train_step(self) -> dict[str, Tensor]:
        """One step; its losses, on the device."""

    def measured(self) -> dict[str, float]:
        """What is measured after a block, on what is not learnt from."""
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Weights of all modules, with the module's name before their own."""
        return {f"{name}.{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()}

    def state(self, light: bool = False) -> dict[str, Any]:
        """All that the next step depends on. light: weights alone in 16 bits, averaged ones as a checkpoint has them,
        others finer, as codes depend on them."""
        about = {"step": self.step, "begun": self.begun, "curves": self.curves}
        about |= {"recipe": asdict(self.recipe), "sizes": asdict(self.sizes), "weights": self.weights()}
        if not light:
            moments = {name: optimizer.state_dict()["state"] for name, optimizer in self.optimizers.items()}
            return about | {"average": self.average, "moments": moments}
        live = {k: t.half() if t.is_floating_point() else t for k, t in about["weights"].items()}
        return about | {"weights": live | {k: t.bfloat16() for k, t in self.average.items()}}

    def write(self, out: Path) -> None:
        """Puts the state into `out`, and the light one into its folder; each of them whole or not at all."""
        for folder, light in ((out, False), (out / LIGHT, True)):
            data = io.BytesIO()
            torch.save(self.state(light), data)
            write_whole(folder / STATE, data.getvalue())

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes on where `write` was; from light weights with a warm-up. What is ahead may be planned otherwise. Raises
        CheckpointError for a file that is missing or of another recipe or sizes."""
        stored = read_state(folder)
        for key, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.sizes))):
            found = {k: v for k, v in stored[key].items() if ours.get(k, v) != v and k not in _AHEAD}
            if found:
                raise CheckpointError(f"{folder}: expected the {key} of this run, found {found}: take another --out")
        self.step, self.begun, self.curves = stored["step"], stored["step"], stored["curves"]
        for ours, theirs in ((self.weights(), "weights"), (self.average, "average")):
            for name, tensor in ours.items():
                tensor.copy_(stored.get(theirs, stored["weights"])[name])
        for name, moments in stored.get("moments", {}).items():
            optimizer, self.begun = self.optimizers[name], stored["begun"]
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})

    def schedule(self) -> float:
        """Share of the learning rate at this step: a linear warm-up, then a cosine down to a twentieth."""
        done = min(1.0, self.step / self.recipe.steps)
        warm = min(1.0, (self.step + 1 - self.begun) / self.recipe.warmup_steps)
        return warm * (0.525 + 0.475 * math.cos(math.pi * done))

    def begin_step(self, *rates: float) -> None:
        """Seeds what the step draws, as a resumed run will; sets the optimizers' rates, which a recorded step reads."""
        torch.manual_seed(1_000_003 * self.recipe.seed + self.step)
        for optimizer, rate in zip(self.optimizers.values(), rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(rate * self.schedule())

    @torch.no_grad()
    def follow(self, share: float | Tensor) -> None:
        """Moves the averaged weights this share of the way to the live ones."""
        live = self.weights()
        kept = list(self.average.values())
        change = torch._foreach_sub([live[name] for name in self.average], kept)
        torch._foreach_mul_(change, share)  # not lerp, which looks at the value: a recorded step must not
        torch._foreach_add_(kept, change)


def read_state(folder: Path) -> dict[str, Any]:
    """The state in `folder`, on the CPU. Raises CheckpointError for a file that is missing or damaged."""
    try:
        return torch.load(folder / STATE, "cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder / STATE}: expected the state of a training stage, but: {error}") from None


def train(
    trainer: Trainer, out: Path, minutes: float, clock: Callable[[], float] = time.monotonic, plan_minutes: float = 0
) -> None:
    """Trains block by block until the recipe's steps are done, or the next block would not end within the minutes.
    clock: gives seconds. plan_minutes: where given, the recipe's steps become what fits into them at the last block's
    pace. Raises CheckpointError for a loss that is no number, before it is written."""
    begun = saved = clock()
    while trainer.step < trainer.recipe.steps:
        start, first = clock(), trainer.step
        while trainer.step < trainer.recipe.steps and (trainer.step == first or trainer.step % trainer.recipe.block):
            losses = trainer.train_step()
        line = {"step": trainer.step, **{name: round(float(value), 5) for name, value in losses.items()}}
        if not all(map(math.isfinite, line.values())):
            raise CheckpointError(f"{out}: expected numbers, found {line}: go on from the last state at a lower rate")
        line |= {name: round(value, 5) for name, value in trainer.measured().items()}
        took = max(clock() - start, 1e-9)
        pace, spent = (trainer.step - first) / took, clock() - begun
        line["steps_per_s"] = round(pace, 2)
        trainer.curves.append(line)
        print(" ".join(f"{k} {v:.4g}" for k, v in line.items()), f"of {trainer.recipe.steps}", flush=True)
        last = trainer.step >= trainer.recipe.steps or spent + 1.1 * took > 60 * minutes
        if plan_minutes and not last:
            left = max(1, int(pace * (60 * plan_minutes - spent)))
            trainer.recipe = replace(trainer.recipe, steps=trainer.step + left)
        if last or clock() - saved >= _SAVE_S:
            trainer.write(out)
            saved = clock()
        if last:
            return


def add_training_arguments(parser: argparse.ArgumentParser, recipe: object) -> None:
    """What codec and talker have in common, and a flag for each of a recipe's figures."""
    parser.add_argument("--data", type=Path, required=True, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for state and result")
    parser.add_argument("--size", choices=("voice", "tiny"), default="voice", help="tiny is for tests (default: voice)")
    parser.add_argument("--minutes", type=float, required=True, help="stop before this time is over")
    parser.add_argument("--plan", type=float, default=0, metavar="MINUTES", help="set --steps to what fits into these")
    parser.add_argument("--resume", action="store_true", help="go on from the state of --out, where there is one")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    group = parser.add_argument_group("recipe")
    for name, value in asdict(recipe).items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")


def train_as_asked(trainer: Trainer, arguments: argparse.Namespace, hours: float) -> None:
    """Trains for --minutes, and prints what was reached. hours: of speech. Raises as `train` and `Trainer.load` do."""
    if arguments.resume and (arguments.out / STATE).is_file():
        trainer.load(arguments.out)
    print(f"{hours:.2f} h of speech, from step {trainer.step}", flush=True)
    train(trainer, arguments.out, arguments.minutes, plan_minutes=arguments.plan)
    print(json.dumps({**trainer.curves[-1], "of_steps": trainer.recipe.steps}))


_ORDINARY_RUNS = 3  # before recording: libraries' handles, autotuning, the optimizer's state


def adam(parameters: Iterable, device: torch.device, **choices: Any) -> torch.optim.AdamW:
    """An optimizer whose rate `Trainer.begin_step` sets, and whose steps a graph can hold."""
    cuda = device.type == "cuda"
    rate = torch.zeros((), dtype=torch.float32 if cuda else torch.float64, device=device)
    return torch.optim.AdamW(parameters, rate, fused=cuda, capturable=cuda, **choices)


class StepGraphs:
    """Runs whole steps (forward, backward, optimizer), on CUDA the fourth of a kind and shape and later ones as a graph
    of static copies of their inputs. A step must not look at the values of its tensors; what changes between steps is
    among its inputs or in tensors it reads. The device's default generator may be seeded between steps."""

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self._device = device
        self._inputs, self._runs = dict[Hashable, tuple[Tensor, ...]](), Counter[Hashable]()
        self.recorded: dict[Hashable, Recorded[dict[str, Tensor]]] = {}
        self.recording = graphs and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.recording else None
        self._pool = torch.cuda.graph_pool_handle() if self.recording else None  # shared: steps do not overlap

    def cast(self) -> torch.autocast:
        """Products in bf16 on CUDA. Casts are not kept in a recorded step, which would not make them again."""
        cuda = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=cuda, cache_enabled=not self.recording)

    def run(self, kind: Hashable, work: Callable[..., dict[str, Tensor]], *inputs: Tensor) -> dict[str, Tensor]:
        """What `work(*inputs)` returns; its tensors hold until the next step."""
        if not self.recording:
            return work(*inputs)
        key = (kind, *(tuple(tensor.shape) for tensor in inputs))
        if key not in self._inputs:
            self._inputs[key] = tuple(map(torch.empty_like, inputs))
        static = self._inputs[key]
        for ours, given in zip(static, inputs, strict=True):
            ours.copy_(given)
        self._runs[key] += 1
        if self._runs[key] <= _ORDINARY_RUNS:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                found = work(*static)
            torch.cuda.current_stream().wait_stream(self._side)
            return found
        if key not in self.recorded:
            self.recorded[key] = record(partial(work, *static), self._pool, self._side, warm_ups=0)
        self.recorded[key].replay()
        return self.recorded[key].result
