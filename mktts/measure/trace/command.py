"""`python -m mktts trace`: where the time of a frame goes inside one launch of the frame kernel.

Launches of three builds take turns: the kernel as it is, the same with marks, and with marks but without its stream of
weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.arguments import add_checkpoint_arguments
from mktts.common import require_writable, write_json
from mktts.errors import MetricsError
from mktts.measure.environment import head
from mktts.measure.inspection import bytes_per_frame, components
from mktts.measure.trace.document import BUILDS, Launch, document

if TYPE_CHECKING:
    from mktts.kernel.trace import TracedBackend

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
EXAMPLES = """examples:
  python -m mktts trace
  python -m mktts trace --checkpoint random:1.7b --output trace.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_arguments(parser, "random:0.6b")
    parser.add_argument("--device", default="cuda", help="the GPU (default: %(default)s)")
    parser.add_argument(
        "--launches", type=int, default=20, help="of eight frames, of each build (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=200, help="positions before them (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the document there")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table by phase, then what a frame takes as one line of JSON."""
    if arguments.launches < 1:
        raise MetricsError(f"--launches must be at least 1, got {arguments.launches}")
    if arguments.output:
        require_writable(arguments.output)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    found = record(checkpoint, arguments.device, arguments.launches, arguments.context)
    if arguments.output:
        write_json(arguments.output, found)
    print(table(found))
    print(json.dumps(found["frame_us"], sort_keys=True))
    return 0


def record(checkpoint: Checkpoint, device: str = "cuda", launches: int = 20, context: int = 200) -> dict[str, Any]:
    """Records `launches` launches of each build, from about `context` positions on, and returns the document.

    Raises BackendUnavailable where the frame kernel cannot run.
    """
    import torch

    from mktts.kernel.trace import TracedBackend
    from mktts.model.prompt import PromptBuilder, Request

    backend = TracedBackend(checkpoint.config, checkpoint.tensors(), device)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), device, torch.bfloat16)
    prompt = builder.build(Request(TEXT, speaker=checkpoint.config.default_speaker, layout="streaming"))
    made: dict[str, list[Launch]] = {"": [], **{build: [] for build in BUILDS}}
    for turn in _launches(backend, prompt, launches, context):
        for build, launch in turn.items():
            made[build].append(launch)
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


def _launches(backend: TracedBackend, prompt: Any, launches: int, context: int) -> Iterator[dict[str, Launch]]:
    from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH
    from mktts.model.sampling import Sampling

    before = max(1, -(-(context - len(prompt.embeds)) // MAX_FRAMES_A_LAUNCH))  # launches until the context is reached
    frames = MAX_FRAMES_A_LAUNCH * (before + launches)
    states = {build: backend.start(prompt, Sampling(), 0, frames) for build in ("", *BUILDS)}

    def rows(made: int) -> list[Any]:
        return [prompt.row(t - 1) if t else None for t in range(made, made + MAX_FRAMES_A_LAUNCH)]

    for state in states.values():
        for _ in range(before):
            list(backend.frames(state, rows(state.frames)))
    for _ in range(launches):
        turn = {}
        for build, state in states.items():
            if build:
                turn[build] = Launch(*backend.traced(state, rows(state.frames), still=build == BUILDS[1]))
            else:
                turn[build] = Launch(list(backend.frames(state, rows(state.frames))))
        yield turn


def table(found: Mapping[str, Any]) -> str:
    """The document as people read it: a line a phase, beside the stream and alone."""
    lines = [f"{found['device']}, {found['settings']['checkpoint']}, {found['settings']['blocks']} blocks"]
    lines += [f"frame, {build}: {us:,.1f} us" for build, us in found["frame_us"].items()]
    lines += ["", f"{'':10}{'':30}{'n':>5}{'us':>8}{'alone':>8}{'a frame':>10}{'alone':>8}{'weights':>9}"]
    for row, still in zip(*(found["phases"][build] for build in BUILDS), strict=True):
        lines.append(
            f"{row['stack']:10}{row['phase']:30}{row['count']:>5}{row['us']:>8.3f}{still['us']:>8.3f}"
            f"{row['frame_us']:>10.1f}{still['frame_us']:>8.1f}{row['weights_us']:>9.1f}"
        )
    sums = [sum(row[key] for row in found["phases"][build]) for build in BUILDS for key in ("frame_us", "weights_us")]
    lines.append(f"{'':10}{'sum':30}{'':21}{sums[0]:>10.1f}{sums[2]:>8.1f}{sums[1]:>9.1f}")
    return "\n".join(lines)
