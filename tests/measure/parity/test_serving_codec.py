"""The serving codec's document, on the device that is here."""

from __future__ import annotations

import json

import torch

from mktts.measure.parity import serving_codec
from mktts.measure.parity.codec import TOLERANCE


def test_on_a_cpu_the_serving_codec_is_the_streamed_fp32_one():
    row = serving_codec.serving_error("small", frames=12, device="cpu")
    assert (row["served_on"], row["weights"], row["frames"]) == ("cpu", "trained", 12)
    assert row["max_error"] <= TOLERANCE and row["snr_db"] > 80


def test_the_error_is_measured_and_not_assumed(monkeypatch):
    def off(decoder, codes, schedule):
        return decoder.decode_all(codes) + 0.25

    monkeypatch.setattr(serving_codec, "decode_streamed", off)
    row = serving_codec.serving_error("small", frames=4, device="cpu")
    assert abs(row["max_error"] - 0.25) < 1e-6 and row["snr_db"] < 20


def test_the_document_names_its_machine_and_is_json(monkeypatch):
    monkeypatch.setattr(serving_codec, "serving_error", lambda source, device: {"codec": source})
    found = serving_codec.document(device="cpu")
    assert [row["codec"] for row in found["rows"]] == list(serving_codec.SOURCES)
    assert found["device"] == found["environment"]["cpu"] and json.loads(json.dumps(found)) == found
    assert torch.__version__ == found["environment"]["torch"]
