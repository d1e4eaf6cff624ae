"""A test that reaches its time limit, in a process of xdist: a plugin of pytest that conftest.py loads.

pytest-timeout prints the stacks to standard output, which xdist's workers do not have. There faulthandler prints them
and ends the process, also where a call into C holds Python's lock; xdist then names the test as failed."""

import faulthandler
import os
from typing import Any

import pytest

SLOW_LIMIT_S = 1800.0
_STDERR = pytest.StashKey[int]()  # the real one, while a test's is captured


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests get a limit of their own. Those of a GPU are skipped without one, unless triton interprets kernels."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        import torch  # here: it takes seconds, and a process of this plugin's own test has none

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "gpu"))) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    if not hasattr(item.config, "workerinput"):
        return None
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[_STDERR])
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    if not hasattr(item.config, "workerinput"):
        return None
    faulthandler.cancel_dump_traceback_later()
    return True
