"""A listener's arithmetic, and the figures of a run, on times that are given."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mktts.errors import MetricsError
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.point import SCHEMA, clean, late_gaps, measured, percentile
from mktts.measure.bench.load.settings import LoadSettings
from mktts.spec import FRAME_RATE_HZ, SAMPLES_PER_FRAME

FRAME_S = 1 / FRAME_RATE_HZ
FRAME = np.full(SAMPLES_PER_FRAME, 0.1, np.float32)
SILENCE = np.zeros(SAMPLES_PER_FRAME, np.float32)


def played(planned_s: float, chunks: list[tuple[float, int]], ended_s: float | None = None) -> Listener:
    """Opened when planned; chunks: (when consumed, frames)."""
    one = Listener(planned_s)
    one.opened_s = planned_s
    for at_s, frames in chunks:
        one.hear(at_s, np.tile(FRAME, frames), frames)
    one.ended_s = ended_s
    return one


def attendance(listeners: list[Listener], begin_s: float, end_s: float, closed_s: float) -> Attendance:
    seen = Attendance(listeners)
    seen.begin, seen.end = Mark(begin_s, 0, 0, 0.0, 0.0), Mark(end_s, 100, 50, 3.0, 1.0)
    seen.closed_s = closed_s
    return seen


def test_a_chunk_that_comes_at_the_last_moment_is_in_time_and_one_after_it_is_not():
    one = played(0.0, [(1.0, 1), (1.0 + FRAME_S, 1), (1.0 + 2 * FRAME_S + 0.01, 4), (1.2, 1)])
    ((dry_s, late_s),) = one.gaps
    assert (dry_s, late_s) == (pytest.approx(1.0 + 2 * FRAME_S), pytest.approx(0.01))
    assert one.first_s == 1.0 and one.frames == 7
    assert one.dry_s == pytest.approx(1.0 + 7 * FRAME_S + 0.01)  # it waited, and went on from there


def test_late_chunks_count_one_by_one_each_from_where_the_player_then_was():
    one = played(0.0, [(0.0, 1), (FRAME_S + 0.02, 1), (2 * FRAME_S + 0.05, 1)])
    assert [late for _, late in one.gaps] == [pytest.approx(0.02), pytest.approx(0.03)]


def test_the_audible_moment_is_when_it_sounds_not_when_it_came():
    one = Listener(0.0)
    one.hear(1.0, SILENCE, 1)
    one.hear(1.01, np.concatenate((SILENCE[: SAMPLES_PER_FRAME // 2], FRAME[: SAMPLES_PER_FRAME // 2])), 1)
    assert one.audible_s == pytest.approx(1.0 + 1.5 * FRAME_S)


def test_a_chunk_without_samples_is_no_first_pcm():
    one = Listener(0.0)
    one.hear(1.0, FRAME[:0], 2)
    assert one.first_s is None and one.frames == 2 and one.waits_since(9.0) is None


def test_underruns_are_those_whose_player_ran_dry_in_the_held_time_and_the_one_that_still_waits():
    before = played(0.0, [(1.0, 1), (2.5, 1)])  # dry at 1.08, before the held time
    within = played(0.0, [(2.0, 1), (2.5, 1)])
    waiting = played(0.0, [(2.9, 1)])
    over = played(0.0, [(2.9, 1)], ended_s=2.9)
    fed = played(0.0, [(2.0, 1), (2.5, 1)])
    fed.timed = False
    gaps = late_gaps([before, within, waiting, over, fed], 2.0, 3.0, 4.0)
    # `before` plays again from 2.5 to 2.58 and then waits like `within` and `waiting`
    assert [len(found) for found in gaps] == [1, 2, 1, 0, 0]
    assert gaps[2] == [(pytest.approx(2.9 + FRAME_S), pytest.approx(4.0 - 2.9 - FRAME_S))]


def test_first_pcm_counts_from_the_plan_and_an_arrival_without_one_is_infinitely_late():
    listeners = [played(10.0 + i, [(10.02 + i, 1)], ended_s=11.0 + i) for i in range(98)]
    listeners[0].opened_s = 10.015  # called late: the wait is still 20 ms
    refused, waiting, outside = Listener(50.0), Listener(51.0), played(5.0, [(9.0, 1)], ended_s=9.0)
    refused.opened_s, refused.ended_s, refused.refused = 50.0, 50.1, True
    waiting.opened_s = 51.0
    seen = attendance([outside, *listeners, refused, waiting], 10.0, 110.0, 112.0)
    point = measured(seen, LoadSettings("x"))
    assert (point["arrivals"], point["refused"], point["unanswered"]) == (100, 1, 1)
    assert (point["ttfc_p50_ms"], point["ttfc_p95_ms"]) == (pytest.approx(20.0), pytest.approx(20.0))
    assert point["ttfc_p99_ms"] is None and point["ttfc_max_ms"] is None
    assert point["offered_rps"] == pytest.approx(1.0)
    assert point["held"] and not clean(point)
    assert point["audio_s_per_s"] == pytest.approx(100 * FRAME_S / 100)
    assert point["host_us_per_frame"] == pytest.approx(2e4)  # 3 s of the process less 1 s of the loop, 100 frames


def test_who_leaves_before_the_first_pcm_waits_for_nothing():
    gone = Listener(0.0)
    gone.opened_s, gone.ended_s, gone.left = 0.0, 0.01, True
    seen = attendance([gone, played(1.0, [(1.5, 1)], ended_s=2.0)], 0.0, 60.0, 60.0)
    point = measured(seen, LoadSettings("x"))
    assert point["unanswered"] == 0 and point["ttfc_max_ms"] == pytest.approx(500.0)


def test_listeners_are_streams_that_are_open_and_the_mean_is_over_the_held_time():
    listeners = [
        played(5.0, [(5.0, 1)], ended_s=15.0),  # half of its time lies within
        played(12.0, [(12.0, 25)], ended_s=17.0),
        played(19.0, [(19.0, 1)]),  # still open at the end
    ]
    refused = Listener(13.0)
    refused.opened_s, refused.ended_s, refused.refused = 13.0, 14.0, True
    point = measured(attendance([*listeners, refused], 10.0, 20.0, 21.0), LoadSettings("x", seconds=10.0))
    assert point["open_mean"] == pytest.approx((5 + 5 + 1) / 10)
    assert point["open_max"] == 2
    assert point["playing_mean"] == pytest.approx((25 * FRAME_S + FRAME_S) / 10)


def test_a_run_that_was_short_or_cut_or_hangs_is_not_held():
    def held(settings: LoadSettings, **changes: object) -> bool:
        seen = attendance([played(0.0, [(0.5, 1)], ended_s=1.0)], 0.0, settings.seconds, settings.seconds)
        for name, value in changes.items():
            setattr(seen, name, value)
        return measured(seen, settings)["held"]

    assert held(LoadSettings("x"))
    assert not held(LoadSettings("x", seconds=59.0))
    assert not held(LoadSettings("x"), end=None)
    assert not held(LoadSettings("x"), end=Mark(59.9, 0, 0, 0.0, 0.0))
    assert not held(LoadSettings("x"), hung=1)


def test_a_run_that_ended_in_its_warm_up_measured_nothing():
    with pytest.raises(MetricsError, match="warm-up"):
        measured(Attendance(closed_s=3.0), LoadSettings("x"))


def test_errors_make_a_point_unclean_and_are_counted_by_kind():
    failed = played(1.0, [(1.1, 1)], ended_s=1.2)
    failed.error = "EngineError: x"
    point = measured(attendance([failed], 0.0, 60.0, 60.0), LoadSettings("x"))
    assert point["errors"] == 1 and point["error_kinds"] == {"EngineError: x": 1} and not clean(point)


def test_a_point_has_every_name_of_the_schema_once_its_conditions_are_named():
    point = measured(attendance([played(1.0, [(1.1, 1)], ended_s=2.0)], 0.0, 60.0, 60.0), LoadSettings("x"))
    assert set(SCHEMA) - set(point) == {"codec", "deterministic", "context_rows"}


@pytest.mark.parametrize("percent", [0, 50, 95, 99, 100])
def test_percentiles_are_numpys_where_all_is_finite(percent):
    values = np.random.default_rng(0).exponential(size=37)
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_percentile_that_touches_an_infinite_value_is_infinite():
    assert percentile([1.0, 2.0, math.inf], 50) == 2.0
    assert percentile([1.0, 2.0, math.inf], 51) == math.inf
    assert percentile([math.inf, math.inf], 50) == math.inf
    with pytest.raises(MetricsError):
        percentile([], 50)
