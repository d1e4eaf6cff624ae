"""How fast the megakernel is, as rows for tables and figures: measured here, or committed from an H200.

The committed files lie in outputs/reference/h200; each says which machine and which revision it belongs to, and
`provenance` puts that into words. The rows are made from a document of `python -m mktts bench --peers` (bench.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.common import read_object
from mktts.errors import MetricsError
from mktts.measure import inspection

if TYPE_CHECKING:
    from mktts.speech.options import Chunk

FOLDER = Path(__file__).resolve().parents[2] / "outputs" / "reference" / "h200"
COMMANDS = {
    "bench": "python -m mktts bench --peers --output outputs/reference/h200/bench.json",
    "gpu_tests": "python tests/gpu_record.py outputs/reference/h200/gpu_tests.json",
    "load": "python -m mktts bench --load --listeners 256,512,1024 --into outputs/reference/h200/load.json",
    "parity": "python -m mktts parity random:0.6b random:1.7b random:tiny random:tiny-projected "
    "--parts kernel,text --output outputs/reference/h200/parity.json",
    "parity_batch": "python -m mktts parity random:0.6b random:1.7b --parts batch --minutes 1.5 "
    "--output outputs/reference/h200/parity_batch.json",
    "trace": "python -m mktts trace --output outputs/reference/h200/trace.json",
}
SHOWN_IN = {
    "agent": "README: the agent's times",
    "bench": "01_weights, 03_streaming, 04_metrics, README",
    "codec": "02_parity",
    "gpu_tests": "LOG.md: which GPU tests passed, and when",
    "ladder": "04_metrics",
    "load": "08_many_voices",
    "parity": "02_parity",
    "parity_batch": "README: the batch engine's promise",
    "serve_load": "README: listeners over sockets",
    "speak_all": "LOG.md: sentences by the thousand",
    "trace": "09_megakernel",
}
# One persistent read of the 0.6B talker's 881 MB by 132 blocks of 512 threads: 0.208 ms, median of 20.
H200_READ_GB_S = 4240.0
CODEC_BYTES = 4  # of a codec weight: fp32, or the two halves of it that the fused kernels take
_SIZE = re.compile(r"\b(0\.6b|1\.7b)\b", re.IGNORECASE)
OURS = "mktts megakernel"
WHOLE = "upstream, whole utterance"  # it does not stream: its first PCM comes with its last, however long that takes


def stored(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The committed document `name`.json, None where none is committed."""
    path = folder / f"{name}.json"
    return document(path) if path.is_file() else None


