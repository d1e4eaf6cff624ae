"""`python -m mktts parity CHECKPOINT`: proves a checkpoint on this machine, and writes one file that can be sent.

The file and the last line of standard output are the same JSON document: the machine, and for every checkpoint its
`sections` (mktts.measure.parity.sections) with status, reason, seconds and figures, beside the kernel's comparisons
(mktts.measure.parity.kernel) and the batched frame's, `batch` (mktts.measure.parity.batch). No path of this machine is
in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mktts.checkpoint import SOURCES, open_checkpoint
from mktts.common import write_json
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.checkpoint_maker import CheckpointMaker
from mktts.measure.environment import head, provided_by, versions
from mktts.measure.machine import batch_missing, kernel_missing
from mktts.measure.parity import document as documents
from mktts.measure.parity.batch import batch_outcome, batch_parity_of
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.crowd_errors import BatchScope
from mktts.measure.parity.kernel import MARGIN, Scope, parity_of
from mktts.measure.parity.probe import LIMIT
from mktts.measure.parity.sections import Upstream, codec_section, codes_section, passed, prompt_section, section
from mktts.model.backend import device_named

OUTPUT = Path("mktts-parity.json")
PARTS = ("prompt", "codes", "codec", "kernel", "batch", "text")
DEFAULT_PARTS = PARTS[:-1]
# How the minutes are shared. They run in this order: the codec uses the upstream model that the prompts left loaded.
_SHARES = {"prompt": 1, "codec": 2, "codes": 5, "kernel": 6, "batch": 6}
_ON_DEVICE = ("kernel", "batch", "text")
_PACKAGES = ("mktts", "qwen-tts", "qwen-tts-hf", "transformers", "tokenizers", "triton")

EXAMPLES = """examples:
  python -m mktts parity Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice
  python -m mktts parity path/to/checkpoint --minutes 10 --output parity.json
  python -m mktts parity random:tiny --parts prompt,codes

