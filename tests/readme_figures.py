"""The README's measured figures: each is a link whose target says where the number was recorded.

`[41.3 ms](outputs/reference/bench.json#figures.ttfc_ms.median)`. Run as a program, this file rewrites the numbers in
README.md, with the decimals they have there, from the files they point to.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIGURE = re.compile(r"\[([\d.,]+)( ?\w*)\]\((outputs/reference/[^)#\s]+\.json)#([\w.]+)\)")
DIVISORS = {"GB": 1e9, "MB": 1e6}  # any other unit is written as it is recorded


def renew(match: re.Match[str]) -> str:
    """The link with its number as the file has it now."""
    number, unit, name, keys = match.groups()
    value = json.loads((ROOT / name).read_text(encoding="utf-8"))
    for key in keys.split("."):
        value = value[key]
    decimals = len(number.partition(".")[2])
    return f"[{value / DIVISORS.get(unit.strip(), 1):,.{decimals}f}{unit}]({name}#{keys})"


if __name__ == "__main__":
    README.write_text(FIGURE.sub(renew, README.read_text(encoding="utf-8")), encoding="utf-8")
