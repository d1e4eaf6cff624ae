"""Both engines of engine="auto" under one load: who comes, and what is told of each."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.errors import MetricsError
from mktts.measure.bench.load import mixed
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.sections import SECTIONS, Numbers, Subject
from mktts.measure.bench.load.settings import LoadSettings
from mktts.spec import FRAME_RATE_HZ, SAMPLES_PER_FRAME

FRAME = np.full(SAMPLES_PER_FRAME, 0.1, np.float32)


def test_few_come_first_then_two_that_last_and_many_beside_them():
    settings = LoadSettings("x", seconds=60.0, warm_s=8.0, tail_s=2.0)
    visits = mixed.plan(settings, 64)
    assert [visit.at_s for visit in visits] == sorted(visit.at_s for visit in visits)
    long = [visit for visit in visits if visit.frames > settings.frames[1]]
    assert [visit.at_s for visit in long] == [38.0, 38.0]
    assert all(visit.at_s + visit.frames / FRAME_RATE_HZ >= 70.0 for visit in long)
    few = [visit for visit in visits if visit.at_s < 38.0]
    assert all(visit.at_s + visit.frames / FRAME_RATE_HZ < 38.1 for visit in few), "the long ones must find nobody"
    held = [visit for visit in few if visit.at_s >= 8.0]
    assert 25 < len(held) < 60  # 1.5 a second for 27 s
    seconds = sum(visit.frames for visit in visits if visit.at_s > 38.0) / FRAME_RATE_HZ
    assert seconds / (70.0 - 38.0) == pytest.approx(64, rel=0.35)


def came(at_s: float, engine: str, wait_s: float | None, underrun: bool = False) -> Listener:
    one = Listener(at_s)
    one.opened_s, one.engine = at_s, engine
    if wait_s is not None:
        one.hear(at_s + wait_s, FRAME, 1)
        if underrun:
            one.hear(at_s + wait_s + 1.0, FRAME, 1)
        one.ended_s = one.dry_s
    return one


def test_first_pcm_is_told_of_each_engine_where_it_serves_beside_the_other():
    settings = LoadSettings("x", seconds=60.0, warm_s=8.0)
    seen = Attendance([
        came(102.0, "single", 0.5),  # in the warm-up
        came(110.0, "single", 0.010), came(120.0, "single", 0.020, underrun=True), came(121.0, "batch", 0.9),
        came(138.5, "single", 0.7), came(139.0, "batch", 0.8),  # the load builds up
        came(150.0, "batch", 0.030), came(160.0, "batch", 0.040, underrun=True),
    ])  # fmt: skip
    seen.begin, seen.end, seen.closed_s = Mark(108.0, 0, 0, 0.0, 0.0), Mark(168.0, 9, 9, 1.0, 0.5), 170.0
    figures, report = mixed.told(seen, settings, 64)
    values = {name: value["value"] for name, value in figures.items()}
    assert values == {
        "mixed_underruns": 2,
        "mixed_single_ttfc_p99_ms": pytest.approx(19.9),
        "mixed_batch_ttfc_p99_ms": pytest.approx(39.9),
    }
    assert [figures[f"mixed_{engine}_ttfc_p99_ms"]["n"] for engine in ("single", "batch")] == [2, 2]
    assert {engine: part["underruns"] for engine, part in report["of_engine"].items()} == {"single": 1, "batch": 1}
    seen.listeners.append(came(161.0, "batch", None))
    assert set(mixed.told(seen, settings, 64)[0]) == {"mixed_underruns", "mixed_single_ttfc_p99_ms"}


def test_the_section_runs_both_engines_and_tells_of_their_memory(tiny, monkeypatch):
    monkeypatch.setattr(mixed, "_FEW_FRAMES", (4, 8))  # what each engine says before it is measured, and the short ones
    subject = Subject(LoadSettings("random:tiny", device="cpu", seconds=2.0, warm_s=1.0, tail_s=0.2))
    (result,) = SECTIONS["mixed"](subject, Numbers((4,)))
    subject.close()
    assert {"memory_single_mib", "memory_batch_mib", "memory_both_mib", "mixed_underruns"} <= set(result.figures)
    assert set(result.figures) | {name for name in mixed.FIGURES if name in (result.failed or "")} == set(mixed.FIGURES)
    assert result.figures["memory_both_mib"]["value"] > 0
    assert result.figures["mixed_underruns"]["held"] is False  # a file would refuse it
    report = result.reports["mixed"]
    assert report["engine"] == "batch+single" and report["errors"] == 0 and report["frames"] > 0


@pytest.mark.parametrize("wrong", [{"engine": "batch"}, {"engine": "single"}, {"backend": "torch"}])
def test_one_engine_alone_is_no_mixed_load(tiny, wrong):
    settings = LoadSettings("random:tiny", device="cpu", **wrong)
    with pytest.raises(MetricsError, match="both engines"):
        list(SECTIONS["mixed"](Subject(settings), Numbers()))
