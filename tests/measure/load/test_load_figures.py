"""What all sections of a load give stands in one file, under the names that readers of it know."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from load_document import BESIDE, point
from timed_lanes import TimedLanes

from mktts.measure.bench.load import frames, mixed, sections
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.book import merge
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.sections import SECTIONS, Numbers, Result
from mktts.measure.bench.load.settings import LoadSettings
from mktts.measure.bench.load.texts import Said
from mktts.spec import SAMPLES_PER_FRAME

FIGURES = {
    "listeners", "listeners_full_precision", "listeners_1p7b", "ttfc_p99_512_ms", "ttfc_p99_1024_ms",
    "burst_128_worst_ms", "frame_64_ms", "frame_256_ms", "frame_1024_ms", "codec_fast_us", "codec_full_us",
    "say_many_rtfx", "deterministic_cost_percent_64", "deterministic_cost_percent_512", "overload_underruns",
    "host_us_per_lane_frame", *mixed.FIGURES, "peer_listeners", "peer_ttfc_p99_ms",
}  # fmt: skip
POINT = {
    "offered_rps", "open_mean", "duration_s", "ttfc_p50_ms", "ttfc_p95_ms", "ttfc_p99_ms", "underruns", "refused",
    "codec", "deterministic", "engine", "context_rows",
}  # fmt: skip
FRAME = np.full(SAMPLES_PER_FRAME, 0.1, np.float32)


class Told:
    """A subject that has measured already: every listener gets a frame 20 ms after its arrival."""

    def __init__(self) -> None:
        self.settings = LoadSettings("random:0.6b", device="cpu")
        self.checkpoint = None
        self.said = Said("text", 32, lambda index, frames: "a few words", {})
        speaks = SimpleNamespace(say_many=lambda texts, **settings: (FRAME for _ in texts))
        self.loaded = SimpleNamespace(synthesizer=speaks, codec="fast", deterministic=True)

    def close(self) -> None:
        pass

    def named(self, listeners: int) -> dict:
        names = ("codec", "deterministic", "context_rows", "model_size", "checkpoint")
        return {"listeners": listeners, **{name: point()[name] for name in names}}

    def held(self, listeners: int) -> dict:
        return point(listeners) | {"ttfc_accepted_p99_ms": 20.0}

    def attended(self, plan: list) -> Attendance:
        seen = Attendance(visits=plan, begin=Mark(8.0, 0, 0, 0.0, 0.0), end=Mark(68.0, 9, 9, 1.0, 0.5), closed_s=70.0)
        for visit in plan:
            one = Listener(visit.at_s)
            one.opened_s, one.engine = visit.at_s, "batch"
            one.hear(visit.at_s + 0.02, FRAME, 1)
            one.ended_s = one.dry_s
            seen.listeners.append(one)
        return seen


@pytest.fixture
def results(tiny, monkeypatch) -> list[Result]:
    """Of every section but the soak, as if on a device."""
    monkeypatch.setattr(frames, "_SETTLE_S", 0.0)
    monkeypatch.setattr(frames, "SAMPLES", 3)
    measure = frames.measure

    def timed(settings: LoadSettings, checkpoint: object):
        return measure(settings, tiny, lambda of, codec, ordered, slots, rows: TimedLanes(codec, ordered, slots, rows))

    def both(settings: LoadSettings, checkpoint: object, said: Said, listeners: int | None):
        figure = {"value": 1.0, "unit": "ms", "n": 1}
        return dict.fromkeys(mixed.FIGURES, figure), {"held": True}

    monkeypatch.setattr(sections.frames, "measure", timed)

    def others(words: list[str], loads: tuple[int, ...], seconds: float, seed: int):
        figure = {"value": 1.0, "unit": "ms", "n": 1}
        return dict.fromkeys(("peer_listeners", "peer_ttfc_p99_ms"), figure), {"held": True}

    monkeypatch.setattr(sections.mixed, "run", both)
    monkeypatch.setattr(sections.others, "run", others)
    subject, numbers = Told(), Numbers(listeners=(64,), texts=4)
    subject.engine = "batch"
    names = [name for name in SECTIONS if name != "soak"]
    return [result for name in names for result in SECTIONS[name](subject, numbers)]


def test_one_file_holds_every_figure_and_every_name_of_a_point(results, tmp_path):
    path = tmp_path / "load.json"
    for result in results:
        assert result.failed is None
        merge(path, BESIDE, True, result.points, result.figures, result.reports)
    capacities = [
        point(530), point(1_030), point(900, codec="full"), point(850, context_rows=332),
        point(700, context_rows=332, codec="full"), point(600, model_size="1b7"),
    ]  # fmt: skip
    merge(path, BESIDE, True, capacities)
    document = json.loads(path.read_text())
    assert set(document["figures"]) == FIGURES
    for name, value in document["figures"].items():
        assert value["value"] is not None and value["unit"] and value["n"] >= 1, name
        assert {"revision", "device", "command"} <= set(value), name
    assert all(set(measured) >= POINT for measured in document["points"])
    values = {name: value["value"] for name, value in document["figures"].items()}
    assert (values["burst_128_worst_ms"], values["overload_underruns"]) == (pytest.approx(20.0), 0)


def test_a_larger_model_or_a_longer_context_never_stands_for_the_other():
    from mktts.measure.bench.load.book import carried

    points = [point(530, ttfc_p99_ms=15.0), point(540, model_size="1b7", ttfc_p99_ms=60.0)]
    found = carried([*points, point(560, context_rows=332, ttfc_p99_ms=19.0)], gpu=True)
    assert found["ttfc_p99_512_ms"]["value"] == 19.0  # the worse of the contexts; the larger model's is not looked at
    assert found["ttfc_p99_512_ms"]["by_context"] == {"32": 15.0, "332": 19.0}
    assert found["listeners"]["by_context"] == {"32": 530.0, "332": 560.0}
    assert found["listeners_1p7b"]["value"] == 540.0
