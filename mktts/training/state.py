"""Training that stops and goes on exactly where it was, from small files.

After every `block` steps of the recipe all that the next step depends on is rounded to what the files hold: weights to
24 bits, Adam's moments and the distance of the averaged weights from the live ones to 8 bits with an exponent for each
64 values (6 bytes a parameter in all, of 16). The run itself goes on with the rounded values, so one that was cut off
after any block repeats the whole run's steps bit by bit. Files are at most 15 MiB, to travel in pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from mktts.common import read_object, write_whole
from mktts.errors import CheckpointError

STATE, CURVES = "state.json", "curves.json"
PART_BYTES = 15 * 2**20
_BLOCK = 64  # values that share an exponent
_LARGEST, _SMALLEST = 448.0, 2.0**-9  # of float8_e4m3fn
_AHEAD = ("steps", "joint_steps")  # of a recipe: what may change on the way
_SAVE_S = 60.0  # between writings: what a run that is killed loses at most


def pack(values: Tensor, how: str, base: Tensor | None = None) -> Tensor:
    """float32 as uint8.

    how: w, weights rounded to 24 bits, (n, 3). m, moments, and d, distances from `base`: float8 with a common power of
    two for each 64 values, (blocks, 65). v, squared moments: as m of their root, which spans half as many powers of
    two; what would become 0 beside larger ones becomes the least number: a step divides by it. "": as it is.
    """
    if not how:
        return values.clone()
    flat = (values - base if how == "d" else values.sqrt() if how == "v" else values).detach().flatten().contiguous()
    if how == "w":
        bits = flat.view(torch.int32)
        kept = (bits >> 8) + ((bits >> 7) & 1)  # a carry into the exponent is the next number
        return torch.stack([(kept >> shift) & 255 for shift in (0, 8, 16)], -1).to(torch.uint8)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    most = rows.abs().amax(1, keepdim=True)
    exponent = torch.ceil(torch.log2(most / _LARGEST)).clamp(-126, 127)
    rows = rows * torch.exp2(-exponent)
    if how == "v":
        rows = torch.where(most > 0, rows.clamp(min=_SMALLEST), 0.0)
    eight = rows.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat(((exponent + 127).to(torch.uint8), eight), 1)


def unpack(packed: Tensor, how: str, shape: torch.Size, base: Tensor | None = None) -> Tensor:
    """float32 of `shape` from what `pack` made."""
    if not how:
        return packed
    if how == "w":
        low, middle, high = packed.to(torch.int32).unbind(-1)
        return ((low << 8) | (middle << 16) | (high << 24)).view(torch.float32).view(shape)
    rows = packed[:, 1:].contiguous().view(torch.float8_e4m3fn).float() * torch.exp2(packed[:, :1].float() - 127)
    found = rows.flatten()[: shape.numel()].view(shape)
    return found.square() if how == "v" else base + found if how == "d" else found


class Trainer(ABC):
    """Modules, optimizers, averaged weights and the step they are at; a subclass says what a step is.

    recipe: a dataclass with `seed`, `steps`, `warmup_steps` and `block`. `curves` holds a line for each block.
    """

    def __init__(self, recipe: Any, sizes: Any) -> None:
        self.recipe, self.sizes = recipe, sizes
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.average: dict[str, Tensor] = {}  # name in `modules`' state, with the module's name before it
        self.step = 0
        self.curves: list[dict[str, float]] = []

    @abstractmethod
    def train_step(self) -> dict[str, Tensor]:
        """One step; its losses, on the device."""

    def measured(self) -> dict[str, float]:
        """What is measured after a block, on what is not learnt from."""
        return {}

    def tensors(self) -> Iterator[tuple[str, Tensor, str, Tensor | None]]:
        """Name, tensor, how it is packed, and what it is the distance from."""
        for name, module in self.modules.items():
            live = {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
            for key, tensor in live.items():
                yield key, tensor, "w" if tensor.is_floating_point() else "", None
            for key in (key for key in live if key in self.average):
                yield f"average.{key}", self.average[key], "d", live[key]
        for name, optimizer in self.optimizers.items():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for key, tensor in optimizer.state[p].items():
                    yield f"{name}.{i}.{key}", tensor, {"exp_avg": "m", "exp_avg_sq": "v"}.get(key, ""), None

    @torch.no_grad()
    def rounded(self) -> dict[str, Tensor]:
        """Rounds all to what it returns, the content of the files."""
        packed = {}
        for name, tensor, how, base in self.tensors():
            packed[name] = pack(tensor, how, base)
            tensor.copy_(unpack(packed[name], how, tensor.shape, base))
        return {name: tensor.cpu().contiguous() for name, tensor in packed.items()}

    def write(self, folder: Path, packed: Mapping[str, Tensor]) -> None:
        """Puts what `rounded` gave into `folder`, whole or not at all. Raises CheckpointError for a huge tensor."""
        parts: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in packed.items():
            if tensor.nbytes > PART_BYTES:
                raise CheckpointError(f"{name}: expected at most {PART_BYTES} bytes, found {tensor.nbytes}")
            if size + tensor.nbytes > PART_BYTES - 2**18:
                parts.append({})
                size = 0
            parts[-1][name] = tensor
            size += tensor.nbytes + 128
        digests = {}
        for number, part in enumerate(parts):
            name, data = f"state-{self.step:08}-{number}.safetensors", save(part)
            write_whole(folder / name, data)
            digests[name] = hashlib.sha256(data).hexdigest()
        document = {"step": self.step, "files": digests, "recipe": asdict(self.recipe), "sizes": asdict(self.sizes)}
        write_whole(folder / CURVES, json.dumps(self.curves).encode())
        write_whole(folder / STATE, json.dumps(document, indent=1).encode())
        for old in folder.glob("state-*.safetensors"):
            if old.name not in digests:
                old.unlink()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Goes on where `write` was. Raises CheckpointError for files that are missing or of another recipe or sizes.

        `steps` and `joint_steps` of the recipe may differ: what is ahead is then planned otherwise.
        """
        document = read_object(folder / STATE)
        for key, ours in (("recipe", asdict(self.recipe)), ("sizes", asdict(self.sizes))):
            ours = json.loads(json.dumps(ours))
            found = {k: v for k, v in document[key].items() if ours.get(k, v) != v and k not in _AHEAD}
            if found:
                raise CheckpointError(
                    f"{folder}: expected the {key} of this run, found {found}: take the same, or another --out"
                )
        packed = read_parts(folder)
        for name, optimizer in self.optimizers.items():
            _begin(optimizer, name, packed)
        for name, tensor, how, base in self.tensors():
            if name not in packed:
                raise CheckpointError(
                    f"{folder}: expected {name} in its files, found none: they are of another program"
                )
            tensor.copy_(unpack(packed[name].to(tensor.device), how, tensor.shape, base))
        self.step = document["step"]
        curves = folder / CURVES
        self.curves = json.loads(curves.read_bytes()) if curves.is_file() else []

    def schedule(self) -> float:
        """Share of the learning rate at this step: a linear warm-up, then a cosine down to a twentieth."""
        done = min(1.0, self.step / self.recipe.steps)
        return min(1.0, (self.step + 1) / self.recipe.warmup_steps) * (0.525 + 0.475 * math.cos(math.pi * done))

    @torch.no_grad()
    def follow(self, share: float | Tensor) -> None:
        """Moves the averaged weights this share of the way to the live ones."""
        live = {f"{name}.{key}": p for name, m in self.modules.items() for key, p in m.named_parameters()}
        kept = list(self.average.values())
        change = torch._foreach_sub([live[name].detach() for name in self.average], kept)
        torch._foreach_mul_(change, share)  # not lerp, which looks at the value: a recorded step must not
        torch._foreach_add_(kept, change)


