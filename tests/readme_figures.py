"""Measured figures in prose come from the files that recorded them.

README.md: the tables of speed and of scale, between `<!-- speed: FILE -->` or `<!-- scale -->` and its end.
docs/hardware.md: what was run of the kernel as other cards would run it stands before `<!-- cards: L4, RTX 4090 -->`.
Run as a program, this file rewrites all of them from the files they name."""

import json
import re
from pathlib import Path
from typing import Any

from other_cards import fingerprint

ROOT = Path(__file__).resolve().parents[1]
README, HARDWARE = ROOT / "README.md", ROOT / "docs" / "hardware.md"
SCALE = re.compile(r"<!-- scale -->\n.*?<!-- end of scale -->", re.DOTALL)
SPEED = re.compile(r"<!-- speed: (outputs/reference/\S+\.json) -->\n.*?<!-- end of speed -->", re.DOTALL)
CARDS = re.compile(r"\| ([^|]*)<!-- cards: ([^>]+) -->")
CARDS_FILE = "outputs/reference/h100/architectures.json"
LOAD = "h200/load.json"
SERVED = "h200/serve_load.json"
# The table of scale: what, where, file in outputs/reference, listeners offered and key of their newest point, form.
SCALE_ROWS = (
    ("0.6B, of 1,500 offered", "H200", LOAD, 1_500, "playing_mean", "{:,.0f}"),
    ("its first PCM, p99", "H200", LOAD, 1_500, "ttfc_p99_ms", "{:.0f} ms"),
    ("first PCM of 0.6B, 1,024 offered, p99", "H200", LOAD, 1_024, "ttfc_p99_ms", "{:.0f} ms"),
    ("1.7B, of 620 offered", "H200", LOAD, 620, "playing_mean", "{:,.0f}"),
    ("0.6B over sockets, of 1,200 offered", "H200", SERVED, 1_200, "playing_mean", "{:,.0f}"),
    ("its first byte, p99", "H200", SERVED, 1_200, "ttfb_p99_ms", "{:.0f} ms"),
    ("the included voice, of 20 offered", "two CPU cores", "load_cpu.json", 20, "playing_mean", "{:.0f}"),
)

# Row of the table -> suffix of the three engines' figures in the bench's document.
ROWS = {
    "codes of a frame": "frame_ms",
    "frame with codec": "frame_with_codec_ms",  # steady chunks of eight frames; of qwen-tts a whole utterance
    "first PCM of three words": "ttfc_ms",
    "first PCM of a sentence": "ttfc_sentence_ms",
}
ENGINES = {"mktts": "", "faster-qwen3-tts": "faster_", "qwen-tts": "upstream_"}
DOES_NOT_STREAM = "qwen-tts"
_ENOUGH_FOR_P95 = 10


def scale_table() -> list[str]:
    """Markdown lines: a row of `SCALE_ROWS` each."""
    lines = ["| listeners at once | on | | in time | measured |", "|---|---|---|---|---|"]
    for what, where, name, listeners, key, form in SCALE_ROWS:
        document = _document(f"outputs/reference/{name}")
        point = max((one for one in document["points"] if one["listeners"] == listeners), key=lambda one: one["date"])
        on = f"{where}, {document['device'].removesuffix(' Processor')}" if "CPU" in where else where
        in_time = point["arrivals"] if point.get("in_time") is None else point["in_time"]  # older records: all were
        counts = f"{in_time:,} of {point['arrivals']:,}"
        lines.append(f"| {what} | {on} | {form.format(point[key])} | {counts} | {point['date'][:10]} |")
    return lines


def speed_table(document: dict[str, Any]) -> list[str]:
    """Markdown lines: a row of `ROWS`, a column an engine, and what it was measured on. A figure that the document
    lacks is "not measured"."""
    heads = [name_of(engine, document) for engine in ENGINES]
    lines = [f"| ms, p50 / p95 | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for row, suffix in ROWS.items():
        cells = []
        for engine, prefix in ENGINES.items():
            streams = not (row.startswith("first") and engine == DOES_NOT_STREAM)
            cells.append(cell(document["figures"].get(prefix + suffix)) if streams else "does not stream")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    packages = {"torch": document["torch"], **document["packages"]}
    versions = (f"{name} {packages[name]}" for name in ("torch", "torchaudio", "transformers", "tokenizers"))
    return [*lines, "", f"Packages: {', '.join(versions)}; {document['device']}, driver {document['driver']}."]


def name_of(engine: str, document: dict[str, Any]) -> str:
    """With its version: qwen-tts may be installed as the fork that runs on newer transformers."""
    if engine == "mktts":
        return f"mktts {document['revision'][:8]}"
    installed = (name for name in (engine, f"{engine}-hf") if document["packages"].get(name))
    name = next(installed, engine)
    return f"{name} {document['packages'].get(name) or ''}".strip()


def cell(figure: dict[str, Any] | None) -> str:
    """`1.48 / 1.49`, to three digits; of fewer than ten measurements their median and number: there is no p95."""
    if figure is None:
        return "not measured"
    median = three_digits(figure["median"])
    if figure["n"] < _ENOUGH_FOR_P95 and "mean of" not in figure["unit"]:
        return f"{median} (n = {figure['n']})"
    return f"{median} / {three_digits(figure['p95'])}"


def three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def state_of(cards: list[str], document: dict[str, Any], kernel: str) -> str:
    """Of the kernel whose fingerprint `kernel` is: a row of another one, or of none, says at which revision it was."""
    of_cards = {card: [row for row in document["cases"] if row["card"] == card] for card in cards}
    if not all(rows and all(row["equal"] for row in rows) for rows in of_cards.values()):
        return "compiled"
    rows = [row for rows in of_cards.values() for row in rows if row.get("kernel") != kernel]
    if not rows:
        return "run on an H100"
    revisions = sorted({row.get("revision", document["revision"])[:8] for row in rows})
    return f"run on an H100 at {', '.join(revisions)}, before the kernel's last change"


def renewed(prose: str) -> str:
    """All tables, and what was run of every card, from the files that the comments name."""
    scale = "\n".join(("<!-- scale -->", *scale_table(), "<!-- end of scale -->"))
    prose = SCALE.sub(lambda _: scale, prose)
    for found in SPEED.finditer(prose):
        lines = (f"<!-- speed: {found[1]} -->", *speed_table(_document(found[1])), "<!-- end of speed -->")
        prose = prose.replace(found[0], "\n".join(lines))
    for found in CARDS.finditer(prose):
        state = state_of(found[2].split(", "), _document(CARDS_FILE), fingerprint())
        prose = prose.replace(found[0], f"| {state}<!-- cards: {found[2]} -->")
    return prose


def _document(name: str) -> dict[str, Any]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in (README, HARDWARE):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
