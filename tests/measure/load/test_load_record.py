"""The file of loads: what may stand in it, how it is merged, and what follows from its points."""

import json

import pytest
from load_document import BESIDE, load_file, point

from mktts.errors import MetricsError
from mktts.measure.load.command import carried, merge


def values(points: list[dict], gpu: bool = True) -> dict[str, float]:
    return {name: figure["value"] for name, figure in carried(points, gpu).items()}


def test_loads_of_several_commands_stand_in_one_file_with_their_origin_and_of_equal_ones_the_latest(tmp_path):
    path = load_file(tmp_path)
    merge(path, {**BESIDE, "revision": "def"}, True, [point(2_000, underruns=3), point(512, context_rows=332)])
    document = merge(path, {**BESIDE, "revision": "def"}, True, [point(512, ttfc_p99_ms=30.0)])
    assert document == json.loads(path.read_text())
    assert [(p["listeners"], p["revision"]) for p in document["points"]] == [
        (512, "def"), (1_024, "abc"), (2_000, "def"), (512, "abc"), (512, "def"),
    ]  # fmt: skip
    assert document["points"][0]["ttfc_p99_ms"] == 30.0
    assert all(set(BESIDE) <= set(p) for p in document["points"])
    assert {name: figure["value"] for name, figure in document["figures"].items()} == {
        "frame_64_ms": 5.1, "listeners": 512, "listeners_full_precision": 512, "ttfc_p99_512_ms": 20.0,
        "ttfc_p99_1024_ms": 20.0,
    }  # fmt: skip
    assert all({"value", "unit", "n", *BESIDE} <= set(figure) for figure in document["figures"].values())


@pytest.mark.parametrize(
    ("wrong", "beside", "said"),
    [({"held": False, "duration_s": 10.0}, {}, "not held"), ({}, {"device": "NVIDIA H100"}, "H200.*H100")],
)
def test_what_may_not_be_recorded_is_refused_and_the_file_stays(tmp_path, wrong, beside, said):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [point(512)])
    before = path.read_bytes()
    with pytest.raises(MetricsError, match=said):
        merge(path, BESIDE | beside, True, [point(600), point(700, **wrong)])
    assert path.read_bytes() == before
    path.write_text('{"figures": {}}')
    with pytest.raises(MetricsError, match="expected figures and points"):
        merge(path, BESIDE, True, [point(512)])


UNCLEAN = [{"underruns": 1}, {"refused": 1}, {"unanswered": 1}, {"errors": 1}, {"held": False}]
SERVER = {"engine": "server", "codec": "the server's", "context_rows": 0}


@pytest.mark.parametrize("wrong", [*UNCLEAN, {"ttfc_p99_ms": 100.1}, {"ttfc_p99_ms": None}])
def test_a_load_counts_only_where_every_listener_was_in_time_for_all_of_it(wrong):
    assert values([point(512), point(1_024), point(1_100, **wrong)])["listeners"] == 1_024
    assert "listeners" not in carried([point(1_100, **wrong)], gpu=True)


@pytest.mark.parametrize("wrong", [*UNCLEAN, {"ttfb_p99_ms": 121.0}, {"ttfb_p99_ms": None}])
def test_of_a_server_the_first_byte_decides_and_those_count_that_played(wrong):
    served = point(768, **SERVER, playing_mean=768.5, ttfb_p99_ms=50.0, ttfc_p99_ms=110.0)
    found = values([served, {**served, "listeners": 1_536, **wrong}])
    assert (found["listeners"], found["ttfb_p99_ms"]) == (768, 50.0)
    few = carried([{**served, "playing_mean": 700.7}], gpu=True)["listeners"]
    assert (few["value"], few["offered"]) == (700.7, 768)  # their speech was shorter than planned


def test_precisions_and_models_have_their_own_capacity_and_on_a_cpu_the_audible_time_decides():
    found = values([point(1_000), point(900, codec="full"), point(600, model_size="1b7", codec="full")])
    assert [value for name, value in found.items() if name.startswith("listeners")] == [1_000, 900, 600]
    on_cpu = [point(8, codec="full", ttfc_p99_ms=300.0), point(16, codec="full", audible_p95_ms=501.0)]
    assert values(on_cpu, gpu=False) == {"listeners": 8}  # its codec has one precision


def test_of_several_contexts_the_worst_counts_and_one_that_carries_nothing_leaves_no_figure():
    short, long = [point(1_024), point(1_100)], point(900, context_rows=332)
    found = carried([*short, long], gpu=True)["listeners"]
    assert found["value"] == 900 and found["by_context"] == {"32": 1_100.0, "332": 900.0}
    assert "listeners" not in carried([*short, {**long, "underruns": 5}], gpu=True)


def test_first_pcm_at_a_load_is_read_off_the_smallest_point_of_at_least_so_many_open_streams():
    points = [
        point(500, ttfc_p99_ms=5.0),  # too few
        point(530, ttfc_p99_ms=15.0),
        point(560, ttfc_p99_ms=14.0),  # larger than needed
        point(540, ttfc_p99_ms=60.0, model_size="1b7"),  # another model
        point(520, ttfc_p99_ms=18.0, context_rows=332),
        point(800, ttfc_p99_ms=19.0),  # nowhere near
    ]
    found = carried(points, gpu=True)
    assert found["ttfc_p99_512_ms"]["value"] == 18.0
    assert found["ttfc_p99_512_ms"]["by_context"] == {"32": 15.0, "332": 18.0}
    assert "ttfc_p99_1024_ms" not in found