def read_parts(folder: Path, module: str = "") -> dict[str, Tensor]:
    """The packed tensors of a state; of the first module alone, the first parts, so that the others need not be there.

    Raises CheckpointError for a part that is missing or damaged.
    """
    packed: dict[str, Tensor] = {}
    for name, digest in read_object(folder / STATE)["files"].items():
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"{path}: expected the part that {STATE} names, found {'other' if data else 'none'}")
        packed |= load(data)
        if module and not all(key.startswith((f"{module}.", f"average.{module}.")) for key in packed):
            break
    return packed


def averaged(folder: Path, module: nn.Module, name: str) -> nn.Module:
    """`module`, the first one of the state in `folder` and called `name` there, with its weights; the averaged ones
    where there are such. Raises CheckpointError for a state of another module."""
    packed = read_parts(folder, name)
    state = module.state_dict()
    for key, tensor in state.items():
        stored = packed.get(f"{name}.{key}")
        if stored is None:
            raise CheckpointError(f"{folder}: expected {name}.{key} in its files, found none")
        live = unpack(stored, "w" if tensor.is_floating_point() else "", tensor.shape)
        distance = packed.get(f"average.{name}.{key}")
        state[key] = live if distance is None else unpack(distance, "d", tensor.shape, live)
    module.load_state_dict(state)
    return module.eval()


def train(trainer: Trainer, out: Path, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Trains block by block until the recipe's steps are done, or the next block would not end within the minutes.

    clock: gives seconds.
    """
    begun = saved = clock()
    while trainer.step < trainer.recipe.steps:
        start, first = clock(), trainer.step
        while trainer.step < trainer.recipe.steps and (trainer.step == first or trainer.step % trainer.recipe.block):
            losses = trainer.train_step()
        line = {"step": trainer.step, **{name: round(float(value), 5) for name, value in losses.items()}}
        line |= {name: round(value, 5) for name, value in trainer.measured().items()}
        packed = trainer.rounded()
        took = clock() - start
        trainer.curves.append({**line, "steps_per_s": round((trainer.step - first) / max(took, 1e-9), 2)})
        print(" ".join(f"{k} {v:.4g}" for k, v in trainer.curves[-1].items()), flush=True)
        last = trainer.step >= trainer.recipe.steps or clock() - begun + 1.1 * took > 60 * minutes
        if last or clock() - saved >= _SAVE_S:
            trainer.write(out, packed)
            saved = clock()
        if last:
            return


def _begin(optimizer: torch.optim.Optimizer, name: str, packed: Mapping[str, Tensor]) -> None:
    """Makes an optimizer's state as its first step would, for `load` to fill, where the files have it."""
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    for i, (group, p) in enumerate(places):
        if f"{name}.{i}.exp_avg" in packed and not optimizer.state[p]:
            device = p.device if group.get("capturable") or group.get("fused") else "cpu"
            step = torch.zeros((), dtype=torch.float32, device=device)
            optimizer.state[p].update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
