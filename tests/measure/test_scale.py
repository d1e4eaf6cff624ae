"""What is made of the loads and of a replica's death by `bench scale`; the servers and the load are elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.errors import MetricsError
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.scale import figures, killed
from mktts.spec import SAMPLE_RATE_HZ


def point(part: str, open_mean: float, carried: bool = True) -> dict:
    beside = {
        "listeners": 9_999,
        "playing_mean": open_mean,
        "ttfb_p99_ms": 1.0,
        "underruns": 0,
        "refused": 0,
        "duration_s": 60.0,
        "arrivals": 9,
    }
    return {"part": part, "open_mean": open_mean, "carried": carried, **beside}


def test_ratios_are_of_the_largest_loads_that_were_carried():
    points = [point("one", 500), point("one", 800), point("one", 990, False), point("two", 1_560), point("ray", 1_520)]
    found = {name: figure["value"] for name, figure in figures(points, {}).items()}
    assert found == {
        "listeners_1": 800, "listeners_2": 1_560, "listeners_2_ray": 1_520,
        "two_over_one": 1.95, "two_over_one_ray": 1.9,
    }  # fmt: skip
    assert "two_over_one" not in figures(points[3:], {})


def listener(opened_s: float, ended_s: float | None, plays: list[float], error: str | None = None) -> Listener:
    """plays: when a second of sound came."""
    one = Listener(opened_s)
    one.opened_s, one.ended_s, one.error = opened_s, ended_s, error
    for at_s in plays:
        one.hear(at_s, np.zeros(SAMPLE_RATE_HZ, np.float32), 12)
    return one


def test_a_death_is_told_from_what_came_before_it_and_from_the_end_of_the_run():
    seen = Attendance(closed_s=62.0, begin=Mark(0.0, 0, 0, 0, 0), end=Mark(60.0, 0, 0, 0, 0))
    seen.listeners = [
        listener(28.0, 30.4, [28.1, 29.0], error="EngineError"),  # lost
        listener(28.0, 35.0, [28.1, 29.0, 30.0, 31.0]),  # went on
        listener(28.0, 35.0, [28.1, 29.0, 31.5]),  # had a gap after it
        listener(20.0, 29.0, [20.1, 25.0]),  # had a gap before it, and was over
        listener(40.0, 42.0, [40.1, 41.0]),  # came later
        listener(41.0, 41.1, [], error="EngineError"),  # came later and was turned away
        listener(61.0, 61.5, []),  # cut by the end of the run
    ]
    assert killed(seen, 30.0) == {
        "streams": 5, "open_streams": 3, "begun_after": 2, "lost_streams": 1, "disturbed_streams": 2,
        "ended_within_s": pytest.approx(0.4),
    }  # fmt: skip


def test_no_report_of_a_run_without_an_end():
    with pytest.raises(MetricsError, match="did not come to its end"):
        killed(Attendance(), 30.0)
