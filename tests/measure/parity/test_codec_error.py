"""The codec's yardsticks, and the committed figures of the codec that serves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mktts.codec.decoder import CodecDecoder
from mktts.errors import CodecError
from mktts.measure.parity import codec as codec_error
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME


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


def test_random_codes_are_seeded_and_in_range():
    codes = codec_error.random_codes(50, seed=3)
    assert codes.shape == (50, NUM_CODEBOOKS) and 0 <= codes.min() and codes.max() < CODEBOOK_SIZE
    assert torch.equal(codes, codec_error.random_codes(50, seed=3))
    assert not torch.equal(codes, codec_error.random_codes(50, seed=4))


@pytest.mark.parametrize(("frames", "chunk", "context"), [(5, 0, 25), (5, 300, -1), (0, 300, 25)])
def test_chunks_that_cannot_be_cut_are_refused(tiny, frames, chunk, context):
    decoder = CodecDecoder(tiny.codec_config, tiny.codec_tensors())
    with pytest.raises(CodecError, match=r"chunk_frames >= 1|codes must be"):
        codec_error.decode_chunked(decoder, codec_error.random_codes(frames, seed=0), chunk, context)


def test_the_yardstick_sees_a_wrong_stream(tiny):
    decoder = CodecDecoder(tiny.codec_config, tiny.codec_tensors())
    codes = codec_error.random_codes(20, seed=0)
    offline = decoder.decode_all(codes)
    right = codec_error.frame_errors(codec_error.decode_streamed(decoder, codes, (1, 3)), offline)
    wrong = codec_error.frame_errors(codec_error.decode_chunked(decoder, codes, 10, 0), offline)
    assert right.max() <= codec_error.TOLERANCE
    assert wrong[:10].max() <= codec_error.TOLERANCE < wrong[10]


def test_on_a_cpu_the_serving_codec_is_the_streamed_fp32_one_and_a_wrong_one_is_measured(monkeypatch):
    row = codec_error.serving_error("small", frames=6, device="cpu")
    assert (row["served_on"], row["weights"], row["frames"]) == ("cpu", "trained", 6)
    assert row["max_error"] <= codec_error.TOLERANCE and row["snr_db"] > 80
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
