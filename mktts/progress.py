"""A line for whoever waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0


@contextmanager
def announced(what: str, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Prints `what` to standard error where the work inside takes longer than `patience_s`, and then how long."""
    begun_s = time.perf_counter()
    timer = threading.Timer(patience_s, lambda: print(f"{what} ...", end="", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        elapsed_s = time.perf_counter() - begun_s
        if elapsed_s > patience_s:
            print(f" {elapsed_s:.1f} s", file=sys.stderr)
