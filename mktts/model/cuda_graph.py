"""Records work on static tensors as a CUDA graph, while other threads may use the device."""

import gc
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

_CAPTURE = threading.Lock()  # torch allows one capture at a time in a process
Result = TypeVar("Result")


class Recorded(NamedTuple, Generic[Result]):
    """Recorded work: `replay()` runs it on the current CUDA stream and overwrites the tensors of `result`."""

    replay: Callable[[], None]
    result: Result


def record(work: Callable[[], Result], pool: Any, side: torch.cuda.Stream, warm_ups: int = 1) -> Recorded[Result]:
    """Runs `work` `warm_ups` times on `side`, so that libraries allocate what they need, then records it.

    work: reads and writes static tensors only; what it returns during the recording becomes `result`. pool: graphs of
    one memory pool share working memory and must not run concurrently; None gives a private pool. side: a CUDA stream
    of the caller, the same for all its graphs."""
    with _CAPTURE:
        collecting = gc.isenabled()
        gc.disable()  # freeing another graph would abort the capture
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warm_ups):
                    work()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, for instance another synthesizer's worker, may keep using the device
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                result = work()
            torch.cuda.current_stream().wait_stream(side)
        finally:
            if collecting:
                gc.enable()
    return Recorded(graph.replay, result)
