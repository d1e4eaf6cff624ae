"""Figures: labelled axes with units, whole files, the data points where they belong."""

from types import SimpleNamespace

import numpy as np
import pytest

from mktts.notebook import plots
from mktts.spec import SAMPLES_PER_FRAME

READY_MS = [50.0, 100.0, 400.0]  # the third chunk is needed at 50 + 2 * 80 = 210 ms and comes 190 ms late
CHUNKS = [
    SimpleNamespace(timings=SimpleNamespace(ready_ms=ms), pcm=np.zeros(frames * SAMPLES_PER_FRAME))
    for ms, frames in zip(READY_MS, (1, 1, 2), strict=True)
]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr(plots, "DPI", 40)


def test_the_timeline_shows_what_was_generated_what_was_needed_and_the_late_chunk(tmp_path):
    top, bottom = plots.chunk_timeline(CHUNKS, tmp_path).axes
    lines = {line.get_label(): line for line in top.lines}
    np.testing.assert_allclose(lines["generated"].get_xydata(), [[0, 0], [0.05, 0.08], [0.1, 0.16], [0.4, 0.32]])
    needed = lines["needed by real-time playback"]
    np.testing.assert_allclose(needed.get_xdata(), [0.05, 0.13, 0.13, 0.21, 0.4, 0.56])
    np.testing.assert_allclose(needed.get_ydata(), [0, 0.08, 0.08, 0.16, 0.16, 0.32])
    np.testing.assert_allclose(lines["underrun"].get_xydata(), [[0.4, 0.16]])
    assert "underruns: 1" in top.get_title(loc="left") and "after 50 ms" in top.get_title(loc="left")
    unplayed_ms = bottom.containers[0].markerline.get_ydata()
    np.testing.assert_allclose(unplayed_ms, [0, 30, 0], atol=1e-9)  # at 100 ms, 50 of the first 80 ms had been played


def test_stacked_bars_add_up(tmp_path):
    stages = {"tiny": {"talker": 2.0, "predictor": 5.0, "codec": 4.0}}
    (axes,) = plots.bars(stages, "ms", "Stages", tmp_path, "stages", real_time=True).axes
    assert [(bar.get_x(), bar.get_width()) for group in axes.containers for bar in group] == [(0, 2), (2, 5), (7, 4)]
    assert "11" in [text.get_text() for text in axes.texts] and (tmp_path / "stages.png").is_file()


def test_two_numbers_that_lie_close_on_an_axis_are_not_written_over_each_other():
    _, axes = plots.new(2.0)
    axes.set_xscale("log")
    plots.plain_ticks(axes.xaxis, [64, 1_400, 1_600])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "1,400", ""]
