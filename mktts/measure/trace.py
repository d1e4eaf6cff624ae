"""`python -m mktts lab trace`: measures the phases of a frame within a launch of the frame kernel. It alternates
launches of three builds: the kernel as it is, with marks, and with marks but without the stream of weights. The
document has medians by phase, and one frame from mark to mark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.arguments import add_checkpoint_arguments
from mktts.common import require_writable, write_json
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH
from mktts.kernel.trace import Marks, TracedBackend, frame_points, phases_of, steady, talker_points
from mktts.measure.environment import head
from mktts.measure.inspection import bytes_per_frame, components
from mktts.model.backend import Frame
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling

BUILDS = ("beside the stream", "alone")  # names of the builds with marks, in the document
_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
EXAMPLES = """examples:
  python -m mktts lab trace --output trace.json
  python -m mktts lab trace --checkpoint random:1.7b --output trace.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser, "random:0.6b")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the document there")


def main(arguments: argparse.Namespace) -> int:
    """Writes the document, and prints the times of a frame as one line of JSON."""
    if arguments.output:
        require_writable(arguments.output)
    found = record(open_checkpoint(arguments.checkpoint, arguments.revision))
    if arguments.output:
        write_json(arguments.output, found)
    print(json.dumps(found["frame_us"], sort_keys=True))
    return 0


def record(checkpoint: Checkpoint, device: str = "cuda", launches: int = 20, context: int = 200) -> dict[str, Any]:
    """Records `launches` launches of each build, from about `context` positions on, and returns the document. Raises
    BackendUnavailable if the frame kernel cannot run."""
    backend = TracedBackend(checkpoint.config, checkpoint.tensors(), device)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), device)
    prompt = builder.build(Request(_TEXT, speaker=checkpoint.config.default_speaker, layout="streaming"))
    made = _launches(backend, prompt, launches, context)
    talker, predictor = checkpoint.config.talker, checkpoint.config.predictor
    found = document(made, (talker.num_hidden_layers, predictor.num_hidden_layers))
    settings = {
        "checkpoint": f"{checkpoint.config.model_size} {checkpoint.config.type.name}",
        "random_weights": checkpoint.is_random,
        "weight_bytes": {part: bytes_per_frame(components(checkpoint), [part]) for part in ("talker", "predictor")},
        "blocks": backend.shape.blocks,
        "group": backend.shape.group,
        "launches": launches,
        "context": context,
    }
    return {**head("cuda"), **found, "settings": {**settings, **found["settings"]}}


def _launches(backend: TracedBackend, prompt: Any, launches: int, context: int) -> dict[str, list[Launch]]:
    before = max(1, -(-(context - len(prompt.embeds)) // MAX_FRAMES_A_LAUNCH))  # launches until the context is reached
    frames = MAX_FRAMES_A_LAUNCH * (before + launches)
    states = {build: backend.start(prompt, Sampling(), 0, frames) for build in ("", *BUILDS)}

    def rows(made: int) -> list[Any]:
        return [prompt.row(t - 1) if t else None for t in range(made, made + MAX_FRAMES_A_LAUNCH)]

    for state in states.values():
        for _ in range(before):
            list(backend.frames(state, rows(state.frames)))
    made: dict[str, list[Launch]] = {build: [] for build in states}
    for _ in range(launches):
        for build, state in states.items():  # alternates the builds
            if build:
                launch = Launch(*backend.traced(state, rows(state.frames), still=build == BUILDS[1]))
            else:
                launch = Launch(list(backend.frames(state, rows(state.frames))))
            made[build].append(launch)
    return made


# ---- the document


class Launch(NamedTuple):
    """One launch of one build: its frames, and its marks if the build has any."""

    frames: Sequence[Frame]
    marks: Marks | None = None


def document(made: Mapping[str, Sequence[Launch]], layers: tuple[int, int]) -> dict[str, Any]:
    """The document made of launches by build, "" and BUILDS. layers: of talker and predictor.

    Times of phases are in microseconds: `us`, `us_p10`, `us_p90` of one occurrence, over frames and blocks; `frame_us`
    of all occurrences in a frame, and `weights_us` the part spent waiting for weights, both as a mean over blocks and a
    median over frames. steps: of a frame of median length, from mark to mark, as a mean over blocks.
    Raises EngineError if the marks belong to another kernel."""
    points = frame_points(*layers)
    kept = {}
    for build in BUILDS:
        parts = zip(*(steady(one.marks, points) for one in made[build]), strict=True)
        kept[build] = [np.concatenate(part) for part in parts]
    spans, _ = kept[BUILDS[0]]
    took_ms = sum(frame.talker_ms + frame.predictor_ms for launch in made[BUILDS[0]] for frame in launch.frames[1:-1])
    ghz = float(spans[:, 0].sum() / took_ms / 1e6)  # block 0 records both, and its frames have no gaps
    frame_us = {}
    for build, launches in made.items():  # skips a launch's first frame, which starts with an empty ring
        times_ms = [frame.talker_ms + frame.predictor_ms for launch in launches for frame in launch.frames[1:]]
        frame_us[build or "without marks"] = round(1e3 * float(np.median(times_ms)), 2)
    typical = spans[np.argsort(spans.sum(2).mean(1))[len(spans) // 2]]
    return {
        "settings": {"talker_layers": layers[0], "predictor_layers": layers[1], "marks": len(points)},
        "clock_ghz": ghz,
        "frame_us": frame_us,
        "phases": {build: _phases(*of_build, points, layers[0], ghz) for build, of_build in kept.items()},
        "steps": " ".join(f"{us:.3f}" for us in typical.mean(0) / ghz / 1e3),
    }


def _phases(
    spans: np.ndarray, starved: np.ndarray, points: np.ndarray, talker_layers: int, ghz: float
) -> list[dict[str, Any]]:
    """The document's rows, one per phase. spans, starved: as `steady` returns them, for all frames."""
    of_talker = talker_points(talker_layers)
    labels = [("predictor" if i >= of_talker else "talker", phase) for i, phase in enumerate(phases_of(points))]
    rows = []
    for stack, phase in dict.fromkeys(labels):
        mine = np.array([label == (stack, phase) for label in labels])
        one = np.percentile(spans[:, :, mine], (50, 10, 90)) / ghz / 1e3
        whole, waited = (np.median(a[:, :, mine].sum(2).mean(1)) / ghz / 1e3 for a in (spans, starved))
        row = {"stack": stack, "phase": phase.name, "kind": phase.kind, "count": int(mine.sum())}
        row |= dict(zip(("us", "us_p10", "us_p90"), one.round(3).tolist(), strict=True))
        rows.append({**row, "frame_us": round(float(whole), 2), "weights_us": round(float(waited), 2)})
    return rows
