"""The codec's yardsticks."""

import numpy as np
import pytest

from mktts.errors import CodecError
from mktts.measure.parity import codec as codec_error
from mktts.spec import SAMPLES_PER_FRAME


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
