"""Training that can be stopped and resumed exactly where it was.

About once a minute everything that the next step depends on is saved: weights, optimizers, averaged weights, curves.
In addition, LIGHT holds a small state to start another session from: 16-bit weights only, averaged if available."""

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
_AHEAD = ("steps", "joint_steps", "pitch")  # fields of a recipe that may change when a run is resumed
_SAVE_S = 60.0  # between saves; a killed run loses at most about this


class Trainer(ABC):
    """Trains modules step by step. recipe: a dataclass with at least `seed`, `steps`, `warmup_steps` and `block`."""

    def __init__(self, recipe: Any, sizes: Any, device: torch.device | str = "cpu", graphs: bool = False) -> None:
        """graphs: whether to run steps as CUDA graphs (`StepGraphs`)."""
        self.recipe, self.sizes, self.device = recipe, sizes, torch.device(device)
        self.steps = StepGraphs(self.device, graphs)
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # by module name and name in the module's state
        self.step = self.begun = 0  # begun: the step at which the optimizers had no moments
        self.curves: list[dict[str, float]] = []  # one entry for each block

    @abstractmethod
    def train_step(self) -> dict[str, Tensor]:
        """Makes one step and returns its losses, on the device."""

    def measured(self) -> dict[str, float]:
        """Metrics to measure after a block, on data that is not trained on."""
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Weights of all modules, by module name and name in the module."""
        return {f"{name}.{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()}

    def state(self, light: bool = False) -> dict[str, Any]:
        """Everything that the next step depends on. light: only weights, in 16 bits: averaged ones in bfloat16, as in a
        checkpoint, others in fp16, which is finer, because codes depend on them."""
        about = {"step": self.step, "begun": self.begun, "curves": self.curves}
        about |= {"recipe": asdict(self.recipe), "sizes": asdict(self.sizes), "weights": self.weights()}
        if not light:
            moments = {name: optimizer.state_dict()["state"] for name, optimizer in self.optimizers.items()}
            return about | {"average": self.average, "moments": moments}
        live = {k: t.half() if t.is_floating_point() else t for k, t in about["weights"].items()}
        return about | {"weights": live | {k: t.bfloat16() for k, t in self.average.items()}}

    def write(self, out: Path) -> None:
        """Writes the state to `out`, and the light state to its subfolder; each file completely or not at all."""
        for folder, light in ((out, False), (out / LIGHT, True)):
            data = io.BytesIO()
            torch.save(self.state(light), data)
            write_whole(folder / STATE, data.getvalue())

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Resumes from what `write` saved; from light weights with a new warm-up. The fields in _AHEAD may differ.
        Raises CheckpointError for a missing file, or one of another recipe or other sizes."""
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
        """Factor of the learning rate at this step: a linear warm-up, then a cosine down to a twentieth."""
        done = min(1.0, self.step / self.recipe.steps)
        warm = min(1.0, (self.step + 1 - self.begun) / self.recipe.warmup_steps)
        return warm * (0.525 + 0.475 * math.cos(math.pi * done))

    def begin_step(self, *rates: float) -> None:
        """Seeds the random numbers of the step, and sets the optimizers' rates, which a recorded step reads."""
        torch.manual_seed(1_000_003 * self.recipe.seed + self.step)
        for optimizer, rate in zip(self.optimizers.values(), rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(rate * self.schedule())

    @torch.no_grad()
    def follow(self, share: float | Tensor) -> None:
        """Moves the averaged weights towards the live ones by this fraction of the difference."""
        live = self.weights()
        kept = list(self.average.values())
        change = torch._foreach_sub([live[name] for name in self.average], kept)
        torch._foreach_mul_(change, share)  # not lerp, which reads the value on the host: a recorded step must not
        torch._foreach_add_(kept, change)


def read_state(folder: Path) -> dict[str, Any]:
    """Reads the state in `folder` to the CPU. Raises CheckpointError for a missing or damaged file."""
    try:
        return torch.load(folder / STATE, "cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder / STATE}: expected the state of a training stage, but: {error}") from None


def train(
    trainer: Trainer, out: Path, minutes: float, clock: Callable[[], float] = time.monotonic, plan_minutes: float = 0
) -> None:
    """Trains block by block until the recipe's steps are done, or the next block would not finish within `minutes`.
    clock: returns seconds. plan_minutes: if not 0, sets the recipe's steps to what fits into this time at the speed of
    the last block. Raises CheckpointError for a loss that is not finite, before anything is saved."""
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
    """Adds the arguments common to codec and talker, and an option for each field of a recipe."""
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
    """Trains for --minutes and prints the result as JSON. hours: of speech. Raises as `train` and `Trainer.load`."""
    if arguments.resume and (arguments.out / STATE).is_file():
        trainer.load(arguments.out)
    print(f"{hours:.2f} h of speech, from step {trainer.step}", flush=True)
    train(trainer, arguments.out, arguments.minutes, plan_minutes=arguments.plan)
    print(json.dumps({**trainer.curves[-1], "of_steps": trainer.recipe.steps}))


_ORDINARY_RUNS = 3  # before recording, to create libraries' handles and the optimizer's state, and for autotuning


def adam(parameters: Iterable, device: torch.device, **choices: Any) -> torch.optim.AdamW:
    """Returns an optimizer whose rate is set by `Trainer.begin_step` and whose steps a CUDA graph can record."""
    cuda = device.type == "cuda"
    rate = torch.zeros((), dtype=torch.float32 if cuda else torch.float64, device=device)
    return torch.optim.AdamW(parameters, rate, fused=cuda, capturable=cuda, **choices)


class StepGraphs:
    """Runs complete steps (forward, backward, optimizer); on CUDA, from the fourth step of a kind and shape on, as a
    graph with static copies of the inputs. A step must not read values of tensors on the host; whatever changes between
    steps must be an input or in tensors it reads. The device's default generator may be seeded between steps."""

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self._device = device
        self._inputs, self._runs = dict[Hashable, tuple[Tensor, ...]](), Counter[Hashable]()
        self.recorded: dict[Hashable, Recorded[dict[str, Tensor]]] = {}
        self.recording = graphs and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.recording else None
        self._pool = torch.cuda.graph_pool_handle() if self.recording else None  # shared: steps do not overlap

    def cast(self) -> torch.autocast:
        """Autocast to bf16 on CUDA. Casts are not cached in a recorded step, which would not repeat them."""
        cuda = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=cuda, cache_enabled=not self.recording)

    def run(self, kind: Hashable, work: Callable[..., dict[str, Tensor]], *inputs: Tensor) -> dict[str, Tensor]:
        """Runs `work(*inputs)` and returns its result, whose tensors are valid until the next step."""
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
