"""A load of listeners: what is counted of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes import FakeBackend, fake_synthesizer

from mktts.batch.log import TICKS
from mktts.notebook import loads
from mktts.notebook.plots import cost_ms, underruns_a_minute
from mktts.spec import SAMPLE_RATE_HZ


def test_the_figures_are_of_the_held_time():
    second = SAMPLE_RATE_HZ
    before = loads.Visit(9.0, 12, [9.5, 10.5], [second, second], 11.0)
    served = loads.Visit(11.0, 12, [11.25, 12.5], [second, second], 12.5)  # dry from 12.25 to 12.5
    refused, waiting = loads.Visit(12.0, 12, refused=True, ended_s=12.0), loads.Visit(13.0, 12)
    ticks = np.zeros(3, TICKS)
    ticks["ended_s"], ticks["took_s"], ticks["lanes"] = (9.9, 10.1, 13.9), 0.5, (9, 1, 2)
    found = loads.figures([before, served, refused, waiting], ticks, 10.0, 14.0, cpu_s=1.5)
    assert (found["arrivals"], found["refused"], found["unanswered"]) == (3, 1, 1)
    assert found["waits_ms"] == pytest.approx([250.0]) and found["ttfc_p50_ms"] is None  # two of three got nothing
    assert found["underruns"] == 1 and found["frames"] == pytest.approx(37.5)
    assert found["open_mean"] == pytest.approx((1.0 + 1.5 + 0.0 + 1.0) / 4)
    assert found["playing_mean"] == pytest.approx((1.5 + 2.0) / 4)
    assert found["lanes_mean"] == 1.5 and len(found["ticks"]) == 2
    assert cost_ms(found, on_gpu=True) == pytest.approx(1e3 / 37.5) and cost_ms(found, False) == pytest.approx(40.0)
    assert underruns_a_minute(found) == pytest.approx(60 / 3.5) and math.isnan(cost_ms({}, on_gpu=True))


async def test_a_load_is_held_for_its_time_and_its_listeners_are_heard():
    with fake_synthesizer(FakeBackend(eos_after=6), engine="batch") as synth:
        found = await loads.hold(synth, 4, 0.6, 1, "a")
    assert found["listeners"] == 4 and found["duration_s"] == pytest.approx(0.6)
    assert found["refused"] == 0 and len(found["waits_ms"]) == found["arrivals"] - found["unanswered"]
