"""The measures of the voice against known truth."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.errors import MetricsError
from mktts.training.mcd import distortion_db, median_f0_hz
from mktts.training.wer import word_error_rate, word_errors

RATE_HZ = 24_000


def vowel(f0_hz: float, seconds: float = 0.6) -> np.ndarray:
    t = np.arange(int(RATE_HZ * seconds)) / RATE_HZ
    formants = ((700, 130), (1200, 170))
    out = sum(
        sum(1 / (1 + ((k * f0_hz - hz) / width) ** 2) for hz, width in formants) * np.sin(2 * np.pi * k * f0_hz * t)
        for k in range(1, int(6000 / f0_hz))
    )
    return (0.3 * out / np.abs(out).max()).astype(np.float32)


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a b c", "a x c d", 2), ("a", "", 1), ("", "a b", 2)],
)
def test_word_errors(said, heard, errors):
    assert word_errors(said.split(), heard.split()) == errors


def test_the_rate_is_over_all_words_and_ignores_case_and_punctuation():
    assert word_error_rate(["Hello, world.", "Twenty-one dogs!"], ["hello world", "twenty one"]) == 1 / 5
    with pytest.raises(MetricsError):
        word_error_rate(["..."], ["a"])


@pytest.mark.parametrize("f0_hz", [90, 150, 220, 310])
def test_pitch_of_a_vowel(f0_hz):
    assert abs(median_f0_hz(vowel(f0_hz)) / f0_hz - 1) < 0.02


def test_distortion_is_nothing_for_the_same_audio_and_more_for_another_pitch():
    same = vowel(120)
    assert distortion_db(same, same) < 1e-3
    assert distortion_db(same, vowel(180)) > 0.5


def test_a_longer_silence_in_front_is_aligned_away():
    sound, other = vowel(120), vowel(240)
    late = np.concatenate([sound[:4800], sound])
    assert distortion_db(sound, late) < distortion_db(sound, other)
