"""The megakernel against an fp32 run of the same weights, next to bf16 PyTorch.

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows, the model
  under test choosing the codes. `ratio` is its relative rms error to fp32 over the bf16 oracle's: at most LIMIT passes.
  Rows beyond what the megakernel's prefill takes go through it one by one.
* divergence: where a greedy stream first differs from fp32's choices on ordinary weights, one that is not explained
  before others: see `ratio.first_difference`.
* exact: greedy codes on wide-margin random weights, frame for frame equal to fp32's.

`kernel="torch"` puts PyTorch in bf16 in the megakernel's place: what runs where there is no GPU."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.kernel.backend import MegakernelBackend
from mktts.measure.parity import ratio
from mktts.measure.parity.ratio import GREEDY, UNLIMITED, Budget, RowStream
from mktts.measure.parity.upstream import first_mismatch, our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling

MARGIN = ":margin"  # of a random checkpoint's name: its wide-margin variant
_ROWS_A_LAUNCH = 32  # at 28 layers 4 480 exchanges; their tags start again at 65 536
_EACH = 4  # streams at a context
_WRONG = {
    "forced": f"its error is more than {ratio.LIMIT} times bf16 PyTorch's",
    "divergence": "a greedy choice first differs from fp32's where rounding does not explain it",
    "exact": "a greedy code of the wide-margin variant is not fp32's",
}
Oracles = tuple[TorchBackend, TorchBackend]  # in bf16 and in fp32


@dataclass(frozen=True)
class Scope:
    """How much of one checkpoint is compared.

    contexts: prompt rows before the compared frames. frames: at each context. exact: frames of the wide-margin variant,
    0 for none."""

    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)
    frames: int = 40
    exact: int = 500


class KernelUnderTest:
    """The megakernel, or PyTorch in its place, which is made to take its own codes."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._debug = backend.new_debug() if hasattr(backend, "new_debug") else None  # PyTorch needs none

    @torch.inference_mode()
    def start(self, prompt: Prompt | PromptRows | RowStream, sampling: Sampling, seed: int, max_frames: int) -> Any:
        """A prompt of any length: what prefill does not take goes the way of the few rows after a kept prefix."""
        embeds = prompt.embeds
        at_once = len(embeds) if self._debug is None else self.backend._prefill.capacity
        rest = embeds[at_once:]
        state = self.backend.start(PromptRows(embeds[:at_once]), sampling, seed, len(rest) + max_frames)
        if len(rest):
            for rows in rest.to(self.backend.device, self.backend.dtype).contiguous().split(_ROWS_A_LAUNCH):
                self.backend.put_rows(state, rows, state.prompt_rows).synchronize()
                state.prompt_rows += len(rows)
        state.max_frames = max_frames
        return state

    def step(self, state: Any, row: Tensor | None) -> ratio.Observed | None:
        """The next frame; None at end-of-speech."""
        if self._debug is None:
            codes = self.backend.step(state.copy(), row).codes
            return None if codes is None else ratio.forced(self.backend, state, row, codes)
        frame = self.backend.step(state, row, self._debug)
        if frame.codes is None:
            return None
        sizes = ratio.vocabularies(self.backend.config)
        logits = [head[:size].float() for head, size in zip(self._debug.logits, sizes, strict=True)]
        return ratio.Observed(frame.codes, logits, None if row is None else self._debug.hidden.float())

    def frames(self, stream: RowStream) -> Iterator[ratio.Observed]:
        state = self.start(stream, stream.sampling, stream.seed, len(stream.text))
        for index in range(len(stream.text)):
            frame = self.step(state, stream.row(index - 1) if index else None)
            if frame is None:
                return
            yield frame


def oracles_of(checkpoint: Checkpoint, device: str) -> Oracles:
    config, tensors = checkpoint.config, checkpoint.tensors()
    return TorchBackend(config, tensors, device, torch.bfloat16), TorchBackend(config, tensors, device, torch.float32)


