"""Values as tables for people show them."""

from __future__ import annotations

from typing import Any


def cell(value: Any) -> str:
    """`value` in words and digits: four significant digits, thousands separated, yes/no for booleans."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        small = value != 0 and abs(value) < 1e-3
        return f"{value:.2e}" if small else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return "" if value is None else str(value)
