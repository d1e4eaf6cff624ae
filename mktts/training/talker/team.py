"""Processes that train one model together, each on its own device and its own batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from mktts.errors import EngineError


@dataclass(frozen=True)
class Team:
    """This process's place among `size`; one alone needs nothing of torch.distributed."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process reports, evaluates and writes files."""
        return self.rank == 0

    def average(self, gradients: Tensor) -> None:
        """In place, over all processes; on CUDA without waiting for it."""
        if self.size > 1:
            dist.all_reduce(gradients)
            gradients.div_(self.size)

    def agreed(self, value: float) -> float:
        """What the leading process has for `value`: clocks differ, and all must stop at the same step."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)  # on the CPU: nothing waits for a device
        dist.broadcast(shared, 0)
        return float(shared)


class Gradients:
    """All gradients of a model in one tensor, for one exchange and one norm; the parameters' `.grad` are views of it.

    Nothing may set a `.grad` to None after this (an optimizer's `zero_grad()` does): `clear` empties them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        chosen = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in chosen), device=chosen[0].device)
        start = 0
        for p in chosen:
            p.grad = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def clear(self) -> None:
        self.flat.zero_()

    def clip(self, norm: float) -> None:
        """Scales all down to this norm where theirs is larger, as `clip_grad_norm_` does; waits for no device."""
        self.flat.mul_((norm / (self.flat.norm() + 1e-6)).clamp(max=1.0))


def run_team(work: Callable[..., None], devices: list[str], folder: Path, *arguments: Any) -> None:
    """Runs `work(team, device, *arguments)` in one new process a device, until all have ended.

    work: a function of a module, and `arguments` what can be pickled. folder: for the file through which they meet.
    Raises EngineError where one fails; the others are ended then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f".meeting-{uuid4().hex}"
    try:
        mp.spawn(_member, (work, devices, str(meeting.resolve()), arguments), len(devices))
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise EngineError(f"expected {len(devices)} processes to train to their end, but: {error}") from None
    finally:
        meeting.unlink(missing_ok=True)


def _member(rank: int, work: Callable[..., None], devices: list[str], meeting: str, arguments: tuple) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # one machine, which may have no other network
    device = torch.device(devices[rank])
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=len(devices))
    try:
        work(Team(rank, len(devices)), devices[rank], *arguments)
        dist.all_reduce(torch.zeros(1))  # who leaves while another is still coming fails that one
    finally:
        dist.destroy_process_group()
    # The work is done and written. An interpreter that is torn down beside native threads may abort ("terminate called
    # without an active exception"), and the run would count as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
