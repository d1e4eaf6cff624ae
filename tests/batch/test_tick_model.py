"""The tick model against the measured table of one H200, and its fit against machines that are slower than believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.batch.tick import TickFit, TickModel
from mktts.errors import OptionsError

# (lanes, prompt rows): ms of a tick, frame and codec and PCM on the host, one H200, all lanes at 400 rows
MEASURED = {
    (8, 0): 5.2, (32, 0): 6.2, (64, 0): 6.9, (128, 0): 9.2, (192, 0): 11.7, (256, 0): 13.6, (384, 0): 18.4,
    (512, 0): 22.6, (8, 64): 5.6, (32, 64): 6.4, (32, 256): 7.1, (64, 64): 7.2, (64, 256): 7.6, (64, 1024): 10.1,
    (128, 64): 9.4, (128, 256): 9.8, (128, 1024): 12.3, (192, 256): 12.3, (256, 64): 13.8, (256, 256): 14.3,
    (256, 1024): 16.3, (384, 256): 18.9, (512, 64): 22.8, (512, 256): 23.5, (512, 1024): 26.0,
}  # fmt: skip


def test_the_h200_model_is_within_five_percent_of_every_measured_bucket():
    model = TickModel.h200()
    errors = {size: 1e3 * model.predict(*size, size[0] * 400) / ms - 1 for size, ms in MEASURED.items()}
    assert {size: error for size, error in errors.items() if abs(error) > 0.05} == {}


@pytest.mark.parametrize("parts", [(-1e-3, 0, 0, 0), (0, 0, 1e-6, 0), (float("nan"), 0, 0, 0), (float("inf"), 0, 0, 0)])
def test_impossible_parts_are_refused(parts):
    with pytest.raises(OptionsError):
        TickModel(*parts)


def ticks(seed: int, count: int):
    """Sizes such as a run makes: lanes, prompt rows, rows attended to."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lanes = int(rng.choice([8, 32, 64, 128, 256, 512]))
        yield lanes, int(rng.choice([0, 0, 64, 256, 1024])), int(lanes * rng.uniform(50, 500))


@settings(max_examples=25, deadline=None)
@given(factors=st.lists(st.floats(0.3, 6.0), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_the_fit_learns_a_machine_with_other_parts(factors, seed):
    prior = TickModel.h200()
    truth = TickModel(*np.multiply((prior.constant_s, prior.lane_s, prior.row_s, prior.attention_s), factors).tolist())
    fit, rng = TickFit(prior), np.random.default_rng(seed)
    for size in ticks(seed, 600):
        fit.observe(*size, truth.predict(*size) * rng.normal(1.0, 0.03))
    for size in ticks(seed + 1, 20):
        assert fit.model.predict(*size) == pytest.approx(truth.predict(*size), rel=0.1)


def test_one_outlier_moves_little():
    fit = TickFit(TickModel.h200())
    for size in ticks(0, 200):
        fit.observe(*size, fit.model.predict(*size))
    before_s = fit.model.predict(256, 64, 100_000)
    fit.observe(256, 64, 100_000, 30.0)  # the machine slept
    assert fit.model.predict(256, 64, 100_000) == pytest.approx(before_s, rel=0.1)


def test_what_the_ticks_say_nothing_about_keeps_its_value():
    prior = TickModel.h200()
    slow = replace(prior, constant_s=2 * prior.constant_s)
    fit = TickFit(prior)
    for _ in range(2_000):  # always the same size, never a prompt
        fit.observe(8, 0, 3_000, slow.predict(8, 0, 3_000))
    assert fit.model.predict(8, 0, 3_000) == pytest.approx(slow.predict(8, 0, 3_000), rel=0.02)
    assert fit.model.row_s == pytest.approx(prior.row_s)


def test_a_clock_that_stood_still_teaches_nothing():
    fit = TickFit(TickModel.cpu())
    assert fit.observe(4, 0, 400, 0.0) == TickModel.cpu()


@pytest.mark.parametrize("wrong", [{"memory_ticks": 0.5}, {"prior_ticks": 0.0}])
def test_impossible_fits_are_refused(wrong):
    with pytest.raises(OptionsError):
        TickFit(TickModel.cpu(), **wrong)
