"""The megakernel against an fp32 run of the same weights, next to upstream's own bf16 arithmetic.

`parity_of` compares, for one checkpoint:

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows, the kernel
  choosing the codes. `ratio` is the kernel's relative rms error to fp32 over the bf16 oracle's: at most LIMIT passes.
  Rows beyond what the kernel's prefill takes go through the kernel one by one (`prompt_rows_one_by_one`).
* distributions: total variation distance to fp32's sampling distributions, of the kernel and of the bf16 oracle.
* divergence: the first greedy choice that differs from fp32's on ordinary weights. It is explained where fp32's own
  gap between the two ids is within twice the bf16 oracle's largest logit error in that head and frame.
* exact: greedy codes on wide-margin random weights, frame for frame equal to fp32's.

`kernel="torch"` puts the bf16 oracle in the kernel's place (ratio 1): what runs where there is no GPU.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.measure.checkpoint_maker import CheckpointMaker
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.forced import ForcedErrors, first_difference
from mktts.measure.parity.probe import Observed, Probe, forced, probe_of, random_rows, spoken_rows
from mktts.model.backend import Backend, PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling

GREEDY = Sampling().greedy()
MARGIN = ":margin"  # of a random checkpoint's name: its wide-margin variant
_SEEDS = 100  # streams that end-of-speech may cut short before a comparison gives up
_PROMPT_ROWS = 16  # of the free-running comparisons


@dataclass(frozen=True)
class Scope:
    """How much of one checkpoint is compared, in frames.

    contexts: prompt rows before the forced frames. forced: frames at each context. exact: of the wide-margin variant,
    0 for none. divergence: frames in which the first difference is looked for.
    """

    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)
    forced: int = 40
    exact: int = 500
    divergence: int = 60


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
        budget: Budget | None = None,
    ) -> int:
        """Frames after a prompt of random rows: `each` gets kernel, bf16 and fp32 and code 0 of the frames before.

        Goes on with other draws where end-of-speech comes early. `each` ends the run with True, and so does a budget
        that is over, after two frames at the earliest: the first has no talker step. Returns frames made.
        """
        made, budget = 0, budget or Budget()
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
                if each(ours, *others, history) or made == frames or (made >= 2 and budget.over):
                    return made
        return made

    def rows_one_by_one(self, rows: int) -> int:
        """How many of a prompt's rows the kernel takes one by one."""
        return max(0, rows - (self.kernel.rows_at_once or rows))


@torch.inference_mode()
def forced_errors(
    sides: Sides, contexts: Sequence[int], frames: int, sampling: Sampling, budget: Budget | None = None
) -> dict[str, Any]:
    """The comparisons `forced` and `distributions` of the module docstring."""
    sums, budget = ForcedErrors(sides.fp32.config), budget or Budget()
    made: dict[str, int] = {}
    for index, context in enumerate(contexts):

        def each(ours: Observed, bf16: Observed, fp32: Observed, history: Tensor, context: int = context) -> None:
            sums.add(ours, bf16, fp32, history, sampling, [f"at {context}"])

        made[str(context)] = sides.run(context, frames, sampling, each, budget.share(1 / (len(contexts) - index)))
    found = sums.found()
    return {
        "frames": made,
        "asked": frames,
        "prompt_rows_one_by_one": {str(context): sides.rows_one_by_one(context) for context in contexts},
        "by_context": found.pop("by_label"),
        **found,
    }


@torch.inference_mode()
def first_divergence(sides: Sides, frames: int, budget: Budget | None = None) -> dict[str, Any]:
    """The comparison `divergence`: where the kernel's greedy choice first differs from fp32's, and why."""
    config, found = sides.fp32.config, {}
    position = 0

    def each(ours: Observed, bf16: Observed, fp32: Observed, history: Tensor) -> bool:
        nonlocal position
        if difference := first_difference(ours, bf16, fp32, history, config):
            found.update(frame=position, **difference)
            return True
        position += 1
        return False

    made = sides.run(_PROMPT_ROWS, frames, GREEDY, each, budget)
    passed = found.get("explained", True)
    return {"frames": made, "asked": frames, "diverged": bool(found), **found, "passed": passed}


@torch.inference_mode()
def exact_frames(
    checkpoint: Checkpoint, kernel: Backend, fp32: TorchBackend, frames: int, budget: Budget | None = None
) -> dict[str, Any]:
    """The comparison `exact`: both free-run; equal frames before the first difference, end-of-speech included."""
    prompt, text = spoken_rows(checkpoint, fp32, frames, 0)
    states = [backend.start(PromptRows(prompt), GREEDY, 0, frames) for backend in (kernel, fp32)]
    for index in range(frames):
        if index and budget is not None and budget.over:
            return {"frames": index, "asked": frames, "equal": True, "passed": True}
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
    source: str,
    scope: Scope,
    kernel: str,
    device: str,
    *,
    revision: str | None = None,
    maker: CheckpointMaker | None = None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """All comparisons of one checkpoint; `exact` uses its wide-margin variant. What fails is named under `errors`.

    kernel: "megakernel" or "torch". maker: waited for, where it makes the checkpoints. budget: what does not fit into
    it makes fewer frames than `scope` asks for; every comparison says how many it made.
    """
    result: dict[str, Any] = {"seconds": {}, "errors": {}}
    sides: list[Sides] = []
    budget = budget or Budget()

    def part(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        begun_s = time.perf_counter()
        try:
            result[name] = measure()
        except Exception as error:  # noqa: BLE001  the other parts still count
            traceback.print_exc(file=sys.stderr)
            result["errors"][name] = f"{type(error).__name__}: {error}"
        result["seconds"][name] = time.perf_counter() - begun_s

    def load(wanted: str) -> dict[str, Any]:
        sides.clear()  # one set of weights at a time
        if maker is not None:
            maker.wait(wanted)
        checkpoint = open_checkpoint(wanted, revision)
        sides.append(Sides.load(checkpoint, kernel, device))
        return {"source": wanted, "weights": RANDOM_WEIGHTS if checkpoint.is_random else str(checkpoint.revision)}

    margin = source.startswith("random:") and scope.exact > 0
    part("checkpoint", lambda: load(source))
    if sides:
        within = budget.share(0.5 if margin else 0.8)
        part("forced", lambda: forced_errors(sides[0], scope.contexts, scope.forced, Sampling(), within))
        part("divergence", lambda: first_divergence(sides[0], scope.divergence, budget.share(0.3 if margin else 1.0)))
    if margin:
        part("margin_checkpoint", lambda: load(source + MARGIN))
        if sides:
            tested = sides[0]
            part(
                "exact",
                lambda: exact_frames(tested.checkpoint, tested.kernel.backend, tested.fp32, scope.exact, budget),
            )
    parts = [result[name] for name in ("forced", "divergence", "exact") if name in result]
    result["passed"] = not result["errors"] and all(found["passed"] for found in parts)
    return result
