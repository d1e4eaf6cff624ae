"""Training that stops and goes on exactly where it was.

About once a minute all that the next step depends on is written: weights, optimizers, averaged weights, curves. Beside
it, in LIGHT, lies what another session begins with: weights alone in 16 bits, averaged where there are such.
"""

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mktts.common import write_whole
from mktts.errors import CheckpointError
from mktts.model.cuda_graph import Recorded, record

STATE, LIGHT = "state.safetensors", "light"
_AHEAD = ("steps", "joint_steps", "pitch")  # of a recipe: what may change on the way
_SAVE_S = 60.0  # between writings: what a run that is killed loses at most


class Trainer(ABC):
    """Modules, optimizers, averaged weights and the step they are at; a subclass says what a step is. recipe: a
    dataclass with `seed`, `steps`, `warmup_steps` and `block`. `curves` holds a line for each block."""

    def __init__(self, recipe: Any, sizes: Any, device: torch.device | str = "cpu", graphs: bool = False) -> None:
        """graphs: steps as CUDA graphs (`StepGraphs`)."""
        self.recipe, self.sizes, self.device = recipe, sizes, torch.device(device)
        self.steps = StepGraphs(self.device, graphs)
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # name in `modules`' state, with the module's name before it
        self.step = self.begun = 0  # begun: the step that had no moments yet
        self.curves: list[dict[str, float]] = []

    @abstractmethod
    def train_step(self) -> dict[str, Tensor]:
        """One step; its losses, on the device."""

    def measured(self) -> dict[str, float]:
        """What is measured after a block, on what is not learnt from."""
        return {}

    def weights(self) -> dict[str, Tensor]:
        """Weights of all modules, with the module's name before their own."""
        return {f"{name}.{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that the next step depends on."""
        yield from self.weights().items()
        yield from ((f"average.{name}", tensor) for name, tensor in self.average.items())
        for name, state, p in self._moments():
            yield from ((f"{name}.{key}", tensor) for key, tensor in state[p].items())

    def _moments(self) -> Iterator[tuple[str, dict, nn.Parameter]]:
        """Yields for every parameter that is learnt its name, the state of its optimizer, and itself."""
        for name, optimizer in self.optimizers.items():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                yield f"{name}.{i}", optimizer.state, p

    def light(self) -> dict[str, Tensor]:
        """Weights alone in 16 bits: averaged ones as a checkpoint has them, others finer, as codes depend on them."""
        live = {k: t.half() if t.is_floating_point() else t for k, t in self.weights().items()}
        return live | {k: t.bfloat16() for k, t in self.average.items()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Puts `tensors` and where they are into the state of `folder`, whole or not at all."""
        about = {"step": self.step, "begun": self.begun, "curves": self.curves}
        about |= {"recipe": asdict(self.recipe), "sizes": asdict(self.sizes)}
        data = save({k: t.cpu().contiguous() for k, t in tensors.items()}, {"about": json.dumps(about)})
        write_whole(folder / STATE, data)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes on where `write` was; from light weights with a warm-up. What is ahead may be planned otherwise. Raises
        CheckpointError for files that are missing or of another recipe or sizes."""
        about, stored = read_state(folder)
        for key, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.sizes))):
            ours = json.loads(json.dumps(ours))
            found = {k: v for k, v in about[key].items() if ours.get(k, v) != v and k not in _AHEAD}
            if found:
                raise CheckpointError(
                    f"{folder}: expected the {key} of this run, found {found}: take the same, or another --out"
                )
        live = self.weights()
        stored = {f"average.{name}": live[name] for name in self.average} | stored
        self.step, self.begun, self.curves = about["step"], about["step"], about["curves"]
        for name, state, p in self._moments():
            if f"{name}.exp_avg" in stored:  # as the first step begins it; on CUDA all lie there: `adam` is fused
                state[p] = {"step": torch.zeros((), device=p.device)}
                state[p] |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                self.begun = about["begun"]
        for name, tensor in self.tensors():
            if name not in stored:
                raise CheckpointError(f"{folder}: expected {name} in its state, found none: take another --out")
            tensor.copy_(stored[name])

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


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the state in `folder` says of its run (step, curves, recipe, sizes), and its tensors. Raises CheckpointError
    for a file that is missing or damaged."""
    try:
        with safe_open(folder / STATE, "pt") as file:
            return json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / STATE}: expected a state that a training stage wrote, but: {error}") from None


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
            trainer.write(out, dict(trainer.tensors()))
            trainer.write(out / LIGHT, trainer.light())
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


Work = Callable[..., dict[str, Tensor]]
_ORDINARY_RUNS = 3  # before recording: libraries' handles, autotuning, the optimizer's state


def adam(parameters: Iterable, device: torch.device, **choices: Any) -> torch.optim.AdamW:
    """An optimizer whose rate `Trainer.begin_step` sets, and whose steps a graph can hold."""
    cuda = device.type == "cuda"
    rate = torch.zeros((), dtype=torch.float32 if cuda else torch.float64, device=device)
    return torch.optim.AdamW(parameters, rate, fused=cuda, capturable=cuda, **choices)


@dataclass
class _Step:
    inputs: tuple[Tensor, ...]
    runs: int = 0
    recorded: Recorded[dict[str, Tensor]] | None = None


class StepGraphs:
    """Runs whole steps (forward, backward, optimizer), on CUDA the fourth of a kind and shape and later ones as a graph
    of static copies of their inputs. A step must not look at the values of its tensors; what changes between steps is
    among its inputs or in tensors it reads. Random numbers come from the device's default generator, which may be
    seeded between steps."""

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self._device, self._steps = device, dict[Hashable, _Step]()
        self.recording = graphs and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.recording else None
        self._pool = torch.cuda.graph_pool_handle() if self.recording else None  # shared: steps do not overlap

    def cast(self) -> torch.autocast:
        """Products in bf16 on CUDA. Casts are not kept in a recorded step, which would not make them again."""
        cuda = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=cuda, cache_enabled=not self.recording)

    def run(self, kind: Hashable, work: Work, *inputs: Tensor) -> dict[str, Tensor]:
        """What `work(*inputs)` returns; its tensors hold until the next step."""
        if not self.recording:
            return work(*inputs)
        key = (kind, *(tuple(tensor.shape) for tensor in inputs))
        if key not in self._steps:
            self._steps[key] = _Step(tuple(torch.empty_like(tensor) for tensor in inputs))
        step = self._steps[key]
        for static, given in zip(step.inputs, inputs, strict=True):
            static.copy_(given)
        step.runs += 1
        if step.runs <= _ORDINARY_RUNS:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                found = work(*step.inputs)
            torch.cuda.current_stream().wait_stream(self._side)
            return found
        if step.recorded is None:
            step.recorded = record(partial(work, *step.inputs), self._pool, self._side, warm_ups=0)
        step.recorded.replay()
        return step.recorded.result
