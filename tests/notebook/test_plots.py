"""Figures: labelled axes with units, whole files, the data points where they belong."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mktts.notebook import figure, plots
from mktts.spec import FRAME_MS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

READY_MS = [50.0, 100.0, 400.0]  # the third chunk is needed at 50 + 2 * 80 = 210 ms and comes 190 ms late
SAMPLES = [SAMPLES_PER_FRAME, SAMPLES_PER_FRAME, 2 * SAMPLES_PER_FRAME]
DRAW = {
    "chunk_timeline": lambda folder: plots.chunk_timeline(READY_MS, SAMPLES, folder),
    "codec_error": lambda folder: plots.error_over_time({"streamed": [0.0, 1e-7]}, 1e-5, folder),
    "stages": lambda folder: plots.stage_breakdown({"tiny": {"talker": 2.0, "predictor": 5.0}}, folder),
    "bytes_per_frame": lambda folder: plots.bytes_per_frame({"0.6B": {"talker": 1e9, "predictor": 2e9}}, folder),
    "times": lambda folder: plots.distribution({"talker": [3.0, 1.0, 2.0]}, "ms", folder, "times", "Times"),
    "roofline": lambda folder: plots.roofline({"0.6B": 3e9}, {"A": 1000.0, "B": 3000.0}, folder),
    "rtf": lambda folder: plots.comparison([("a", 0.5), ("a", 0.7), ("b", 2.0)], "RTF", folder, "rtf", "RTF", 1.0),
}


@pytest.fixture(params=DRAW)
def drawn(request, tmp_path):
    return request.param, DRAW[request.param](tmp_path), tmp_path


def line(axes, label):
    return next(item for item in axes.lines if item.get_label() == label)


def test_every_axis_is_labelled_and_the_figure_titled(drawn):
    name, fig, _ = drawn
    assert any(axes.get_title(loc="left") for axes in fig.axes)
    for axes in fig.axes:
        assert axes.get_ylabel() or [t.get_text() for t in axes.get_yticklabels()]
    assert fig.axes[-1].get_xlabel()


def test_the_file_is_a_whole_png_and_nothing_else_is_left(drawn):
    name, fig, folder = drawn
    assert [path.name for path in folder.iterdir()] == [f"{name}.png"]
    data = (folder / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG") and data.rstrip().endswith(b"IEND\xaeB`\x82")


def test_a_notebook_shows_the_bytes_of_the_file(drawn):
    name, fig, folder = drawn
    shown, size = fig._repr_png_()
    assert shown == (folder / f"{name}.png").read_bytes()
    assert size["width"] == pytest.approx(fig.get_figwidth() * figure.DISPLAY_DPI)


def test_a_picture_in_the_file_is_the_drawn_one_in_fewer_bytes(drawn):
    name, fig, folder = drawn
    whole = io.BytesIO()
    fig.savefig(whole, format="png", dpi=figure.DPI)
    with Image.open(whole) as expected, Image.open(folder / f"{name}.png") as found:
        difference = np.abs(np.asarray(expected.convert("RGB"), int) - np.asarray(found.convert("RGB"), int))
    assert difference.mean() < 0.5 and np.percentile(difference, 99.9) < 16
    assert (folder / f"{name}.png").stat().st_size < 0.6 * len(whole.getvalue())


def test_drawing_leaves_the_callers_matplotlib_settings_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    DRAW["roofline"](tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_the_timeline_shows_what_was_generated_what_was_needed_and_the_late_chunk(tmp_path):
    top, bottom = plots.chunk_timeline(READY_MS, SAMPLES, tmp_path).axes
    generated, needed = line(top, "generated"), line(top, "needed by real-time playback")
    np.testing.assert_allclose(generated.get_xdata(), [0, 0.05, 0.1, 0.4])
    np.testing.assert_allclose(generated.get_ydata(), [0, 0.08, 0.16, 0.32])
    np.testing.assert_allclose(needed.get_xdata(), [0.05, 0.13, 0.13, 0.21, 0.4, 0.56])
    np.testing.assert_allclose(needed.get_ydata(), [0, 0.08, 0.08, 0.16, 0.16, 0.32])
    np.testing.assert_allclose(line(top, "underrun").get_xydata(), [[0.4, 0.16]])
    assert "underruns: 1" in top.get_title(loc="left") and "after 50 ms" in top.get_title(loc="left")
    unplayed_ms = bottom.containers[0].markerline.get_ydata()
    np.testing.assert_allclose(unplayed_ms, [0, 30, 0], atol=1e-9)  # at 100 ms, 50 of the first 80 ms had been played


def test_a_short_timeline_has_the_grid_of_single_frames_and_a_long_one_has_not(tmp_path):
    short = plots.chunk_timeline([50.0], [SAMPLES_PER_FRAME], tmp_path).axes[0]
    long = plots.chunk_timeline([50.0], [10 * SAMPLE_RATE_HZ], tmp_path).axes[0]
    steps = np.diff(short.yaxis.get_minor_locator().tick_values(0, 1))
    np.testing.assert_allclose(steps, FRAME_MS / 1e3)
    assert len(long.yaxis.get_minor_locator()()) == 0


def test_an_error_of_zero_is_drawn_on_the_log_axis(tmp_path):
    (axes,) = plots.error_over_time({"streamed": [0.0, 1e-3]}, 1e-5, tmp_path).axes
    np.testing.assert_allclose(line(axes, "streamed").get_ydata(), [plots.ZERO_ON_LOG_AXIS, 1e-3])
    np.testing.assert_allclose(line(axes, "streamed").get_xdata(), [0, FRAME_MS / 1e3])


def test_the_roofline_is_bytes_over_bandwidth(tmp_path):
    (axes,) = plots.roofline({"0.6B": 3e9}, {"A": 1000.0, "B": 3000.0}, tmp_path).axes
    machines = next(item for item in axes.lines if item.get_marker() == "o")
    np.testing.assert_allclose(machines.get_xydata(), [[1000, 3.0], [3000, 1.0]])


def test_stacked_bars_add_up_and_say_so(tmp_path):
    (axes,) = plots.stage_breakdown({"tiny": {"talker": 2.0, "predictor": 5.0, "codec": 4.0}}, tmp_path).axes
    assert [bar.get_width() for group in axes.containers for bar in group] == [2.0, 5.0, 4.0]
    assert [bar.get_x() for group in axes.containers for bar in group] == [0.0, 2.0, 7.0]
    assert "11" in [text.get_text() for text in axes.texts]


def test_one_thing_has_one_colour_in_every_figure(tmp_path):
    from matplotlib.colors import to_hex

    (bars,) = DRAW["stages"](tmp_path).axes
    (curves,) = DRAW["times"](tmp_path).axes
    talker = figure.COLOURS["talker"].lower()
    assert to_hex(bars.containers[0][0].get_facecolor()) == talker
    assert to_hex(curves.lines[0].get_color()) == talker
    assert figure.colour("upstream, chunks of 300", 0) == figure.COLOURS["upstream"]


def test_the_distribution_marks_median_and_95th_percentile(tmp_path):
    values = list(range(1, 101))
    (axes,) = plots.distribution({"talker": values}, "ms", tmp_path, "d", "D").axes
    marks = next(item for item in axes.lines if item.get_marker() == "o")
    np.testing.assert_allclose(marks.get_xydata(), [[50.5, 0.5], [95.05, 0.95]])
    assert "median and 95th percentile" in str([text.get_text() for text in axes.figure.legends[0].get_texts()])


def test_a_mark_lies_on_the_curve_where_a_percentile_falls_between_two_values(tmp_path):
    (axes,) = plots.distribution({"talker": [1.0, 3.0]}, "ms", tmp_path, "d", "D").axes
    marks = next(item for item in axes.lines if item.get_marker() == "o")
    np.testing.assert_allclose(marks.get_xydata(), [[2.0, 0.5], [2.9, 0.5]])


def test_machines_are_named_above_the_roofline(tmp_path):
    (axes,) = plots.roofline({"0.6B": 3e9}, {"A": 1000.0, "B": 3000.0}, tmp_path).axes
    (names,) = axes.child_axes
    assert [tick.get_text() for tick in names.get_xticklabels()] == ["A", "B"]
    assert axes.get_ylim()[0] > 0.3  # room for names had put the lowest line in the middle
