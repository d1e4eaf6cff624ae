"""The table of device memory in csrc/README.md. Run as a program, this file writes it anew."""

from __future__ import annotations

import re
from pathlib import Path

from mktts.measure.memory import device_memory, markdown, rows

README = Path(__file__).resolve().parents[2] / "csrc" / "README.md"
TABLE = re.compile(
    r"(?<=<!-- memory: written by tests/kernel/memory_table\.py -->\n).*?(?=\n<!-- end of memory -->)", re.DOTALL
)


def written() -> str:
    """The table as csrc/README.md has it."""
    return TABLE.search(README.read_text(encoding="utf-8"))[0]


def computed() -> str:
    return markdown(rows(device_memory()))


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: computed(), README.read_text(encoding="utf-8")), encoding="utf-8")
