"""Training that stops and goes on exactly where it was.

About once a minute all that the next step depends on is written: weights, optimizers, averaged weights, curves. Beside
it, in LIGHT, lies what another session begins with: the weights alone, averaged and in 16 bits, an eighth as large.
Files are at most 15 MiB, to travel in pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from mktts.common import read_object, write_whole
from mktts.errors import CheckpointError

STATE, CURVES, LIGHT = "state.json", "curves.json", "light"
PART_BYTES = 15 * 2**20
_AHEAD = ("steps", "joint_steps")  # of a recipe: what may change on the way
_SAVE_S = 60.0  # between writings: what a run that is killed loses at most


class Trainer(ABC):
    """Modules, optimizers, averaged weights and the step they are at; a subclass says what a step is.

    recipe: a dataclass with `seed`, `steps`, `warmup_steps` and `block`. `curves` holds a line for each block.
    """

    def __init__(self, recipe: Any, sizes: Any) -> None:
        self.recipe, self.sizes = recipe, sizes
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # name in `modules`' state, with the module's name before it
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
        """Of all modules, with their names before their own."""
        return {f"{name}.{key}": t for name, module in self.modules.items() for key, t in module.state_dict().items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that the next step depends on."""
        yield from self.weights().items()
        yield from ((f"average.{name}", tensor) for name, tensor in self.average.items())
        for name, optimizer in self.optimizers.items():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                yield from ((f"{name}.{i}.{key}", tensor) for key, tensor in optimizer.state[p].items())

    def light(self) -> dict[str, Tensor]:
        """Weights alone in 16 bits: averaged ones as a checkpoint has them, others finer, as codes depend on them."""
        live = {k: t.half() if t.is_floating_point() else t for k, t in self.weights().items()}
        return live | {k: t.bfloat16() for k, t in self.average.items()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Puts tensors into `folder`, whole or not at all. Raises CheckpointError for a huge one."""
        parts: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in tensors.items():
            if tensor.nbytes > PART_BYTES:
                raise CheckpointError(f"{name}: expected at most {PART_BYTES} bytes, found {tensor.nbytes}")
            if size + tensor.nbytes > PART_BYTES - 2**18:
                parts.append({})
                size = 0
            parts[-1][name] = tensor.cpu().contiguous()
            size += tensor.nbytes + 128
        digests = {}
        for number, part in enumerate(parts):
            name, data = f"state-{self.step:08}-{number}.safetensors", save(part)
            write_whole(folder / name, data)
            digests[name] = hashlib.sha256(data).hexdigest()
        document = {"step": self.step, "begun": self.begun, "files": digests}
        document |= {"recipe": asdict(self.recipe), "sizes": asdict(self.sizes)}
        write_whole(folder / CURVES, json.dumps(self.curves).encode())
        write_whole(folder / STATE, json.dumps(document, indent=1).encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name not in digests:
                old.unlink()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes on where `write` was; from light weights with a warm-up.

        `steps` and `joint_steps` of the recipe may differ: what is ahead is then planned otherwise. Raises
        CheckpointError for files that are missing or of another recipe or sizes.
        """
        document = read_object(folder / STATE)
        for key, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.sizes))):
            ours = json.loads(json.dumps(ours))
            found = {k: v for k, v in document[key].items() if ours.get(k, v) != v and k not in _AHEAD}
            if found:
                raise CheckpointError(
                    f"{folder}: expected the {key} of this run, found {found}: take the same, or another --out"
                )
        stored, live = read_parts(folder), self.weights()
        exact = [_begin(optimizer, name, stored) for name, optimizer in self.optimizers.items()]
        for name, tensor in self.tensors():
            given = stored.get(name, live.get(name.removeprefix("average.")) if name.startswith("average.") else None)
            if given is None:
                raise CheckpointError(f"{folder}: expected {name} in its files, found none: take another --out")
            tensor.copy_(given)
        self.step = document["step"]
        self.begun = document["begun"] if any(exact) else self.step
        curves = folder / CURVES
        self.curves = json.loads(curves.read_bytes()) if curves.is_file() else []

    def schedule(self) -> float:
        """Share of the learning rate at this step: a linear warm-up, then a cosine down to a twentieth."""
        done = min(1.0, self.step / self.recipe.steps)
        warm = min(1.0, (self.step + 1 - self.begun) / self.recipe.warmup_steps)
        return warm * (0.525 + 0.475 * math.cos(math.pi * done))

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


def averaged(folder: Path, module: nn.Module, name: str) -> nn.Module:
    """`module`, called `name` in the state in `folder`, with its weights; the averaged ones where there are such.

    Raises CheckpointError for a state of another module.
    """
    stored = read_parts(folder)
    state = {}
    for key in module.state_dict():
        if f"{name}.{key}" not in stored:
            raise CheckpointError(f"{folder}: expected {name}.{key} in its files, found none")
        state[key] = stored.get(f"average.{name}.{key}", stored[f"{name}.{key}"])
    module.load_state_dict(state)
    return module.eval()


def train(
    trainer: Trainer, out: Path, minutes: float, clock: Callable[[], float] = time.monotonic, plan_minutes: float = 0
) -> None:
    """Trains block by block until the recipe's steps are done, or the next block would not end within the minutes.

    clock: gives seconds. plan_minutes: where they are given, the recipe's steps become, after every block, what fits
    into them at its pace: this run's minutes, and those of runs that go on with it. Raises CheckpointError for a loss
    that is no number, before it is written.
    """
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


def _begin(optimizer: torch.optim.Optimizer, name: str, stored: Mapping[str, Tensor]) -> bool:
    """Makes an optimizer's state as its first step would, for `load` to fill, where the files have it; whether any."""
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    known = [(group, p) for i, (group, p) in enumerate(places) if f"{name}.{i}.exp_avg" in stored]
    for group, p in known:
        device = p.device if group.get("capturable") or group.get("fused") else "cpu"
        step = torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return bool(known)
