"""Launches Triton kernels; inside `compiling`, only compiles them, many at once."""

import os
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

# Inside `compiling`: the binaries whose compilation has been requested.
_asked: ContextVar[set[Hashable] | None] = ContextVar("asked", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a Triton kernel, `kernel[grid](*args, **options)`; inside `compiling` it is only compiled."""
    asked = _asked.get()
    if asked is None:
        kernel[grid](*args, **options)
        return
    # Triton knows a kernel only after its compilation, that is, at the end of `compiling`: until then it would hash
    # source, signature and options again for each of the 36,000 launches of all buckets, of about a hundred kernels.
    constants = ((name, type(value), value) for name, value in options.items())
    binary = id(kernel), *map(_kind, args), *constants
    if binary not in asked:
        kernel.warmup(*args, grid=grid, **options)
        asked.add(binary)


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels launched inside the block are compiled in several threads and not run; all are ready when it ends."""
    from triton.runtime import _async_compile

    token = _asked.set(set())
    try:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 4)) as executor, _async_compile.AsyncCompileMode(executor):
            yield
    finally:
        _asked.reset(token)


def _kind(value: Any) -> Hashable:
    """The properties of an argument that select the binary of a launch: a tensor's dtype and alignment; a whole
    number's width, whether it is 1, and whether it is a multiple of 16.

    Triton distinguishes no more than that. If two different launches were mistaken for one, the second would only be
    compiled later, when it first runs."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if (block := getattr(value, "block_shape", None)) is not None:  # a tensor descriptor
        return value.base.dtype, *block, getattr(value, "padding", None)
    if type(value) is int:
        return value.bit_length() // 32, value == 1, value % 16 == 0
    return type(value), value
