"""Loads as the notebook shows them: what is counted, what it costs, whose codes are compared."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from fakes import FakeBackend, fake_synthesizer
from load_document import load_file, point

from mktts.batch.tick import TICKS, TickModel
from mktts.errors import OptionsError
from mktts.measure.load.client import Listener, LoadRun, Moment
from mktts.notebook import evidence, figure, load_plots, many
from mktts.notebook.many import Held


def ticks_of(*rows):
    """Ticks of 10 ms every 20 ms: (lanes, new, prompt rows, bucket's lanes, late in s) each."""
    found = np.zeros(len(rows), TICKS)
    found["ended_s"], found["took_s"], found["open"] = 100.01 + 0.02 * np.arange(len(rows)), 0.01, 5
    for name, column in zip(("lanes", "new", "rows", "bucket_lanes", "late_s"), zip(*rows, strict=True), strict=True):
        found[name] = column
    return found


def test_numbers_of_listeners_are_read_and_refused_by_name():
    assert many.loads("LISTENERS", "1, 4,16") == (1, 4, 16)
    for wrong in ("", "4,", "0", "-1,2", "a", "1.5"):
        with pytest.raises(OptionsError, match="LISTENERS must be numbers of listeners"):
            many.loads("LISTENERS", wrong)


def test_a_frame_costs_the_devices_time_on_a_gpu_and_the_processes_on_a_cpu():
    loaded = point(duration_s=60.0, frames=30_000, device_busy_percent=50.0, host_us_per_frame=700.0)
    assert many.cost_ms(loaded, on_gpu=True) == pytest.approx(1.0)  # 30 s for 30 000 frames
    assert many.cost_ms(loaded, on_gpu=False) == pytest.approx(0.7)
    assert many.cost_ms(point(), on_gpu=True) is many.cost_ms(point(), on_gpu=False) is None


def test_underruns_count_by_the_minutes_that_were_listened_to():
    assert many.underruns_a_minute(point(4, playing_mean=3.0, duration_s=20.0, underruns=5)) == pytest.approx(5.0)
    assert many.underruns_a_minute(point(4, playing_mean=0.0)) == 0.0


def test_the_most_listeners_without_a_stutter():
    runs = [Held(point(4)), Held(point(8)), Held(point(16, underruns=1))]
    assert many.most_clean(runs) == 8 and many.most_clean(runs[2:]) == 0


class Room:
    """A subject whose listeners came at 1, 2 and 9 s of a held time from 0 to 5 s."""

    def __init__(self):
        self.settings = many.subject("small", 5.0, 0, engine="single", device="cpu").settings
        self.asked = []

    def met(self, listeners):
        self.asked.append((listeners, self.settings.seconds, self.settings.seed))
        came = [Listener(1.0), Listener(2.0), Listener(9.0)]
        came[0].first_s = 1.25
        begin, end = Moment(0.0, 0, 0.0, 0.0), Moment(5.0, 0, 0.0, 0.0)
        return point(listeners), LoadRun(came, begin, end), ticks_of((1, 1, 8, 1, 0))


async def test_loads_are_held_one_after_the_other_and_the_held_arrivals_are_kept():
    room = Room()
    runs = await many.held(room, (2, 3), 7.0, 11)
    assert room.asked == [(2, 7.0, 11), (3, 7.0, 11)]
    assert runs[0].waits_ms == (250.0, math.inf) and len(runs[0].ticks) == 1
    assert room.settings.frames[1] <= 50 and room.settings.warm_s < 2  # seconds must see utterances end


def tiny_crowd(**settings):
    """A batch engine that the fake backend serves; codes are made of the seed."""
    return fake_synthesizer(FakeBackend(eos_after=6), engine="batch", **settings)


async def test_a_text_in_company_has_the_codes_that_it_has_alone():
    with tiny_crowd() as synth:
        alone = await many.among(synth, "a", [], seed=5)
        assert len(alone) == 6 and torch.equal(await many.among(synth, "a", ["b", "c"], seed=5), alone)
        assert not torch.equal(await many.among(synth, "a", ["b", "c"], seed=6), alone)


async def test_a_machine_that_carries_one_listener_still_speaks_a_text_in_company():
    with tiny_crowd(model=TickModel(1.0, 1.0, 0.0, 0.0)) as synth:
        assert synth.carries == 1
        assert len(await many.among(synth, "a", ["b"] * 7, seed=5)) == 6


# ---- the document


def test_the_points_of_a_file_are_put_together_by_what_they_have_in_common(tmp_path):
    document = json.loads(load_file(tmp_path).read_text())
    series = many.series(document)
    assert [[run.point["listeners"] for run in runs] for runs in series.values()] == [[512, 1_024], [512]]
    assert list(series)[1] == "random:0.6b, codec full, deterministic, 32 rows of prompt, engine batch"
    rows = {row["figure"]: row for row in many.figures(document)}
    assert rows["frame_64_ms"]["value"] == "5.1" and rows["listeners"]["value"] == "512"
    assert many.rows(series, on_gpu=True)[0]["lanes a tick"] == 64.0


def test_a_file_of_several_runs_names_them_all(tmp_path):
    document = json.loads(load_file(tmp_path).read_text())
    assert evidence.provenance(document) == "measured on NVIDIA H200, 2026-11-22, at revision abc"
    document["points"][0] |= {"revision": "def+changes", "date": "2026-11-20T10", "random_weights": True}
    line = "measured on NVIDIA H200, 2026-11-20 to 2026-11-22, at revisions "
    assert evidence.provenance(document).startswith(line)
    assert evidence.provenance(document).endswith("+, random weights")
    assert evidence.provenance({"points": [], "figures": {}}) == "nothing measured yet"


# ---- figures


def test_growth_shows_every_arrival_the_gaps_and_the_cost(tmp_path):
    runs = [
        Held(point(1, host_us_per_frame=9_000.0), (12.0, 14.0)),
        Held(point(4, host_us_per_frame=4_000.0, underruns=240, ttfc_p99_ms=None, refused=2), (15.0, math.inf)),
    ]
    drawn = load_plots.growth({"together": runs}, False, tmp_path, "here", goal_ms=100.0)
    first, late, cost = drawn.axes
    dots = [line.get_ydata().tolist() for line in first.lines if line.get_marker() == "."]
    assert dots == [[12.0, 14.0], [15.0]]
    assert "2 without PCM" in [text.get_text() for text in first.texts]
    assert late.lines[0].get_ydata().tolist() == [0.0, 60.0]  # 240 in four minutes
    assert cost.lines[0].get_ydata().tolist() == [9.0, 4.0]
    assert cost.lines[1].get_ydata().tolist() == [80.0, 20.0]  # what one core has
    assert [tick.get_text() for tick in cost.get_xticklabels()] == ["1", "4"] and "CPU" in cost.get_ylabel()
    assert [path.name for path in tmp_path.iterdir()] == ["listeners.png"]


def test_numbers_of_listeners_that_lie_close_are_not_written_over_each_other(tmp_path):
    runs = [Held(point(count)) for count in (64, 1_400, 1_600)]
    cost = load_plots.growth({"a": runs}, True, tmp_path, "there").axes[-1]
    assert [tick.get_text() for tick in cost.get_xticklabels()] == ["64", "1,400", ""]


def test_the_scheduler_is_drawn_tick_by_tick(tmp_path):
    found = ticks_of((3, 1, 20, 8, 0.0), (4, 0, 0, 4, 0.03), (2, 2, 50, 4, 0.0))
    drawn = load_plots.ticks(found, tmp_path, "here")
    open_streams, lanes, prompts, late = drawn.axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in lanes.containers}
    assert heights["a stream's first frame"] == [1, 0, 2] and heights["a later frame"] == [2, 4, 0]
    assert heights["empty lanes of the bucket"] == [5, 0, 2]
    bars = lanes.containers[0]
    np.testing.assert_allclose([bar.get_x() for bar in bars], [0, 0.02, 0.04], atol=1e-9)
    np.testing.assert_allclose([bar.get_width() for bar in bars], 0.01)
    assert [bar.get_height() for bar in prompts.containers[0]] == [20, 0, 50]
    assert [bar.get_height() for bar in late.containers[0]] == pytest.approx([0, 30, 0])
    assert open_streams.lines[0].get_ydata().tolist() == [5, 5, 5]
    assert "3 ticks in 0.05 s, 3.0 lanes each, busy 60 %, 1 late" in open_streams.texts[0].get_text()
    assert drawn.get_figwidth() == pytest.approx(figure.new(1.0)[0].get_figwidth())


