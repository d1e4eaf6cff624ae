"""The megakernel against an fp32 run of the same weights, next to upstream's own bf16 arithmetic.

`python -m mktts.measure.parity.kernel --output FILE` compares, for every checkpoint:

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows, the kernel
  choosing the codes. `ratio` is the kernel's relative rms error to fp32 over the bf16 oracle's: at most LIMIT passes.
  Rows beyond what the kernel's prefill takes go through the kernel one by one (`prompt_rows_one_by_one`).
* distributions: total variation distance to fp32's sampling distributions, of the kernel and of the bf16 oracle.
* divergence: the first greedy choice that differs from fp32's on ordinary random weights. It is explained where fp32's
  own gap between the two ids is within twice the bf16 oracle's largest logit error in that head and frame.
* exact: greedy codes on wide-margin weights, frame for frame equal to fp32's.
* text: the text decoder's greedy choices, likewise.

Where there is no GPU, `--kernel torch` puts the bf16 oracle in the kernel's place (ratio 1).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import write_json
from mktts.measure.ahead import Ahead
from mktts.measure.environment import environment
from mktts.measure.parity.probe import Observed, Probe, forced, probe_of, random_rows, scores, spoken_rows
from mktts.measure.parity.relative import LIMIT, Errors, compare
from mktts.measure.parity.text import compare_text
from mktts.model.backend import Backend, PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Choice, Sampling, distribution
from mktts.spec import NUM_CODEBOOKS

CONTEXTS = (16, 200, 700, 1_500, 2_000)
GREEDY = Sampling().greedy()
MARGIN = ":margin"  # of a random checkpoint's name: its wide-margin variant
_SEEDS = 100  # streams that end-of-speech may cut short before a comparison gives up
_PROMPT_ROWS = 16  # of the free-running comparisons


@dataclass(frozen=True)
class Plan:
    """Frames of one checkpoint's comparisons: forced at each context, free-running, and until the first divergence."""

    forced: int = 40
    exact: int = 500
    divergence: int = 60


PLANS = {
    "random:0.6b": Plan(),
    "random:1.7b": Plan(),
    "random:tiny": Plan(),
    "random:tiny-projected": Plan(),
}


