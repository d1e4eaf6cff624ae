"""Training that stops and goes on exactly where it was.

About once a minute all that the next step depends on is written: weights, optimizers, averaged weights, curves. Beside
it, in LIGHT, lies what another session begins with: weights alone in 16 bits, live, averaged, and the best so far.
"""

import hashlib
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
from safetensors.torch import load, save
from torch import Tensor, nn

from mktts.common import read_json, read_object, write_whole
from mktts.errors import CheckpointError
from mktts.model.cuda_graph import Recorded, record

STATE, CURVES, LIGHT = "state.json", "curves.json", "light"
_AHEAD = ("steps", "joint_steps", "pitch")  # of a recipe: what may change on the way
_SAVE_S = 60.0  # between writings: what a run that is killed loses at most


class Trainer(ABC):
    """Modules, optimizers, averaged weights and the step they are at; a subclass says what a step is. recipe: a
    dataclass with `seed`, `steps`, `warmup_steps` and `block`. `curves` holds a line for each block."""

    def __init__(self, recipe: Any, sizes: Any) -> None:
        self.recipe, self.sizes = recipe, sizes
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # name in `modules`' state, with the module's name before it
        self.best: dict[str, Tensor] = {}  # averaged weights in 16 bits, when their held-out losses were least
        self.step = self.begun = 0  # begun: the step that had no moments yet
        self.audio_s = 0.0  # of speech, in a step
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
        """Puts `tensors` and the best weights into `folder`, whole or not at all."""
        stored = {**tensors, **self.best}
        name, data = f"state-{self.step:08}.safetensors", save({k: t.cpu().contiguous() for k, t in stored.items()})
        document = {"step": self.step, "begun": self.begun, "files": {name: hashlib.sha256(data).hexdigest()}}
        document |= {"recipe": asdict(self.recipe), "sizes": asdict(self.sizes)}
        write_whole(folder / name, data)
        write_whole(folder / CURVES, json.dumps(self.curves).encode())
        write_whole(folder / STATE, json.dumps(document, indent=1).encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes on where `write` was; from light weights with a warm-up. What is ahead may be planned otherwise. Raises
        CheckpointError for files that are missing or of another recipe or sizes."""
        document = read_object(folder / STATE)
        for key, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.sizes))):
            ours = json.loads(json.dumps(ours))
            found = {k: v for k, v in document[key].items() if ours.get(k, v) != v and k not in _AHEAD}
            if found:
                raise CheckpointError(
                    f"{folder}: expected the {key} of this run, found {found}: take the same, or another --out"
                )
        live = self.weights()
        stored = {f"average.{name}": live[name] for name in self.average} | read_parts(folder)
        self.step = self.begun = document["step"]
        for name, state, p in self._moments():
            if f"{name}.exp_avg" in stored:  # as the first step begins it; on CUDA all lie there: `adam` is fused
                state[p] = {"step": torch.zeros((), device=p.device)}
                state[p] |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                self.begun = document["begun"]
        for name, tensor in self.tensors():
            if name not in stored:
                raise CheckpointError(f"{folder}: expected {name} in its files, found none: take another --out")
            tensor.copy_(stored[name])
        self.best = {name: tensor for name, tensor in stored.items() if name.startswith("best.")}
        self.curves = read_json(folder / CURVES)

    def keep_best(self) -> None:
        """Keeps the averaged weights where the held-out losses of the newest line sum up to the least of all lines."""
        sums = [sum(loss for name, loss in line.items() if name.startswith("held_out")) for line in self.curves]
        if 0 < sums[-1] <= min(sums):
            self.best = {f"best.{name}": tensor.bfloat16() for name, tensor in self.average.items()}

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


def read_parts(folder: Path) -> dict[str, Tensor]:
    """The tensors of a state. Raises CheckpointError for a part that is missing or damaged."""
    stored: dict[str, Tensor] = {}
    for name, digest in read_object(folder / STATE)["files"].items():
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{path}: expected the part that {STATE} names, found {'other' if data else 'none'}")
        stored |= load(data)
    return stored


def averaged(folder: Path, module: nn.Module, name: str, best: bool = False) -> nn.Module:
    """`module`, called `name` in the state in `folder`, with its weights; the averaged ones where there are such. best:
    those of the least held-out losses, where they are kept. Raises CheckpointError for another module's state."""
    stored = read_parts(folder)
    state = {}
    for key in module.state_dict():
        kinds = [kind for kind in ("best.", "average.", "")[0 if best else 1 :] if f"{kind}{name}.{key}" in stored]
        if not kinds:
            raise CheckpointError(f"{folder}: expected {name}.{key} in its files, found none")
        state[key] = stored[f"{kinds[0]}{name}.{key}"]
    module.load_state_dict(state)
    return module.eval()


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
        line |= {"steps_per_s": round(pace, 2), "audio_s_per_s": round(pace * trainer.audio_s)}
        trainer.curves.append(line)
        trainer.keep_best()
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
