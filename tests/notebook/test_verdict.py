"""Verdicts: no figure that was not checked, and one record for all notebooks."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from mktts.errors import MetricsError
from mktts.notebook import nb, runs, verdict


@pytest.mark.parametrize(("bound", "checked"), [({"equal": 2}, "= 2"), ({"at_most": 1}, None), ({"at_least": 3}, None)])
def test_a_figure_states_what_was_checked_of_it_or_is_none(bound, checked):
    with nullcontext() if checked else pytest.raises(MetricsError, match="wait: expected [≤≥] . ms, found 2"):
        assert verdict.figure("wait", 2, "ms", 1, "here", **bound)["checked"] == checked


def test_verdicts_of_many_runs_are_one_record_in_the_notebooks_order(tmp_path):
    figure = verdict.figure("frames", 3, "", 1, verdict.here(), equal=3)
    for stem in ("10_report", "01_one_frame", "h200"):
        (tmp_path / stem).mkdir()
        verdict.state(tmp_path / stem, "Why?", "So.", [figure], "Once.")
    expected = {"question": "Why?", "answer": "So.", "figures": [figure], "limit": "Once."}
    assert verdict.collected(tmp_path) == [{"notebook": stem, **expected} for stem in ("01_one_frame", "10_report")]


def test_the_published_verdicts_are_those_of_the_published_notebooks():
    reference = nb.repository() / "outputs" / "reference"
    path = reference / runs.VERDICTS
    assert (json.loads(path.read_text(encoding="utf-8")) if path.exists() else []) == verdict.collected(reference)
