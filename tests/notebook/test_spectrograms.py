"""The spectrograms: levels and places of known tones, and the picture."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.notebook.spectrograms import WINDOW, draw_spectrograms, hiss_at_s, spectrogram_db
from mktts.spec import SAMPLE_RATE_HZ


def tone(hz: float, amplitude: float, seconds: float = 1.0) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (amplitude * np.sin(2 * np.pi * hz * t)).astype(np.float32)


@pytest.mark.parametrize("hz, dbfs", [(1_500.0, 0.0), (6_000.0, -40.0)])
def test_a_tone_stands_at_its_frequency_with_its_level(hz, dbfs):
    found = spectrogram_db(tone(hz, 10 ** (dbfs / 20)))
    middle = found[:, found.shape[1] // 2]
    assert middle.max() == pytest.approx(dbfs, abs=0.1) and found.shape == (WINDOW // 2 + 1, 101)
    assert np.argmax(middle) == round(hz / SAMPLE_RATE_HZ * WINDOW)


def test_the_hiss_is_found_where_it_is_and_no_louder_vowel_instead():
    pcm = tone(300, 0.5, 3.0)
    pcm[36_000:43_200] += (0.05 * np.random.default_rng(0).standard_normal(7_200)).astype(np.float32)
    assert hiss_at_s(pcm) == pytest.approx(1.525, abs=0.06)  # a stretch of 0.25 s around 1.5 to 1.8 s
    assert hiss_at_s(pcm[:2_000]) == 0


def test_a_picture_of_three_clips(tmp_path):
    clips = {"teacher": tone(500, 0.1), "voice before": tone(700, 0.1, 0.7), "voice": tone(900, 0.1)}
    figure = draw_spectrograms(clips, tmp_path)
    whole, hiss = figure.axes[:3], figure.axes[3:6]
    assert [axes.get_title(loc="left") for axes in whole] == list(clips)
    assert {axes.get_xlim() for axes in whole} == {(0, 1)} and {axes.get_ylim() for axes in hiss} == {(5.5, 6.5)}
    for axes, hz in zip(whole, (0.5, 0.7, 0.9), strict=True):  # the loudest row is at the tone, in kHz
        image = axes.get_images()[0]
        left, right, bottom, top = image.get_extent()
        row = int(np.argmax(image.get_array().mean(1)))
        assert bottom + (row + 0.5) * (top - bottom) / len(image.get_array()) == pytest.approx(hz, abs=0.06)
    assert (tmp_path / "spectrograms.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="none"):
        draw_spectrograms({}, tmp_path)
