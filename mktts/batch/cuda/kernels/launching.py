"""Launches of Triton kernels, or, inside `compiling`, their compilation alone, many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, a Triton kernel's launch; inside `compiling` nothing runs."""
    if _only_compiles.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Kernels that are launched inside compile in `threads` threads, and do not run. They are ready at the end."""
    from triton.runtime import _async_compile

    token = _only_compiles.set(True)
    try:
        with ThreadPoolExecutor(threads) as executor, _async_compile.AsyncCompileMode(executor):
            yield
    finally:
        _only_compiles.reset(token)
