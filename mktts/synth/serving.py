"""What a process sets that serves many streams at once."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

SWITCH_S = 0.5e-3  # between threads that want to run
# More than there were before, without which the collector does not look at them: 2 100 streams hold 190 000.
YOUNG_OBJECTS = 1_000_000


@contextlib.contextmanager
def many_streams() -> Iterator[None]:
    """For as long as the context lasts, other threads wait less for the interpreter, and it does not pause for garbage.

    What a stream held is free when it ends, without the garbage collector, which would visit all that young streams
    hold: up to 66 ms, in which every thread stands still, while who has heard one frame has 80 ms until the next. So
    nothing is collected but where YOUNG_OBJECTS have come to what was there, which says that something leaks. Threads
    that wait for their turn get it after SWITCH_S instead of 5 ms. With 1,600 listeners of an engine of 24 ms a tick
    without a device, on two cores, p99 first PCM was 218 ms with the long interval and 71 ms with this.
    """
    before_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