def reference(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """As `stored`. Raises MetricsError naming the command that makes the document where there is none."""
    found = stored(name, folder)
    if found is None:
        how = f": on a machine with a GPU, {COMMANDS[name]}" if name in COMMANDS else ""
        raise MetricsError(f"expected the measurement {folder / name}.json, found none{how}")
    return found


def document(path: Path | str) -> dict[str, Any]:
    """A measurement's document. Raises MetricsError where it cannot be read."""
    return read_object(path, MetricsError)


def committed(folder: Path = FOLDER) -> list[dict[str, str]]:
    """One row per committed document: its name, where it comes from, and where it is shown."""
    return [
        {"document": path.name, "provenance": provenance(document(path)), "shown in": SHOWN_IN.get(path.stem, "")}
        for path in sorted(folder.glob("*.json"))
    ]


def provenance(found: Mapping[str, Any] | None) -> str:
    """Where a document comes from, on one line; "" for None. Of one that several runs were merged into, all of them."""
    if found is None:
        return ""
    if "points" in found and "revision" not in found:
        return _provenance_of_runs(found)
    facts = found.get("environment", found)
    device = found.get("device") or facts.get("gpu") or facts.get("cpu")
    parts = [f"measured on {device}", str(found.get("date") or facts.get("date_utc") or "")[:10]]
    if revision := found.get("revision") or facts.get("git_revision"):
        commit, *changes = revision.partition("+")
        parts.append(f"at revision {commit[:8]}{''.join(changes)}")
    if found.get("settings", {}).get("random_weights"):
        parts.append("random weights")
    return ", ".join(part for part in parts if part)


def _provenance_of_runs(found: Mapping[str, Any]) -> str:
    runs = [*found["points"], *found["figures"].values()]
    if not runs:
        return "nothing measured yet"
    days = sorted({str(run["date"])[:10] for run in runs})
    commits = list(dict.fromkeys(run["revision"].partition("+")[0][:8] for run in runs))
    named = ", ".join(commits) if len(commits) <= 3 else f"{commits[0]} to {commits[-1]} ({len(commits)})"
    changed = "+" if any("+" in run["revision"] for run in runs) else ""
    random = any(run.get("random_weights") for run in found["points"])
    parts = [f"measured on {found['device']}", " to ".join(dict.fromkeys((days[0], days[-1])))]
    parts += [f"at revision{'s'[: len(commits) > 1]} {named}{changed}", "random weights" * random]
    return ", ".join(filter(None, parts))


def bench_here(sections: str, folder: Path) -> dict[str, Any]:
    """Measures sections ("frames,codec") of the bench with few repeats; the document is also in `folder`/bench.json.

    A section that fails loses its figures only; they stand under `missing`.
    """
    from mktts.measure.bench.command import measure
    from mktts.measure.bench.sections import BenchSettings

    return measure(BenchSettings(samples=50, utterances=3), sections.split(","), output=folder / "bench.json")


# ---- speed


@dataclass(frozen=True)
class Limit:
    """A stage: the least time that its weights' bytes allow, and the time it took."""

    stage: str
    bytes: int
    least_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.least_ms


def limits(bench: Mapping[str, Any], bandwidth_gb_s: float) -> list[Limit]:
    """Every stage that `bench` has a figure of and whose checkpoint is of a released size."""
    settings = bench["settings"]
    small, large, text = (_size(settings.get(name, "")) for name in ("checkpoint", "large", "text_model"))
    rows: list[tuple[str, int, float | None]] = []
    if small:
        parts = inspection.components_at(small)
        for stage, names, figure in (
            ("talker step", ["talker"], "talker_step_ms"),
            ("predictor", ["predictor"], "predictor_ms"),
            ("frame, launch to codes", ["talker", "predictor"], "frame_ms"),
        ):
            rows.append((f"{small.upper()} {stage}", inspection.bytes_per_frame(parts, names), median(bench, figure)))
    if large:
        size = inspection.bytes_per_frame(inspection.components_at(large))
        rows.append((f"{large.upper()} frame, launch to codes", size, median(bench, "frame_1p7b_ms")))
    if small:
        size = CODEC_BYTES * sum(part.params for part in parts if part.name == "codec decoder")
        rows += [(f"codec, {n} frame{'s'[: n > 1]} to PCM", size, median(bench, f"codec_{n}_ms")) for n in (1, 8)]
    if text and (rate := median(bench, "text_tok_s")):
        rows.append((f"{text.upper()} text token", inspection.text_bytes_per_token(text), 1e3 / rate))
    return [Limit(stage, size, size / bandwidth_gb_s / 1e6, ms) for stage, size, ms in rows if ms is not None]


def frame_limit_ms(size: str, bandwidth_gb_s: float) -> float:
    """The least time of a frame of a released size."""
    return inspection.roofline_ms(inspection.components_at(size), bandwidth_gb_s * 1e9)


def to_first_pcm(bench: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Where the milliseconds go: until the first PCM, and for a frame in steady state. Label -> stage -> ms.

    Differences of medians: "launch" is a frame less the kernel's own time, "prefill" what the first PCM takes beyond
    one frame and its codec. For frames in chunks of eight, "other" is what the chunk takes beside kernel and codec;
    where the codec works while the next frames are made, what of it is not hidden is in there too.
    """
    kernel = {"talker": _median(bench, "talker_step_ms"), "predictor": _median(bench, "predictor_ms")}
    frame, codec = _median(bench, "frame_ms"), {"codec": _median(bench, "codec_1_ms")}
    made = {**kernel, "launch, read-back": max(0.0, frame - sum(kernel.values()))}
    before = _median(bench, "ttfc_ms") - frame - codec["codec"]
    rows = {
        "until the first PCM": {"prefill, request": max(0.0, before), **made, **codec},
        "one frame": {**made, **codec},
    }
    for label, figure, codec_figure in (
        ("one of 8 frames", "chunk_8_serial_ms", "codec_8_ms"),
        ("one of 8, codec overlapped", "chunk_8_overlapped_ms", None),
    ):
        chunk, part = median(bench, figure), median(bench, codec_figure or figure)
        if chunk is not None and part is not None:
            stages = {**kernel, **({"codec": part / 8} if codec_figure else {})}
            rows[label] = {**stages, "other": max(0.0, chunk / 8 - sum(stages.values()))}
    return rows


def peers(bench: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Axis label -> program -> median, of what each program has a figure for."""
    frame, first, rtf = "time per frame, codec left out (ms)", "time to the first PCM (ms)", "real-time factor"
    figures = (
        (frame, OURS, "frame_ms"),
        (frame, "mktts as CUDA graphs", "graph_frame_ms"),
        (frame, "faster-qwen3-tts", "faster_frame_ms"),
        (frame, "upstream", "upstream_frame_ms"),
        (first, OURS, "ttfc_ms"),
        (first, "faster-qwen3-tts", "faster_ttfc_ms"),
        (first, WHOLE, "upstream_first_pcm_ms"),
        (rtf, OURS, "rtf"),
        (rtf, "faster-qwen3-tts", "faster_rtf"),
        (rtf, "upstream", "upstream_rtf"),
    )
    rows: dict[str, dict[str, float]] = {}
    for axis, program, figure in figures:
        if (value := median(bench, figure)) is not None:
            rows.setdefault(axis, {})[program] = value
    return rows


def timeline(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """One row per chunk: frames, begin_ms and ready_ms since the call, and the ms of every stage."""
    rows, begin_ms = [], 0.0
    for chunk in chunks:
        t = chunk.timings
        stages = {"prefill": t.prefill_ms, "talker": t.talker_ms, "predictor": t.predictor_ms, "codec": t.codec_ms}
        rows.append({"frames": chunk.frames, "begin_ms": begin_ms, "ready_ms": t.ready_ms, "stages": stages})
        begin_ms = t.ready_ms
    return rows


# ---- figures of a document


def median(bench: Mapping[str, Any], name: str) -> float | None:
    """The median of a figure, None where the bench has none of that name."""
    figure = bench["figures"].get(name)
    return None if figure is None else float(figure["median"])


def _median(bench: Mapping[str, Any], name: str) -> float:
    value = median(bench, name)
    if value is None:
        reason = bench.get("missing", {}).get(name, "its section was not run")
        raise MetricsError(f"expected the figure {name} in a bench document, found none: {reason}")
    return value


def _size(checkpoint: str) -> str | None:
    found = _SIZE.search(checkpoint)
    return found[1].lower() if found else None
