"""How many replicas the open streams need: the policy of Ray Serve's autoscaler, called a few times a second."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

OPEN, CAPACITY = "open_streams", "streams_max"  # what a replica reports of itself
FULL = 0.7  # of its capacity that a replica should carry: the rest is for those who come while another one starts
UPSCALE_S, DOWNSCALE_S = 2.0, 300.0  # that the need lasts before a replica is started, or let go
PERIOD_S, LOOK_BACK_S = 1.0, 4.0  # between reports, and over which they are averaged


def wanted(open_streams: float, capacity: float) -> int:
    """Replicas for so many open streams, each with that capacity; at least 1."""
    return max(1, math.ceil(open_streams / (FULL * capacity))) if capacity > 0 else 1


def by_open_streams(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's form of `wanted`: from its AutoscalingContext to replicas and a state, of which there is none.

    Before the first replica has reported, the number stays as it is.
    """
    metrics = context.aggregated_metrics or {}
    open_streams, capacities = (_values(metrics.get(name)) for name in (OPEN, CAPACITY))
    if not capacities:
        return context.target_num_replicas, {}
    return wanted(sum(open_streams), min(capacities)), {}


def _values(by_replica: Any) -> list[float]:
    values: Iterable[float | None] = (by_replica or {}).values()
    return [value for value in values if value is not None]
