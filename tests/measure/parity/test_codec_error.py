"""The codec's yardsticks, and the committed figures of the codec that serves."""

from __future__ import annotations

import json

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


def test_on_a_cpu_the_serving_codec_is_the_streamed_fp32_one_and_a_wrong_one_is_measured(monkeypatch):
    row = codec_error.serving_error("small", frames=6, device="cpu")
    assert (row["served_on"], row["weights"], row["frames"]) == ("cpu", "trained", 6)
    assert row["max_error"] <= codec_error.TOLERANCE
    monkeypatch.setattr(
        codec_error, "decode_streamed", lambda decoder, codes, schedule: decoder.decode_all(codes) + 0.25
    )
    row = codec_error.serving_error("small", frames=4, device="cpu")
    assert abs(row["max_error"] - 0.25) < 1e-6 and row["snr_db"] < 20


def test_the_document_of_the_serving_codec_names_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(codec_error, "serving_error", lambda source, device: {"codec": source})
    codec_error.write(tmp_path / "codec.json", device="cpu")
    found = json.loads((tmp_path / "codec.json").read_text())
    assert [row["codec"] for row in found["rows"]] == ["small", "random:0.6b"]
    assert found["device"] == found["environment"]["cpu"] and found["torch"] == torch.__version__
