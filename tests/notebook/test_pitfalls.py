"""The failures that notebook 02 shows: each fails, and beside it what upstream does is equal."""

from __future__ import annotations

import pytest

from mktts.model import qwen3
from mktts.notebook import pitfalls


@pytest.fixture(autouse=True)
def made(tiny, monkeypatch):
    """The checkpoint that the tests have made already."""
    monkeypatch.setattr(pitfalls, "open_checkpoint", lambda source: tiny)


def test_a_local_folders_tokenizer_splits_words_and_changes_the_prompt():
    hub, local = pitfalls.local_tokenizer()
    assert hub["prompt equal to ours"] and not local["prompt equal to ours"]
    assert "_iPhone" in hub["pieces"].split() and {"i", "Phone"} <= set(local["pieces"].split())


def test_a_norm_that_is_rounded_once_instead_of_twice_makes_other_codes():
    before = qwen3.rms_norm
    rounded, unrounded = pitfalls.unrounded_norm(8)
    assert rounded["codes equal"] and not unrounded["codes equal"]
    assert unrounded["first mismatch (frame, codebook)"] is not None
    assert qwen3.rms_norm is before


def test_upstreams_order_of_ties_keeps_upstreams_ids():
    unstable, stable = pitfalls.tied_top_p(20)
    assert unstable["same ids kept"] == "20 of 20"
    assert int(stable["same ids kept"].split()[0]) <= 20  # which ids an unstable sort puts first is the processor's
