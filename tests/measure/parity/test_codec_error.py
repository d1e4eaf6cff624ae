"""The codec's yardsticks."""

import numpy as np
import pytest
import torch

from mktts.errors import CodecError
from mktts.measure.parity import codec as codec_error
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME


@pytest.mark.parametrize(
    ("frames", "schedule", "sizes"),
    [(10, (1, 1, 2, 4), [1, 1, 2, 4, 2]), (5, (2,), [2, 2, 1]), (2, (8, 1), [2]), (0, (1,), [])],
)
def test_the_schedule_cuts_without_losing_a_frame_and_its_last_entry_repeats(frames, schedule, sizes):
    codes = torch.arange(frames * NUM_CODEBOOKS).reshape(frames, NUM_CODEBOOKS)
    chunks = list(codec_error.split(codes, schedule))
    assert [len(chunk) for chunk in chunks] == sizes
    assert torch.equal(torch.cat([codes[:0], *chunks]), codes)


@pytest.mark.parametrize("schedule", [(), (1, 0)], ids=["empty", "zero"])
def test_a_schedule_that_would_not_end_is_refused(schedule):
    with pytest.raises(CodecError, match="at least 1 frame"):
        list(codec_error.split(torch.zeros(3, NUM_CODEBOOKS), schedule))


def test_errors_are_told_per_frame():
    reference = np.zeros(3 * SAMPLES_PER_FRAME)
    pcm = reference.copy()
    pcm[SAMPLES_PER_FRAME - 1], pcm[SAMPLES_PER_FRAME] = 0.25, -0.5
    assert codec_error.frame_errors(pcm, reference).tolist() == [0.25, 0.5, 0.0]
    with pytest.raises(CodecError, match="equal lengths"):
        codec_error.frame_errors(pcm[:-1], reference)


def test_the_ratio_is_signal_over_noise_in_decibels():
    signal = np.ones(1000)
    assert codec_error.snr_db(signal * 0.9, signal) == pytest.approx(20.0)
    assert codec_error.snr_db(signal, signal) == float("inf")
