"""Recording work on static tensors as a CUDA graph, safe while other threads use the device."""

import gc
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

_CAPTURE = threading.Lock()  # torch allows one capture at a time in a process
Result = TypeVar("Result")


class Recorded(NamedTuple, Generic[Result]):
    """Recorded work: `replay()` runs it on the current CUDA stream and fills the tensors of `result` again."""

    replay: Callable[[], None]
    result: Result


def record(work: Callable[[], Result], pool: Any, side: torch.cuda.Stream, warm_ups: int = 1) -> Recorded[Result]:
    """Runs `work`, which reads and writes static tensors only, `warm_ups` times on `side`, then records it: libraries
    make what they need in the first run. Its `result` is what `work` returned while recorded.

    pool: graphs of one share working memory, so they must not run at the same time; None: a pool of its own. side: the
    caller's, one for all its graphs."""
    with _CAPTURE:
        collecting = gc.isenabled()
        gc.disable()  # freeing another graph would end the capture
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warm_ups):
                    work()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may go on using the device, for instance another synthesizer's worker
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                result = work()
            torch.cuda.current_stream().wait_stream(side)
        finally:
            if collecting:
                gc.enable()
    return Recorded(graph.replay, result)