def test_the_ticks_shown_are_those_in_which_most_streams_began():
    found = ticks_of(*[(1, 0, 0, 1, 0.0)] * 3, *[(2, 1, 9, 2, 0.0)] * 2, *[(1, 0, 0, 1, 0.0)] * 3)
    assert load_plots.busiest(found, 2)["new"].tolist() == [1, 1]
    assert len(load_plots.busiest(found, 100)) == 8


def said_in(drawn):
    (axes,) = drawn.axes
    return [text.get_text() for text in axes.texts if "hold" in text.get_text()]


def test_without_a_tick_the_picture_says_so(tmp_path):
    drawn = load_plots.ticks(np.zeros(0, TICKS), tmp_path, "here")
    assert said_in(drawn) == ["no tick while the load was held: hold it for longer"]
    assert (tmp_path / "ticks.png").is_file()


def test_a_frame_costs_a_ticks_time_over_its_lanes(tmp_path):
    found = ticks_of((1, 0, 0, 1, 0.0), (1, 0, 0, 1, 0.0), (4, 0, 0, 4, 0.0), (2, 1, 30, 2, 0.0))  # 10 ms each
    (axes,) = load_plots.cost(found, tmp_path, "here").axes
    dots, medians, free = (line.get_ydata().tolist() for line in axes.lines)
    assert dots == pytest.approx([10.0, 10.0, 2.5])  # the one with a prompt is left out
    assert medians == pytest.approx([10.0, 2.5]) == free
    assert said_in(load_plots.cost(found[3:], tmp_path, "here")) == ["no tick without a prompt: hold a load for longer"]
