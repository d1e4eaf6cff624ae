"""Measures of sound against sounds whose values are known, and the record of an evaluation."""

import json

import numpy as np
import pytest
from commands import run
from test_training_codec import vowels

from mktts.errors import BackendUnavailable
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training import voice_report
from mktts.training.judge import evaluate, signal
from mktts.training.judge.evaluate import Spoken, put

TIME = np.arange(2 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ
NOISE = 0.1 * np.random.default_rng(0).normal(size=len(TIME))


def harmonics(f0_hz, rng=None):
    """A pulse train; rng: of the phases."""
    numbers = range(1, int(10_000 / f0_hz))
    phases = rng.uniform(0, 2 * np.pi, len(numbers)) if rng else np.zeros(len(numbers))
    return sum(0.02 * np.sin(2 * np.pi * f0_hz * n * TIME + p) for n, p in zip(numbers, phases, strict=True))


def utterances(student, teacher):
    return [Spoken("hello there", "anna", student, teacher, i > 0) for i in range(4)]


def test_a_comb_is_heard_in_the_band_that_it_lies_in():
    comb = np.tile(NOISE[: signal.STEP_SAMPLES], 100)
    low = signal.band_passed(comb, 700, 1_500) + signal.band_passed(NOISE, 1_500, 12_000)
    found = signal.comb(low)
    inside = [i for i, hz in enumerate(signal.CENTRES_HZ) if 850 < hz < 1_300]
    outside = [i for i, hz in enumerate(signal.CENTRES_HZ) if hz > 1_900]
    assert all(found[i] > 0.95 for i in inside) and all(abs(found[i]) < 0.15 for i in outside)
    assert np.abs(signal.comb(NOISE)[6:]).max() < 0.15 and np.isnan(signal.comb(np.zeros(48_000))).all()
    assert signal.CENTRES_HZ[::14] == pytest.approx((315, 8_000), rel=0.01)


def test_pitch_is_found_and_whether_a_band_keeps_to_it():
    rng = np.random.default_rng(1)
    voice = harmonics(120, rng)
    periods = signal.pitch_periods(voice)
    assert np.median(periods) == 200 and (signal.pitch_periods(NOISE) == 0).mean() > 0.9
    assert signal.pitch_band(voice) > 0.95
    robbed = signal.band_passed(voice, 0, 900) + signal.band_passed(harmonics(50, rng), 900, 5_000)
    assert signal.pitch_band(robbed) < 0.3 and np.isnan(signal.pitch_band(NOISE[:100]))


def test_energy_above_eight_kilohertz_is_that_of_white_noise():
    assert signal.high_band_db(NOISE) == pytest.approx(10 * np.log10(1 / 3), abs=0.2)
    assert signal.high_band_db(signal.band_passed(NOISE, 0, 7_000)) < -50


def test_pitch_errors_are_measured_along_the_words():
    pytest.importorskip("librosa")
    teacher = vowels(1.5, 3) / np.float32(32_768)
    cents, voicing = signal.pitch_errors(teacher, teacher)
    assert cents == 0 and voicing == 0
    slower = np.interp(np.arange(0, len(teacher), 0.9), np.arange(len(teacher)), teacher).astype(np.float32)
    assert 100 < signal.pitch_errors(slower, teacher)[0] < 300  # 182 cents lower


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sections_fill_the_figures_with_their_intervals_and_what_must_be_reached():
    teacher = (harmonics(120) + 0.05 * NOISE).astype(np.float32)
    record = {"utterances": []}
    shorter = utterances(teacher[:-4_800], teacher)
    evaluate.sound(shorter, record)
    evaluate.ends(shorter, record)
    figures = record["figures"]
    must = {"must": ["at most", 0], "met": False}
    assert figures["ends_missed"] == {"value": 1, "n": 4, "low": None, "high": None, **must}
    assert figures["durations_inside"]["value"] == 1 and figures["comb_worst_band"]["met"]
    assert abs(figures["comb_worst_band"]["value"]) < 0.05
    assert figures["pitch_band_ratio"]["value"] == pytest.approx(1, 0.1)
    assert figures["high_band_db"]["low"] <= figures["high_band_db"]["value"] <= figures["high_band_db"]["high"]
    comb = np.tile(NOISE[: signal.STEP_SAMPLES], 100).astype(np.float32)
    evaluate.sound(utterances(comb, teacher), record)
    assert record["figures"]["comb_worst_band"]["value"] > 0.5 and not record["figures"]["comb_worst_band"]["met"]
    evaluate.sound(utterances(np.zeros(9_600, np.float32), teacher), record)  # silence has no value and meets nothing
    assert record["figures"]["pitch_band_ratio"]["value"] is None and not record["figures"]["pitch_band_ratio"]["met"]
    json.dumps(record, allow_nan=False)


def test_loudness_is_of_each_speaker():
    pytest.importorskip("pyloudnorm")
    tone = 0.1 * np.sin(2 * np.pi * 997 * TIME).astype(np.float32)
    said = [Spoken("a", name, tone * gain, tone, True) for name, gain in (("a", 1), ("b", 2))]
    record = {}
    evaluate.levels(said, record)
    assert record["figures"]["loudness_spread_lu"]["value"] == pytest.approx(6.02, abs=0.05)


def test_a_missing_package_is_named_and_an_unknown_section_too(tmp_path, monkeypatch):
    noise = NOISE.astype(np.float32)
    monkeypatch.setattr(evaluate, "spoken", lambda *given: utterances(noise, noise))
    monkeypatch.setitem(__import__("sys").modules, "distillmos", None)
    words = ["--checkpoint", "small", "--teacher", tmp_path, "--keep", tmp_path, "--output", tmp_path / "e.json"]
    with pytest.raises(BackendUnavailable, match=r"expected the package distillmos.*data/packages\.txt"):
        run("train evaluate", *words, "--only", "ends", "quality")
    assert "ends_missed" in json.loads((tmp_path / "e.json").read_text())["figures"]
    with pytest.raises(SystemExit):
        run("train evaluate", *words, "--only", "taste")


def test_tables_say_what_is_required_measured_and_missing(tmp_path):
    record = {}
    put(record, "wer_ratio", 1.234, 10, (1.1, 1.4))
    put(record, "lead_ms", 55.0, 10)
    (row,) = voice_report.figures(record, True)
    must = {"required": "at most 1.5", "met": True}
    assert row == {"figure": "wer ratio", "measured": 1.23, "95 % interval": "1.1 to 1.4", "n": 10} | must
    assert voice_report.figures(record, False) == [{"figure": "lead ms", "measured": 55.0, "n": 10}]
    assert voice_report.figures(None, True) == [{"figure": voice_report.NOT_MEASURED}]
    found = voice_report.evidence(tmp_path)
    assert len(found.missing) == 3 and not found.pairs


def test_the_committed_evidence_can_be_shown():
    found = voice_report.evidence()
    assert not found.missing and found.pairs and all(pair["clips"] for pair in found.pairs)
    assert all(len(voice_report.figures(found.evaluation, required)) > 3 for required in (True, False))
