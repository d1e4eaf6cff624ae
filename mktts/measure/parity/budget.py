"""How long a comparison may go on: what is measured in minutes makes fewer frames on a slower machine, and says so."""

from __future__ import annotations

import math
import time


class Budget:
    """Seconds from now on. Whoever works under it asks `over` between frames, and always makes the first."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 when it is over."""
        return self._end_s - time.perf_counter()

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def share(self, part: float) -> Budget:
        """A budget of `part` (0 to 1) of what is left, from now on; no less than nothing."""
        return Budget(max(0.0, self.left_s) * part)
