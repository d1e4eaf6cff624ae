"""Notebook 09's tables and pictures: a block's rows against the matrices, a trace that never was on a card."""

from __future__ import annotations

import json

import numpy as np
import pytest
from traces import document_of

from mktts.errors import OptionsError
from mktts.kernel.grid import choose_shape
from mktts.measure.inspection import config_at
from mktts.notebook import evidence, inside, layout_plots, trace_plots

LEAST_US = {"talker": 10.0, "predictor": 40.0}
DRAW = {
    "where": lambda trace, folder: trace_plots.where(trace, LEAST_US, folder, "somewhere"),
    "layers": lambda trace, folder: trace_plots.layers(trace, folder, "somewhere"),
    "blocks_talker": lambda trace, folder: trace_plots.blocks(trace, "talker", folder, "somewhere"),
    "blocks_predictor": lambda trace, folder: trace_plots.blocks(trace, "predictor", folder, "somewhere"),
    "hops": lambda trace, folder: trace_plots.hops(trace, folder, "somewhere"),
    "places": lambda trace, folder: layout_plots.places(16, 128, folder),
}


@pytest.fixture(scope="module")
def trace():
    return json.loads(json.dumps(document_of((2, 1), 16)))


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_drawn_with_labelled_axes(name, trace, tmp_path):
    drawn = DRAW[name](trace, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]
    assert drawn.axes[0].get_title(loc="left") and drawn.axes[-1].get_ylabel() + drawn.axes[-1].get_xlabel()
    if name != "places":
        assert "somewhere" in [note.get_text() for note in drawn.axes[0].texts]


def test_the_bars_of_a_stack_are_its_times(trace, tmp_path):
    figure = DRAW["where"](trace, tmp_path)
    rows = [row for row in trace["phases"]["alone"] if row["stack"] == "talker"]
    total = sum(row["frame_us"] for row in rows)
    assert f"{total:.0f}" in [note.get_text() for note in figure.axes[0].texts]
    spent = trace_plots.by_kind(trace, "predictor", "beside the stream")
    assert spent["weights awaited"] == sum(
        row["weights_us"] for row in trace["phases"]["beside the stream"] if row["stack"] == "predictor"
    )


def test_tables_have_every_phase_and_every_build(trace):
    rows = inside.phases(trace)
    assert len(rows) == len(trace["phases"]["alone"]) and {"talker", "predictor"} == {row["stack"] for row in rows}
    assert len(inside.frames(trace)) == 3
    assert inside.least_us(trace, 1_000.0)["talker"] == pytest.approx(887.0)
    assert inside.frame_metrics(None) == {} and len(inside.frame_metrics(trace)) == 2


def test_without_a_trace_its_file_and_the_command_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "stored", lambda name: None)
    assert inside.trace_of("", True, "no CUDA device", tmp_path) is None
    assert "outputs/reference/h200/trace.json" in inside.absent() and "python -m mktts trace" in inside.absent()
    (tmp_path / "trace.json").write_text('{"a": 1}')
    assert inside.trace_of(str(tmp_path / "trace.json"), True, None, tmp_path) == {"a": 1}


def test_a_blocks_rows_are_those_that_the_tape_gives_it():
    shape = choose_shape(config_at("tiny"), 132)  # 64 wide, 2 key-value heads, 16 blocks; group 1, rank 5
    found = {row["matrix"]: row for row in inside.rows_of_block(shape, 13)}
    assert found["output projection"]["of the matrix"] == found["down projection"]["of the matrix"] == "40–47"
    assert found["output projection"]["inputs"] == "64–127"
    shares = [inside.rows_of_block(shape, block)[0]["of the matrix"] for block in range(16)]
    numbers = [n for share in shares for run in share.split(", ") for n in range(*ends(run))]
    t = shape.talker
    assert sorted(numbers) == list(range((t.num_attention_heads + 2 * t.num_key_value_heads) * t.head_dim))
    with pytest.raises(OptionsError, match=r"BLOCK must be in 0\.\.15"):
        inside.rows_of_block(shape, 16)


def ends(run):
    first, _, last = run.partition("–")
    return int(first), int(last or first) + 1


def test_ranges_are_written_short():
    assert inside.ranges(np.array([4, 5, 6, 9])) == "4–6, 9"
    assert inside.ranges(np.array([3, 3, 4, 4, 5, 5])) == "3–5" and inside.ranges(np.arange(0, 20, 2)) == "10 ranges"
