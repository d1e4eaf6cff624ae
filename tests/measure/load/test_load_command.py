"""`python -m mktts bench --load` as a whole, on the tiny checkpoint."""

from __future__ import annotations

import json

import pytest

from mktts.cli import main
from mktts.measure.bench.load.point import SCHEMA

QUICK = ["bench", "--load", "--checkpoint", "random:tiny", "--device", "cpu", "--warm-seconds", "0.4"]


def test_a_quick_run_prints_a_table_and_a_point_that_says_it_was_not_held(tiny, capsys):
    assert main([*QUICK, "--listeners", "12", "--seconds", "1", "--engine", "single"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (point,) = json.loads(last)["points"]
    assert set(SCHEMA) <= set(point) and point["held"] is False
    assert (point["listeners"], point["engine"], point["codec"], point["context_rows"]) == (12, "single", "full", 32)
    assert point["frames"] > 0 and point["duration_s"] == pytest.approx(1.0, abs=0.5)
    assert any("not held: cannot be reported" in line for line in lines)


def test_a_run_that_is_too_short_to_be_kept_is_refused_before_it_begins(tmp_path, capsys):
    path = tmp_path / "load.json"
    assert main([*QUICK, "--listeners", "2", "--seconds", "5", "--into", str(path)]) == 2
    assert "at least 60 s" in capsys.readouterr().err and not path.exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--listeners", "2,x"], "whole numbers"),
        (["--listeners", "0"], "at least 1"),
        (["--codec-precision", "fast"], "engine='batch'"),
        (["--peers"], "name one"),
        (["--section", "frames"], "a CUDA device"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(words, said, tiny, capsys):
    assert main([*QUICK, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
