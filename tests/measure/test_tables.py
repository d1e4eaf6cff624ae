"""Cells of tables."""

from __future__ import annotations

import pytest

from mktts.measure.metrics import cell


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "yes"), (12345, "12,345"), (0.123456, "0.1235"), (123456.7, "123,457"), (3.2e-7, "3.20e-07"), (0.0, "0"),
     (None, ""), ((1, 2), "1, 2"), ("x", "x")],
)  # fmt: skip
def test_cells_read_well(value, text):
    assert cell(value) == text
