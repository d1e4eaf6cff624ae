"""Codec work in flight: the CUDA stream it runs on, and its result on the host. On the CPU nothing is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


class Pending:
    """PCM that is on its way to the host. pcm16: the same in 16 bits, where that is made with it."""

    pcm16: bytes | None = None

    def __init__(self, pcm: Tensor, arrived: torch.cuda.Event | None = None) -> None:
        """`pcm` (S,) float32 of the host, pinned if `arrived` says when it is written, else written already."""
        self._pcm = pcm
        self._arrived = arrived
        self._result: np.ndarray | None = None

    def ready(self) -> bool:
        """True once `result` does not wait."""
        return self._arrived is None or self._arrived.query()

    def result(self) -> np.ndarray:
        """The samples (S,) float32, a copy that stays. Waits for this work only, not for work queued later."""
        if self._result is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._result = self._pcm.numpy().copy()  # a chunk may be kept for long: pinned memory should go back
            self._pcm = torch.empty(0)
        return self._result


class Lane:
    """A CUDA stream for one decoder alone; nothing on the CPU, so that the code around it is the same."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_caller(self, *used: Tensor) -> Iterator[None]:
        """Queues what runs inside behind what the caller's stream holds. `used`: tensors that the work touches."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in used:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # freed by the caller, its memory still waits for this work
        with torch.cuda.stream(self._stream):
            yield

    def caller_waits(self) -> None:
        """Whatever the caller's stream is given from now on runs after the work queued so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def host_memory(self, samples: int) -> Tensor:
        """(samples,) float32 that the device can write: pinned. torch keeps such memory: cheap after the first."""
        return torch.empty(samples, dtype=torch.float32, pin_memory=self._stream is not None)

    def staged(self, codes: Tensor) -> Tensor:
        """`codes` as int64 that can be copied without waiting: pinned, or on the device as they are."""
        if self._stream is None or codes.is_cuda:
            return codes
        return torch.empty(codes.shape, dtype=torch.int64, pin_memory=True).copy_(codes)

    def pending(self, pcm: Tensor) -> Pending:
        """The result of the work queued so far, which writes `pcm`."""
        if self._stream is None:
            return Pending(pcm)
        return Pending(pcm, self._stream.record_event())
