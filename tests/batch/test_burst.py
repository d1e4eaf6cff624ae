"""Many who come at once: how long the last of them waits, by a host and a device whose work takes time."""

from __future__ import annotations

import pytest
from clockwork import HostCosts, burst_of

from mktts.batch import executor


@pytest.mark.parametrize(
    ("listeners", "arrival_s", "most_ms"), [(64, 0.05e-3, 50), (64, 0.15e-3, 58), (64, 0.35e-3, 85), (560, 0.15e-3, 66)]
)
def test_the_last_of_128_arrivals_waits_no_longer_than_their_work_and_four_ticks_take(
    monkeypatch, listeners, arrival_s, most_ms
):
    crowd, _ = burst_of(monkeypatch, listeners, costs=HostCosts(arrival_s=arrival_s))
    assert 1e3 * max(crowd.waits_s) < most_ms
    assert crowd.late_s == []


def test_ticks_wait_a_little_for_those_who_arrive_and_no_listener_notices(monkeypatch):
    """The host takes 45 ms for them."""
    crowd, lanes = burst_of(monkeypatch, 560, costs=HostCosts(arrival_s=0.35e-3))
    during = [one.idle_s for one in lanes.launched if 2.5 < one.began_s < 2.5 + max(crowd.waits_s)]
    assert max(during) < executor._LATE_S and len(during) >= 4 and crowd.late_s == []


def test_a_host_that_is_always_late_lets_people_in_all_the_same(monkeypatch):
    crowd, _ = burst_of(monkeypatch, 64, 40, HostCosts(arrival_s=2e-3, launch_s=8e-3), seconds=2.0)
    assert max(crowd.waits_s) < 1.0