Exit status: 0 where all that ran passed (what was skipped says why), 1 where something failed or nothing could run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scope = Scope()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help=SOURCES)
    parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument(
        "--parts", metavar="PART,...", help=f"of {','.join(PARTS)} (default: {','.join(DEFAULT_PARTS)})"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="for each checkpoint: fewer frames on a slow machine (default: 5)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FILE", help="the document (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="of codec and kernel: auto, cpu, cuda (default: %(default)s)")
    parser.add_argument(
        "--kernel",
        choices=("megakernel", "torch"),
        default="megakernel",
        help="torch: bf16 PyTorch in the kernel's place, to try the comparison where there is no GPU",
    )
    parser.add_argument(
        "--text-model", default="random:0.6b", metavar="CHECKPOINT", help="of the part text (default: %(default)s)"
    )
    kernel = parser.add_argument_group("how much the kernel is compared, where time allows")
    kernel.add_argument("--contexts", type=int, nargs="+", default=scope.contexts, help="prompt rows")
    kernel.add_argument("--forced-frames", type=int, default=scope.forced, help="at each context")
    kernel.add_argument(
        "--exact-frames", type=int, default=scope.exact, help="of a random checkpoint's wide-margin variant; 0: none"
    )
    lanes = BatchScope()
    batch = parser.add_argument_group("how much the batched frame is compared, at the kernel's contexts")
    batch.add_argument("--lanes", type=int, nargs="+", default=lanes.lanes, help="of its ticks")
    batch.add_argument("--lane-frames", type=int, default=lanes.frames, help="of each stream that is compared")
    batch.add_argument("--exact-lane-frames", type=int, default=lanes.exact, help="as --exact-frames, of each lane")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table and, last, the document."""
    import torch

    parts = _parts(arguments.parts)
    if not arguments.minutes > 0:
        raise MetricsError(f"--minutes must be above 0, got {arguments.minutes:g}")
    torch.set_float32_matmul_precision("highest")
    device = str(device_named(arguments.device))
    scope = Scope(tuple(arguments.contexts), arguments.forced_frames, arguments.exact_frames)
    batch_scope = BatchScope(
        tuple(arguments.lanes),
        frames=arguments.lane_frames,
        exact=arguments.exact_lane_frames,
        contexts=scope.contexts,
    )
    document: dict[str, Any] = {
        **head(device),
        "packages": {**versions(_PACKAGES), "qwen_tts": provided_by("qwen_tts")},
        "kernel": arguments.kernel,
        "limit": LIMIT,
        "minutes": arguments.minutes,
        "parts": list(parts),
        "scope": asdict(scope),
        "batch_scope": asdict(batch_scope),
        "checkpoints": {},
        "text": {},
        "passed": False,
    }

    def store() -> None:
        found = [*document["checkpoints"].values(), *filter(None, [document["text"]])]
        document["passed"] = bool(found) and all(part["passed"] for part in found)
        write_json(arguments.output, documents.without_paths(document))

    store()  # a file that cannot be written is known now, not after five minutes
    sources = list(dict.fromkeys(arguments.checkpoint))
    for source in sources:
        if not source.startswith("random:"):
            open_checkpoint(source, arguments.revision)  # likewise one that cannot be opened
    # Only what will be opened is made.
    runs = [part for part in parts if part not in _ON_DEVICE or not _missing(arguments.kernel, device, part)]
    maker = _maker(sources, runs, scope, batch_scope, arguments.text_model)
    for source in sources:
        name = documents.name_of(source)
        while name in document["checkpoints"]:
            name += "'"
        result = document["checkpoints"][name] = {"passed": False, "sections": {}, "errors": {}}
        _prove(source, name, parts, scope, batch_scope, device, arguments, maker, result, store)
    if "text" in parts:
        document["text"] = _text(arguments, device, maker)
        store()
    document = documents.without_paths(document)
    print(documents.table(document))
    print(f"\nwritten: {arguments.output}")
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 0 if document["passed"] else 1


def _prove(
    source: str,
    name: str,
    parts: Sequence[str],
    scope: Scope,
    batch_scope: BatchScope,
    device: str,
    arguments: argparse.Namespace,
    maker: CheckpointMaker,
    result: dict[str, Any],
    store: Callable[[], None],
) -> None:
    """Fills `result` section by section, within the minutes given."""
    maker.wait(source)
    checkpoint = open_checkpoint(source, arguments.revision)
    result["checkpoint"] = documents.describe(checkpoint, name)
    upstream, budget = Upstream(checkpoint), Budget(60 * arguments.minutes)
    missing = {part: why for part in _ON_DEVICE if (why := _missing(arguments.kernel, device, part))}

    def ready(part: str) -> None:
        upstream.free()
        if part in missing:
            raise BackendUnavailable(missing[part])

    def kernel(within: Budget) -> dict[str, Any]:
        ready("kernel")
        found = parity_of(
            source, scope, arguments.kernel, device, revision=arguments.revision, maker=maker, budget=within
        )
        del found["checkpoint"], found["passed"]
        result.update(found)
        return _kernel_outcome(found)

    def batch(within: Budget) -> dict[str, Any]:
        ready("batch")
        found = result["batch"] = batch_parity_of(
            source, batch_scope, arguments.kernel, device, revision=arguments.revision, maker=maker, budget=within
        )
        return batch_outcome(found)

    work: dict[str, Callable[[Budget], dict[str, Any]]] = {
        "prompt": partial(prompt_section, checkpoint, upstream),
        "codec": partial(codec_section, checkpoint, upstream, device),
        "codes": partial(codes_section, checkpoint, upstream),
        "kernel": kernel,
        "batch": batch,
    }
    wanted = {part: share for part, share in _SHARES.items() if part in parts}
    wanted |= {part: 0 for part in wanted if part in missing}  # the others take its time
    for part, share in list(wanted.items()):
        print(f"{name}: {part} ...", file=sys.stderr, flush=True)
        within = budget.share(share / max(1, sum(wanted.values())))
        del wanted[part]
        result["sections"][part] = section(partial(work[part], within))
        result["passed"] = passed(list(result["sections"].values()))
        store()


def _kernel_outcome(found: dict[str, Any]) -> dict[str, Any]:
    """The section of what `parity_of` found; the comparisons themselves stand beside the sections."""
    outcome: dict[str, Any] = {"kernel": "see forced, divergence and exact"}
    if "forced" in found:
        outcome["frames"] = sum(found["forced"]["frames"].values())
        outcome["ratio"] = {name: value["ratio"] for name, value in found["forced"]["pooled"].items()}
    wrong = [name for name in ("forced", "divergence", "exact") if name in found and not found[name]["passed"]]
    if found["errors"]:
        name, reason = next(iter(found["errors"].items()))
        outcome["reason"] = f"{name}: {reason}"
    elif wrong:
        outcome["reason"] = {
            "forced": f"its error is more than {LIMIT} times bf16 PyTorch's",
            "divergence": "it first differs from fp32 where rounding does not explain it",
            "exact": "a greedy code of the wide-margin variant is not fp32's",
        }[wrong[0]]
    return outcome


def _text(arguments: argparse.Namespace, device: str, maker: CheckpointMaker) -> dict[str, Any]:
    """The text decoder's comparison; `passed` is None where it was skipped."""
    from mktts.measure.parity.text import compare_text

    name = documents.name_of(arguments.text_model)
    if missing := _missing(arguments.kernel, device, "text"):
        return {"source": name, "status": "skipped", "reason": missing, "passed": None}
    print(f"{name}: text ...", file=sys.stderr, flush=True)
    for source in (arguments.text_model, arguments.text_model + MARGIN):
        maker.wait(source, "text")
    found = compare_text(arguments.text_model, arguments.kernel, device, Budget(60 * arguments.minutes))
    return {**found, "source": name, "status": "passed" if found["passed"] else "failed"}


def _missing(kernel: str, device: str, part: str) -> str | None:
    """Why the kernels of a part cannot run on `device`; None where they can."""
    if kernel != "megakernel":
        return None
    name, missing = ("batched frame", batch_missing) if part == "batch" else ("megakernel", kernel_missing)
    return missing() or (None if device.startswith("cuda") else f"the {name} does not run on {device}")


def _maker(
    sources: Sequence[str], parts: Sequence[str], scope: Scope, batch_scope: BatchScope, text_model: str
) -> CheckpointMaker:
    margins = ("kernel" in parts and scope.exact > 0) or ("batch" in parts and batch_scope.exact > 0)
    speech = [name for source in sources for name in ((source, source + MARGIN) if margins else (source,))]
    return CheckpointMaker(speech, (text_model, text_model + MARGIN) if "text" in parts else ())


def _parts(words: str | None) -> tuple[str, ...]:
    chosen = DEFAULT_PARTS if words is None else tuple(words.split(","))
    if unknown := [part for part in chosen if part not in PARTS]:
        raise MetricsError(f"--parts takes {', '.join(PARTS)}, got {', '.join(unknown) or words!r}")
    return chosen
