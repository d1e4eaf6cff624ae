"""What a process sets while it makes many streams at once."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

SWITCH_S = 0.5e-3  # between threads that want to run
# More than there were before, without which the collector does not look at them: 2 100 streams hold 190 000.
YOUNG_OBJECTS = 1_000_000
MANY, FEW = 16, 8  # open streams of an engine: with more than MANY the process is set for many, until FEW are left

_LOCK = threading.Lock()
_BEFORE = contextlib.ExitStack()  # closing it puts back what was; under the lock
_contexts = 0  # that want the settings; under the lock


def _set() -> None:
    switch_s, (young, *older) = sys.getswitchinterval(), gc.get_threshold()
    _BEFORE.callback(sys.setswitchinterval, switch_s)
    _BEFORE.callback(gc.set_threshold, young, *older)
    if not gc.get_freeze_count():  # else what is frozen is somebody else's, who unfreezes it
        _BEFORE.callback(gc.unfreeze)
        gc.freeze()
    if young:  # 0: nothing is collected anyway
        gc.set_threshold(max(young, YOUNG_OBJECTS), *older)
    sys.setswitchinterval(min(switch_s, SWITCH_S))


@contextlib.contextmanager
def many_streams(collect: bool = True) -> Iterator[None]:
    """For as long as the context lasts, other threads wait less for the interpreter, and it does not pause for garbage.

    What a stream held is free when it ends, without the garbage collector, which would visit all that young streams
    hold: up to 66 ms, in which every thread stands still, while who has heard one frame has 80 ms until the next. So
    nothing is collected but where YOUNG_OBJECTS have come to what was there, which says that something leaks. Threads
    that wait for their turn get it after SWITCH_S instead of 5 ms. With 1,600 listeners of an engine of 24 ms a tick
    without a device, on two cores, p99 first PCM was 218 ms with the long interval and 71 ms with this.

    The settings are the process's: several contexts may be open at once, in any threads, and end in any order. The
    first sets, the last to end puts back what was before the first.
    collect: whether the garbage of before is collected first, which takes as long as any full collection.
    """
    global _contexts
    if collect:
        gc.collect()
    with _LOCK:
        _contexts += 1
        if _contexts == 1:
            _set()
    try:
        yield
    finally:
        with _LOCK:
            _contexts -= 1
            if not _contexts:
                _BEFORE.close()


class ManyStreams:
    """An engine's part in `many_streams`, by how many of its streams are open. One thread at a time."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._is_many = False

    def count(self, open_streams: int) -> None:
        """So many are open now. Nothing is collected where the settings begin, since streams play by then."""
        if not self._is_many and open_streams > MANY:
            self._held.enter_context(many_streams(collect=False))
            self._is_many = True
        elif self._is_many and open_streams <= FEW:
            self._is_many = False
            self._held.close()
