"""Training steps as CUDA graphs: a step is thousands of small kernels, which run faster than the host launches them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mktts.model.cuda_graph import Recorded, record

Work = Callable[..., dict[str, Tensor]]
_ORDINARY_RUNS = 3  # before recording: libraries' handles, autotuning, the optimizer's state


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all groups; in place where it is a tensor, which a recorded step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def adam(parameters: Iterable, device: torch.device, graphs: bool, **choices: Any) -> torch.optim.AdamW:
    """An optimizer whose rate `set_rate` gives in every step, and whose steps a graph can hold where `graphs`."""
    cuda = device.type == "cuda"
    rate = torch.zeros((), device=device) if graphs and cuda else 0.0
    return torch.optim.AdamW(parameters, rate, fused=cuda, capturable=graphs and cuda, **choices)


@dataclass
class _Step:
    inputs: tuple[Tensor, ...]
    runs: int = 0
    recorded: Recorded[dict[str, Tensor]] | None = None


class StepGraphs:
    """Runs whole steps (forward, backward, optimizer); where it records, on static copies of their inputs, from the
    fourth step of a kind and shape on as a graph.

    A step must not look at the values of its tensors; what changes between steps is among its inputs or in tensors it
    reads (a learning rate is a tensor). Random numbers come from the device's default generator, which may be seeded
    between steps.
    """

    def __init__(self, device: torch.device, graphs: bool) -> None:
        """graphs: whether to record; on the CPU nothing is."""
        self._steps: dict[Hashable, _Step] = {}
        self.recording = graphs and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.recording else None
        self._pool = torch.cuda.graph_pool_handle() if self.recording else None  # shared: steps do not overlap

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
