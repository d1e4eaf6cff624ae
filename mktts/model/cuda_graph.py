"""Recording work on static tensors as a CUDA graph, safely beside other threads that use the device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CAPTURE = threading.Lock()  # torch allows one capture at a time in a process


@contextmanager
def captures() -> Iterator[None]:
    """Graphs are captured inside: one thread at a time, and no garbage collected meanwhile.

    If the collector freed another graph during a capture (an unreachable synthesizer's), CUDA would end that capture.
    """
    with _CAPTURE:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def record(work: Callable[[], None], pool: Any, side: torch.cuda.Stream) -> Callable[[], None]:
    """Runs `work` once on `side`, then records it; returns what replays it on the current stream.

    `work` reads and writes static tensors only and must bear being run twice: the first run is for what must not happen
    inside a capture (library handles, workspaces, module loading). Graphs of one `pool` share working memory, so they
    must not run at the same time. `side` is the caller's, one for all its graphs: libraries keep workspaces per stream.
    """
    with captures():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may go on using the device meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            work()
        torch.cuda.current_stream().wait_stream(side)
    return graph.replay
