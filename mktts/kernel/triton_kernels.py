"""Launches of Triton kernels; inside `compiling` their compilation alone, many at once."""

import os
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

# Inside `compiling`: what compiles already.
_asked: ContextVar[set[Hashable] | None] = ContextVar("asked", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, a Triton kernel's launch; inside `compiling` nothing runs."""
    asked = _asked.get()
    if asked is None:
        kernel[grid](*args, **options)
        return
    # Triton knows a kernel only when its compilation is over, which is at the end of `compiling`: until then it would
    # hash source, signature and options again for each of the 36 000 launches of all buckets, of some hundred kernels.
    constants = ((name, type(value), value) for name, value in options.items())
    binary = id(kernel), *map(_kind, args), *constants
    if binary not in asked:
        kernel.warmup(*args, grid=grid, **options)
        asked.add(binary)


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that are launched inside compile in several threads, and do not run. They are ready at the end."""
    from triton.runtime import _async_compile

    token = _asked.set(set())
    try:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 4)) as executor, _async_compile.AsyncCompileMode(executor):
            yield
    finally:
        _asked.reset(token)


def _kind(value: Any) -> Hashable:
    """What of an argument decides which binary a launch takes: of a tensor its dtype and whether it is aligned, of a
    whole number its width, whether it is 1 and whether 16 divides it.

    Triton decides by no more than that. Two launches that are taken for one although they are not cost time: the
    second compiles when it first runs."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if (block := getattr(value, "block_shape", None)) is not None:  # a tensor descriptor
        return value.base.dtype, *block, getattr(value, "padding", None)
    if type(value) is int:
        return value.bit_length() // 32, value == 1, value % 16 == 0
    return type(value), value
