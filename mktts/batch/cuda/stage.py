"""Where a launched tick meets the host: pinned memory for what goes to the device and comes back, and its clock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.batch.lanes import Made
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, which is queued on the current CUDA stream: the host does not wait for it."""
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class Stage:
    """One tick at a time: `begin`, then the tick's work, then `end`, all on one CUDA stream; later `collect`.

    block (words,) int64 goes to the device. kept: what must stay in memory until the tick is over. On the CPU, for
    tests, the work is over when `end` is called.
    """

    def __init__(self, words: int, lanes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

        self.block = pinned(words, dtype=torch.int64)
        self.numbers = self.block.numpy()
        self.kept: list[Any] = []
        self._made = pinned((NUM_CODEBOOKS + 1) * lanes, dtype=torch.int32)
        self._pcm = pinned(lanes, SAMPLES_PER_FRAME, dtype=torch.float32)
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []
        self._times_s = [0.0, 0.0]
        self._lanes = self._count = 0
        self._before: Stage | None = None

    def begin(self, before: Stage | None = None) -> None:
        """The tick's clock starts here, in the current stream's order. before: the stage of the tick that was launched
        last, until this one is collected."""
        self._before = before
        self._mark(0)

    def end(self, made: Tensor, pcm: Tensor | None, count: int) -> None:
        """Queues the way back. made (17 B,) int32, pcm (B, 1920) fp32: see `workspace.Space`; `count` lanes are
        filled. pcm None: silence."""
        self._lanes, self._count = len(made) // (NUM_CODEBOOKS + 1), count
        self._made[: len(made)].copy_(made, non_blocking=True)
        if pcm is not None:
            self._pcm[:count].copy_(pcm[:count], non_blocking=True)
        self._mark(1)

    def collect(self) -> Made:
        """Waits, without the interpreter's lock, until the tick is over."""
        if self._cuda:
            self._marks[1].synchronize()
            took_s = 1e-3 * self._marks[0].elapsed_time(self._marks[1])
        else:
            took_s = self._times_s[1] - self._times_s[0]
        idle_s = 0.0
        if self._cuda and self._before is not None:
            idle_s = 1e-3 * self._before._marks[1].elapsed_time(self._marks[0])
        self._before = None
        self.kept = []
        made, count = self._made.numpy(), self._count
        codes = made[: NUM_CODEBOOKS * self._lanes].reshape(-1, NUM_CODEBOOKS)[:count].astype(np.int64)
        state = made[NUM_CODEBOOKS * self._lanes :][:count]
        codes[state > 1, 0] = -1
        return Made(codes, state == 1, self._pcm.numpy()[:count], took_s, idle_s)

    def _mark(self, which: int) -> None:
        if self._cuda:
            self._marks[which].record()
        else:
            self._times_s[which] = time.perf_counter()