@torch.inference_mode()
def forced_frames(
    loads: Mapping[int, Iterable[tuple[RowStream, Iterable[ratio.Observed]]]],
    oracles: Oracles,
    budget: Budget = UNLIMITED,
) -> dict[str, Any]:
    """The comparisons `forced` and `divergence`. loads: by context, or by number of lanes, streams and what the frames
    of each did. A budget that is over makes fewer frames of each load, two at least: a stream's first has no talker
    step."""
    errors, frames, differences, compared = ratio.ErrorRatio(), {}, [], 0
    for index, (size, streams) in enumerate(loads.items()):
        within, made, apart = budget.share(1 / (len(loads) - index)), 0, set()
        played = (
            (number, stream, frame, sides)
            for number, (stream, seen) in enumerate(streams)
            for frame, sides in enumerate(ratio.replayed(stream, seen, *oracles))
        )
        for number, stream, frame, sides in played:
            errors.add_frame(*sides[:3])
            made += 1
            if stream.sampling == GREEDY and number not in apart:
                compared += 1
                if difference := ratio.first_difference(sides, oracles[1].config):
                    apart.add(number)
                    differences.append({"load": size, "stream": number, "frame": frame, **difference})
            if made >= 2 and within.over:
                break
        frames[str(size)] = made
    pooled = errors.found()
    passed = bool(pooled) and all(value["ratio"] <= ratio.LIMIT for value in pooled.values())
    explained = all(difference["explained"] for difference in differences)
    worst = min(differences, key=lambda difference: difference["explained"], default={})
    return {
        "forced": {"frames": frames, "pooled": pooled, "passed": passed},
        "divergence": {"frames": compared, "diverged": bool(differences), **worst, "passed": explained},
    }


def exact_codes(tested: Any, fp32: TorchBackend, stream: RowStream, budget: Budget = UNLIMITED) -> dict[str, Any]:
    """The comparison `exact`. tested: a backend. frames: that are fp32's, from the stream's beginning. A budget that is
    over makes fewer of fp32's frames."""
    asked = len(stream.text)
    truth = our_codes(fp32, stream, GREEDY, 0, asked, budget)
    ours = our_codes(tested, stream, GREEDY, 0, len(truth) if budget.over else asked)
    mismatch = first_mismatch(ours, truth)
    found = {"frames": mismatch[0] if mismatch else len(truth), "asked": asked, "equal": mismatch is None}
    first = {"first_difference": {"frame": mismatch[0], "codebook": mismatch[1]}} if mismatch else {}
    return {**found, **first, "passed": mismatch is None and len(truth) > 0}


def parity_of(
    source: str, scope: Scope, kernel: str, device: str, *, revision: str | None = None, budget: Budget = UNLIMITED
) -> dict[str, Any]:
    """All comparisons of one checkpoint; `exact` uses its wide-margin variant, which random ones have.

    kernel: "megakernel" or "torch". budget: what does not fit into it makes fewer frames than `scope` asks for; every
    comparison says how many it made. `passed` says whether all passed."""
    margin = source.startswith("random:") and scope.exact > 0

    def backend_of(checkpoint: Checkpoint, bf16: TorchBackend) -> Any:
        if kernel == "torch":
            return bf16
        return MegakernelBackend(checkpoint.config, checkpoint.tensors(), device)

    checkpoint = open_checkpoint(source, revision)
    oracles = oracles_of(checkpoint, device)
    tested, frames = KernelUnderTest(backend_of(checkpoint, oracles[0])), max(2, -(-scope.frames // _EACH))
    loads = {
        rows: [(one, tested.frames(one)) for one in ratio.random_streams(oracles[1], rows, _EACH, frames)]
        for rows in scope.contexts
    }
    found = forced_frames(loads, oracles, budget.share(0.6 if margin else 0.8))
    del tested, oracles, loads
    release()
    if margin:
        checkpoint = open_checkpoint(source + MARGIN, revision)
        bf16, fp32 = oracles_of(checkpoint, device)
        stream = ratio.spoken_stream(checkpoint, fp32, scope.exact)
        found["exact"] = exact_codes(backend_of(checkpoint, bf16), fp32, stream, budget.share(0.8))
        del bf16, fp32
        release()
    return {**found, "passed": all(value["passed"] for value in found.values())}


def release() -> None:
    """What a comparison held goes before the next one asks for memory; without CUDA there is no cache to empty."""
    gc.collect()
    torch.cuda.empty_cache()


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """The section of what `parity_of` found; the comparisons themselves stand beside the sections."""
    forced = found["forced"]
    section = {"frames": sum(forced["frames"].values())}
    section["ratio"] = {name: value["ratio"] for name, value in forced["pooled"].items()}
    reasons = [why for name, why in _WRONG.items() if name in found and not found[name]["passed"]]
    return section | ({"reason": reasons[0]} if reasons else {})
