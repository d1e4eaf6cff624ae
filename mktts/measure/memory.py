"""Device memory of the frame kernel for the sizes that there are: a table for csrc/README.md and notebook 09."""

from __future__ import annotations

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.tensors import expected_tensors
from mktts.kernel.memory import account
from mktts.kernel.tape import choose_shape
from mktts.measure.inspection import config_at

MULTIPROCESSORS = 132  # of an H100 or H200
POSITIONS = 260  # of a stream: about 20 s
SIZES = ("small", "0.6B", "1.7B")


def device_memory(positions: int = POSITIONS, multiprocessors: int = MULTIPROCESSORS) -> dict[str, dict[str, int]]:
    """Size -> row -> bytes. Raises BackendUnavailable where the kernel does not fit that many multiprocessors."""
    found = {}
    for size in SIZES:
        config = open_checkpoint(size).config if size == "small" else config_at(size.lower())
        shapes = {name: spec.shape for name, spec in expected_tensors(config).items()}
        found[size] = account(choose_shape(config, multiprocessors), shapes, positions)
    return found


def rows(found: dict[str, dict[str, int]]) -> list[dict[str, str]]:
    """As people read it; the last row is the sum of what every process holds: no stream, no marks."""
    names = list(dict.fromkeys(name for held in found.values() for name in held))
    names.sort(key=lambda name: max(held.get(name, 0) for held in found.values()), reverse=True)
    table = [
        {"what": name, **{size: binary(held[name]) if name in held else "–" for size, held in found.items()}}
        for name in names
    ]
    always = {
        size: sum(held[name] for name in held if not name.startswith(("a stream", "marks")))
        for size, held in found.items()
    }
    return [*table, {"what": "without streams and marks", **{size: binary(n) for size, n in always.items()}}]


def markdown(table: list[dict[str, str]]) -> str:
    """The rows as a Markdown table."""
    heads = list(table[0])
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *(list(row.values()) for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def binary(size_bytes: int) -> str:
    """12_345 as "12.1 KiB"."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / (1 << 10):,.1f} KiB"
    return f"{size_bytes / (1 << 20):,.1f} MiB"
