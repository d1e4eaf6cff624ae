"""The file of a load: what may stand in it, how it is merged, and what follows from its points."""

from __future__ import annotations

import json

import pytest
from load_document import BESIDE, point

from mktts.errors import MetricsError
from mktts.measure.bench.load.book import carried, figure, merge, read, same
from mktts.measure.bench.load.point import SCHEMA


def test_points_and_figures_of_several_commands_stand_in_one_file_with_their_origin(tmp_path):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [point(512), point(1_024)])
    merge(
        path,
        {**BESIDE, "revision": "def"},
        True,
        [point(2_000, underruns=3)],
        {"frame_64_ms": figure([5.0, 6.0], "ms")},
    )
    document = json.loads(path.read_text())
    assert [p["listeners"] for p in document["points"]] == [512, 1_024, 2_000]
    assert [p["revision"] for p in document["points"]] == ["abc", "abc", "def"]
    assert all(set(SCHEMA) | set(BESIDE) <= set(p) for p in document["points"])
    figures = document["figures"]
    assert figures["frame_64_ms"] | {"revision": "def", "value": 5.5, "unit": "ms", "n": 2} == figures["frame_64_ms"]
    assert figures["listeners"]["value"] == 1_024 and figures["listeners"]["revision"] == "abc"
    for value in figures.values():
        assert {"value", "unit", "n", *BESIDE} <= set(value)


def test_a_later_point_of_the_same_conditions_takes_the_place_of_the_earlier(tmp_path):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [point(512), point(512, codec="full"), point(512, context_rows=332)])
    document = merge(path, BESIDE, True, [point(512, ttfc_p99_ms=30.0)])
    assert len(document["points"]) == 3
    (renewed,) = [p for p in document["points"] if same(p, point(512))]
    assert renewed["ttfc_p99_ms"] == 30.0


@pytest.mark.parametrize("wrong", [{"held": False, "duration_s": 10.0}, {"held": None}])
def test_a_point_that_was_not_held_is_refused_and_the_file_stays(tmp_path, wrong):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [point(512)])
    before = path.read_bytes()
    with pytest.raises(MetricsError, match="not held"):
        merge(path, BESIDE, True, [point(600), point(700, **wrong)])
    with pytest.raises(MetricsError, match="overload_underruns"):
        merge(path, BESIDE, True, figures={"overload_underruns": figure(0, "count", 9, held=False)})
    assert path.read_bytes() == before


def test_a_point_without_its_precision_is_refused(tmp_path):
    nameless = point()
    del nameless["codec"]
    with pytest.raises(MetricsError, match="lacks codec"):
        merge(tmp_path / "load.json", BESIDE, True, [nameless])


def test_figures_of_two_devices_do_not_mix(tmp_path):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [point()])
    with pytest.raises(MetricsError, match="H200.*H100"):
        merge(path, {**BESIDE, "device": "NVIDIA H100"}, True, [point()])


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text('{"figures": {}}')
    with pytest.raises(MetricsError, match="expected figures and points"):
        read(path)


@pytest.mark.parametrize(
    "unclean",
    [{"underruns": 1}, {"refused": 1}, {"unanswered": 1}, {"errors": 1}, {"ttfc_p99_ms": 100.1}, {"ttfc_p99_ms": None}],
)
def test_the_capacity_is_the_most_that_was_served_without_a_fault(unclean):
    found = carried([point(512), point(1_024), point(1_100, **unclean)], gpu=True)
    assert found["listeners"]["value"] == 1_024
    assert "listeners_full_precision" not in found and "listeners_1p7b" not in found


def test_of_several_contexts_the_worst_counts_and_one_that_carries_nothing_leaves_no_figure():
    short, long = [point(1_024), point(1_100)], point(900, context_rows=332)
    found = carried([*short, long], gpu=True)["listeners"]
    assert found["value"] == 900 and found["by_context"] == {"32": 1_100.0, "332": 900.0}
    assert "listeners" not in carried([*short, {**long, "underruns": 5}], gpu=True)


def test_precisions_and_models_have_their_own_capacity():
    points = [point(1_024), point(900, codec="full"), point(600, model_size="1b7", codec="full")]
    found = {name: value["value"] for name, value in carried(points, gpu=True).items()}
    assert found["listeners"] == 1_024 and found["listeners_full_precision"] == 900 and found["listeners_1p7b"] == 600


def test_on_a_cpu_the_audible_time_decides_and_the_codec_has_one_precision():
    points = [point(8, codec="full", ttfc_p99_ms=300.0), point(16, codec="full", audible_p95_ms=501.0)]
    assert {name: value["value"] for name, value in carried(points, gpu=False).items()} == {"listeners": 8}


def test_first_pcm_at_a_load_is_read_off_the_smallest_point_of_at_least_so_many_open_streams():
    points = [
        point(500, ttfc_p99_ms=5.0),  # too few
        point(530, ttfc_p99_ms=15.0),
        point(560, ttfc_p99_ms=14.0),  # larger than needed
        point(520, ttfc_p99_ms=18.0, context_rows=332),
        point(800, ttfc_p99_ms=19.0),  # nowhere near
    ]
    found = carried(points, gpu=True)
    assert found["ttfc_p99_512_ms"]["value"] == 18.0
    assert found["ttfc_p99_512_ms"]["by_context"] == {"32": 15.0, "332": 18.0}
    assert "ttfc_p99_1024_ms" not in found