@dataclass(frozen=True)
class Sides:
    """The model under test and the two oracles, all with the same weights."""

    checkpoint: Checkpoint
    kernel: Probe
    bf16: TorchBackend
    fp32: TorchBackend

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernel: str, device: str) -> Sides:
        config, tensors = checkpoint.config, checkpoint.tensors()
        bf16, fp32 = (TorchBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
        tested: Backend = bf16
        if kernel == "megakernel":
            from mktts.kernel.backend import MegakernelBackend

            tested = MegakernelBackend(config, tensors, device)
        return cls(checkpoint, probe_of(tested), bf16, fp32)

    def run(
        self,
        rows: int,
        frames: int,
        sampling: Sampling,
        each: Callable[[Observed, Observed, Observed, Tensor], bool | None],
    ) -> int:
        """Frames after a prompt of random rows: `each` gets kernel, bf16 and fp32 and code 0 of the frames before.

        Goes on with other draws where end-of-speech comes early. `each` ends the run with True. Returns frames made.
        """
        made = 0
        for seed in range(_SEEDS):
            prompt = PromptRows(random_rows(self.fp32, rows, seed))
            text = random_rows(self.fp32, frames, 1_000 + seed)
            room = frames - made
            sides = (self.kernel, self.bf16, self.fp32)
            tested, bf16, fp32 = (side.start(prompt, sampling, seed, room) for side in sides)
            for index in range(room):
                row = text[index] if index else None
                ours = self.kernel.step(tested, row)
                if ours is None:
                    break
                history = fp32.history[: fp32.frames].clone()
                others = (forced(b, s, row, ours.codes) for b, s in ((self.bf16, bf16), (self.fp32, fp32)))
                made += 1
                if each(ours, *others, history) or made == frames:
                    return made
        return made

    def rows_one_by_one(self, rows: int) -> int:
        """How many of a prompt's rows the kernel takes one by one."""
        return max(0, rows - (self.kernel.rows_at_once or rows))


@torch.inference_mode()
def forced_errors(sides: Sides, contexts: Sequence[int], frames: int, sampling: Sampling) -> dict[str, Any]:
    """The comparisons `forced` and `distributions` of the module docstring."""
    config = sides.fp32.config
    errors, distances = (Errors(), Errors()), (defaultdict(list), defaultdict(list))
    made: dict[str, int] = {}
    for context in contexts:

        def each(ours: Observed, bf16: Observed, fp32: Observed, history: Tensor, context: int = context) -> None:
            truth = _distributions(fp32, history, sampling, config)
            for observed, sums, distance in zip((ours, bf16), errors, distances, strict=True):
                for group, (found, expected) in enumerate(zip(observed.logits, fp32.logits, strict=True)):
                    part = "logits of code 0" if group == 0 else "logits of codes 1-15"
                    sums.add(found, expected, part, f"head {group}", f"logits at {context}")
                if fp32.hidden is not None:
                    for layer, (found, expected) in enumerate(zip(observed.hidden, fp32.hidden, strict=True)):
                        sums.add(found, expected, "hidden", f"layer {layer}", f"hidden at {context}")
                for group, (p, q) in enumerate(
                    zip(_distributions(observed, history, sampling, config), truth, strict=True)
                ):
                    distance["code 0" if group == 0 else "codes 1-15"].append((p - q).abs().sum() / 2)

        made[str(context)] = sides.run(context, frames, sampling, each)
    by_name = compare(*errors)
    pooled = {name: by_name[name] for name in ("logits of code 0", "logits of codes 1-15", "hidden")}

    def numbered(kind: str) -> list[dict[str, float]]:
        return [value for name, value in by_name.items() if name.split()[0] == kind and name.split()[1].isdigit()]

    distances_by_name = {
        name: {
            side: {"mean": float(torch.stack(d[name]).mean()), "max": float(torch.stack(d[name]).max())}
            for side, d in zip(("kernel", "bf16"), distances, strict=True)
        }
        for name in distances[0]
    }
    return {
        "frames": made,
        "prompt_rows_one_by_one": {str(context): sides.rows_one_by_one(context) for context in contexts},
        "pooled": pooled,
        "by_head": numbered("head"),
        "by_layer": numbered("layer"),
        "by_context": {name: value for name, value in by_name.items() if " at " in name},
        "largest_ratio_of_a_head_or_layer": max(v["ratio"] for v in numbered("head") + numbered("layer")),
        "total_variation": distances_by_name,
        "passed": sum(made.values()) > 0 and all(value["ratio"] <= LIMIT for value in pooled.values()),
    }


def _distributions(observed: Observed, history: Tensor, sampling: Sampling, config) -> list[Tensor]:
    choices: list[Choice] = [sampling.talker] + [sampling.predictor] * (NUM_CODEBOOKS - 1)
    made_from = scores(observed.logits, history, sampling, config)
    return [distribution(logits, choice) for logits, choice in zip(made_from, choices, strict=True)]


@torch.inference_mode()
def first_divergence(sides: Sides, frames: int) -> dict[str, Any]:
    """The comparison `divergence`: where the kernel's greedy choice first differs from fp32's, and why."""
    config, found = sides.fp32.config, {}
    position = 0

    def each(ours: Observed, bf16: Observed, fp32: Observed, history: Tensor) -> bool:
        nonlocal position
        made_from = [scores(observed.logits, history, GREEDY, config) for observed in (ours, bf16, fp32)]
        for group, (kernel, near, truth) in enumerate(zip(*made_from, strict=True)):
            best, chosen = int(truth.argmax()), int(ours.codes[group])
            if best != chosen:
                kept = truth.isfinite()
                gap = float(truth[best] - truth[chosen])
                bound = 2 * float((near - truth)[kept].abs().max())
                found.update(
                    frame=position,
                    codebook=group,
                    ids=[best, chosen],
                    fp32_gap=gap,
                    kernel_error_of_the_two=float((kernel - truth)[[best, chosen]].abs().sum()),
                    kernel_largest_error=float((kernel - truth)[kept].abs().max()),
                    bf16_largest_error=bound / 2,
                    explained=gap <= bound,
                )
                return True
        position += 1
        return False

    made = sides.run(_PROMPT_ROWS, frames, GREEDY, each)
    return {"frames": made, "diverged": bool(found), **found, "passed": found.get("explained", True)}


@torch.inference_mode()
def exact_frames(checkpoint: Checkpoint, kernel: Backend, fp32: TorchBackend, frames: int) -> dict[str, Any]:
    """The comparison `exact`: both free-run; equal frames before the first difference, end-of-speech included."""
    prompt, text = spoken_rows(checkpoint, fp32, frames, 0)
    states = [backend.start(PromptRows(prompt), GREEDY, 0, frames) for backend in (kernel, fp32)]
    for index in range(frames):
        row = text[index] if index else None
        ours, truth = (b.step(s, row).codes for b, s in zip((kernel, fp32), states, strict=True))
        if ours is None or truth is None:
            same = ours is truth
            return {"frames": index, "asked": frames, "equal": same, "ended": True, "passed": same}
        if not torch.equal(ours, truth):
            codebook = int((ours != truth).nonzero()[0])
            return {"frames": index, "asked": frames, "equal": False, "codebook": codebook, "passed": False}
    return {"frames": frames, "asked": frames, "equal": True, "passed": True}


def parity_of(
    source: str, plan: Plan, contexts: Sequence[int], kernel: str, device: str, ahead: Ahead
) -> dict[str, Any]:
    """All comparisons of one checkpoint; `exact` uses its wide-margin variant. What fails is named under `errors`."""
    result: dict[str, Any] = {"seconds": {}, "errors": {}}
    sides: list[Sides] = []

    def part(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        begun_s = time.perf_counter()
        try:
            result[name] = measure()
        except Exception as error:  # noqa: BLE001  the other parts still count
            traceback.print_exc(file=sys.stderr)
            result["errors"][name] = f"{type(error).__name__}: {error}"
        result["seconds"][name] = time.perf_counter() - begun_s

    def load(wanted: str) -> dict[str, Any]:
        ahead.wait(wanted)
        checkpoint = open_checkpoint(wanted)
        sides[:] = [Sides.load(checkpoint, kernel, device)]
        random = "random weights: timing and parity only"
        return {"source": wanted, "weights": random if checkpoint.is_random else str(checkpoint.revision)}

    part("checkpoint", lambda: load(source))
    if sides:
        part("forced", lambda: forced_errors(sides[0], contexts, plan.forced, Sampling()))
        part("divergence", lambda: first_divergence(sides[0], plan.divergence))
    sides.clear()  # one set of weights at a time
    if source.startswith("random:") and plan.exact:
        part("margin_checkpoint", lambda: load(source + MARGIN))
        if sides:
            part("exact", lambda: exact_frames(sides[0].checkpoint, sides[0].kernel.backend, sides[0].fp32, plan.exact))
    parts = [result[name] for name in ("forced", "divergence", "exact") if name in result]
    result["passed"] = not result["errors"] and all(found["passed"] for found in parts)
    return result


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    lines = [f"{document['device']}, torch {document['torch']}, kernel: {document['kernel']}"]
    for source, result in document["checkpoints"].items():
        lines.append(f"\n{source}: {'passed' if result['passed'] else 'FAILED'}")
        if "forced" in result:
            found = result["forced"]
            lines.append(f"  teacher-forced, {sum(found['frames'].values())} frames; relative rms error to fp32")
            for name, value in {**found["pooled"], **found["by_context"]}.items():
                lines.append(
                    f"  {name:24} kernel {value['kernel']:.3e}  bf16 {value['bf16']:.3e}  x {value['ratio']:.3f}"
                )
            lines.append(f"  largest ratio of a head or layer: {found['largest_ratio_of_a_head_or_layer']:.3f}")
            for name, value in found["total_variation"].items():
                means = "  ".join(f"{side} {v['mean']:.4f} (max {v['max']:.4f})" for side, v in value.items())
                lines.append(f"  total variation, {name}: {means}")
        for name in ("divergence", "exact"):
            if name in result:
                lines.append(f"  {name}: {json.dumps(result[name])}")
        lines += [f"  error in {name}: {reason}" for name, reason in result["errors"].items()]
    lines.append(f"\ntext: {json.dumps(document['text'])}")
    return "\n".join(lines)


def _plan(source: str, given: argparse.Namespace) -> Plan:
    plan = PLANS.get(source, Plan())
    exact = plan.exact if given.exact_frames is None else given.exact_frames
    return replace(plan, forced=given.forced_frames or plan.forced, exact=exact)


def main(words: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON; returns 0 where everything passed."""
    parser = argparse.ArgumentParser(
        prog="python -m mktts.measure.parity.kernel", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", action="append", help=f"repeatable; default: {', '.join(PLANS)}")
    parser.add_argument("--text-model", default="random:0.6b", help='Qwen3 text model, "" for none (%(default)s)')
    parser.add_argument("--kernel", choices=("megakernel", "torch"), default="megakernel")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="prompt rows (default: %(default)s)")
    parser.add_argument("--forced-frames", type=int, help="at each context")
    parser.add_argument("--exact-frames", type=int, help="on the wide-margin checkpoint; 0: none")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON document, written after every checkpoint")
    given = parser.parse_args(words)
    torch.set_float32_matmul_precision("highest")
    machine = environment()
    document: dict[str, Any] = {
        "device": machine["gpu"] if given.device.startswith("cuda") else machine["cpu"],
        "driver": machine["gpu_driver"],
        "torch": machine["torch"],
        "revision": machine["git_revision"],
        "date": machine["date_utc"],
        "environment": machine,
        "kernel": given.kernel,
        "limit": LIMIT,
        "checkpoints": {},
        "text": {},
    }

    def store() -> None:
        parts = [*document["checkpoints"].values(), *filter(None, [document["text"]])]
        document["passed"] = bool(parts) and all(part["passed"] for part in parts)
        if given.output:
            write_json(given.output, document)

    plans = {source: _plan(source, given) for source in given.checkpoint or PLANS}
    wanted = [
        name for source, plan in plans.items() for name in (source, source + MARGIN) if plan.exact or name == source
    ]
    ahead = Ahead(wanted, [given.text_model, given.text_model + MARGIN])
    for source, plan in plans.items():
        document["checkpoints"][source] = parity_of(source, plan, given.contexts, given.kernel, given.device, ahead)
        store()
    if given.text_model:
        for source in (given.text_model, given.text_model + MARGIN):
            ahead.wait(source, "text")
        document["text"] = compare_text(given.text_model, given.kernel, given.device)
        store()
    print(table(document))
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
