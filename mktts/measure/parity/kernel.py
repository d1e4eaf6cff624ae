"""The megakernel, or the batched frame, against an fp32 run of the same weights, next to bf16 PyTorch.

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows, the model
  under test choosing the codes. `ratio` is its relative rms error to fp32 over the bf16 oracle's: at most LIMIT passes.
  `total_variation` is the distance to fp32's sampling distributions. Rows beyond what the megakernel's prefill takes go
  through it one by one (`prompt_rows_one_by_one`).
* free (of the megakernel: `divergence`, the first of them): where greedy streams first differ from fp32's choices on
  ordinary weights, explained as in `ratio.first_difference`.
* exact: greedy codes on wide-margin random weights, frame for frame equal to fp32's.

The batched frame plays many streams, once with sums of one order ("deterministic"), once by cuBLAS ("cublas"), and its
codec is compared too (`codec.batched_errors`). `kernel="torch"` puts PyTorch in bf16 in the kernels' place: what runs
where there is no GPU.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.measure.parity.batch import MODES, LanesUnderTest, random_load
from mktts.measure.parity.codec import batched_errors
from mktts.measure.parity.probe import Observed, probe_of
from mktts.measure.parity.ratio import (
    GREEDY,
    LIMIT,
    Budget,
    FrameErrors,
    RowStream,
    first_difference,
    random_rows,
    replayed,
    spoken_streams,
)
from mktts.measure.parity.upstream import first_mismatch, our_codes
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling

MARGIN = ":margin"  # of a random checkpoint's name: its wide-margin variant
_EACH = 4  # streams at a context of the megakernel, every other greedy
_WRONG = {
    "forced": f"its error is more than {LIMIT} times bf16 PyTorch's",
    "free": "a greedy choice first differs from fp32's where rounding does not explain it",
    "exact": "a greedy code of the wide-margin variant is not fp32's",
}
Oracles = tuple[TorchBackend, TorchBackend]  # in bf16 and in fp32


@dataclass(frozen=True)
class Scope:
    """How much of one checkpoint is compared.

    contexts: prompt rows before the compared frames. frames: of the megakernel at each context. exact: frames of the
    wide-margin variant, 0 for none. lanes: of the batched frame's ticks. lane_frames, lane_exact: as frames and exact,
    of each stream. watched: streams of each load on lanes that are compared.
    """

    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)
    frames: int = 40
    exact: int = 500
    lanes: tuple[int, ...] = (8, 64, 256)
    lane_frames: int = 6
    lane_exact: int = 24
    watched: int = 8


class KernelUnderTest:
    """One stream at a time: the megakernel, or the bf16 oracle in its place; `LanesUnderTest` is its like."""

    def __init__(self, checkpoint: Checkpoint, kernel: str, device: str, bf16: TorchBackend) -> None:
        backend: Any = bf16
        if kernel != "torch":
            from mktts.kernel.backend import MegakernelBackend

            backend = MegakernelBackend(checkpoint.config, checkpoint.tensors(), device)
        self.probe = probe_of(backend)

    def observed(self, streams: Sequence[RowStream], size: int) -> Iterator[tuple[int, Iterable[Observed]]]:
        """What every frame of the compared streams did, with their numbers."""
        return ((number, self._frames(stream)) for number, stream in enumerate(streams))

    def codes(self, streams: Sequence[RowStream], size: int) -> list[Tensor]:
        """Codes (T, 16) of each stream."""
        return [our_codes(self.probe.backend, one, one.sampling, one.seed, len(one.text)) for one in streams]

    def _frames(self, stream: RowStream) -> Iterator[Observed]:
        state = self.probe.start(stream, stream.sampling, stream.seed, len(stream.text))
        for index in range(len(stream.text)):
            frame = self.probe.step(state, stream.row(index - 1) if index else None)
            if frame is None:
                return
            yield frame


UnderTest = KernelUnderTest | LanesUnderTest


def oracles_of(checkpoint: Checkpoint, device: str) -> Oracles:
    """PyTorch in bf16 and in fp32."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    return TorchBackend(config, tensors, device, torch.bfloat16), TorchBackend(config, tensors, device, torch.float32)


def context_streams(fp32: TorchBackend, rows: int, frames: int) -> list[RowStream]:
    """Streams of `frames` in all after prompts of `rows` random rows, every other greedy."""
    each = max(2, -(-frames // _EACH))  # a stream's first frame has no talker step
    return [
        RowStream(
            random_rows(fp32, rows, seed),
            random_rows(fp32, min(each, frames - seed * each), 1_000 + seed),
            GREEDY if seed % 2 == 0 else Sampling(),
            seed,
            labels=(f"at {rows}",),
        )
        for seed in range(-(-frames // each))
    ]


@torch.inference_mode()
def forced_and_free(
    tested: UnderTest, oracles: Oracles, loads: Mapping[int, Sequence[RowStream]], budget: Budget | None = None
) -> dict[str, Any]:
    """The comparisons `forced` and `free`. loads: streams by context, or by number of lanes.

    A budget that is over makes fewer frames of each load, two at least: a stream's first has no talker step.
    """
    config, budget = oracles[1].config, budget or Budget()
    errors, frames, differences = FrameErrors(config), {}, []
    greedy = compared = equal = 0
    for index, (size, streams) in enumerate(loads.items()):
        within, made = budget.share(1 / (len(loads) - index)), 0
        for number, observed in tested.observed(streams, size):
            stream, difference = streams[number], None
            greedy += stream.sampling == GREEDY
            for frame, sides in enumerate(replayed(stream, observed, *oracles)):
                errors.add(sides, stream.sampling, stream.labels)
                made += 1
                if stream.sampling == GREEDY and difference is None:
                    compared += 1
                    difference = first_difference(sides, config)
                    equal += difference is None
                    if difference is not None:
                        differences.append({"lanes": size, "stream": number, "frame": frame, **difference})
                if made >= 2 and within.over:
                    break
            if made >= 2 and within.over:
                break
        frames[str(size)] = made
    free = {"streams": greedy, "frames": compared, "equal": equal, "differences": differences}
    free["passed"] = all(difference["explained"] for difference in differences)
    asked = max(sum(len(stream.text) for stream in streams) for streams in loads.values())
    return {"forced": {"frames": frames, "asked": asked, **errors.found()}, "free": free}


@torch.inference_mode()
def exact_codes(
    tested: UnderTest,
    fp32: TorchBackend,
    streams: Sequence[RowStream],
    sizes: Sequence[int],
    budget: Budget | None = None,
) -> dict[str, Any]:
    """The comparison `exact`: a load of each size has these streams, each as often as there is room for it.

    A budget that is over makes fewer of fp32's frames, and of its streams.
    """
    truths: list[tuple[Tensor, bool]] = []  # and whether time cut it
    for stream in streams:
        if not truths or budget is None or not budget.over:
            codes = our_codes(fp32, stream, GREEDY, 0, len(stream.text), budget)
            truths.append((codes, len(codes) < len(stream.text) and budget is not None and budget.over))
    found: dict[str, Any] = {"streams": 0, "frames": 0, "equal": 0, "asked": len(streams[0].text)}
    for size in sizes:
        played = [replace(streams[i % len(truths)], seed=i) for i in range(size)]
        for number, ours in enumerate(tested.codes(played, size)):
            truth, cut = truths[number % len(truths)]
            mismatch = first_mismatch(ours[: len(truth)] if cut else ours, truth)
            found["streams"] += 1
            found["frames"] += len(truth)
            found["equal"] += mismatch[0] if mismatch else len(truth)
            if mismatch and "first_difference" not in found:
                place = {"lanes": size, "stream": number, "frame": mismatch[0], "codebook": mismatch[1]}
                found["first_difference"] = place
    return {**found, "passed": "first_difference" not in found and found["frames"] > 0}


def parity_of(
    source: str,
    scope: Scope,
    kernel: str,
    device: str,
    *,
    batch: bool = False,
    revision: str | None = None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """All comparisons of one checkpoint, by mode; `exact` uses its wide-margin variant.

    kernel: "megakernel" or "torch". batch: of the batched frame, and the codec of many streams. budget: what does not
    fit into it makes fewer frames than `scope` asks for; every comparison says how many it made. What fails is named
    under `errors`; `passed` says whether nothing did and all that ran passed.
    """
    modes = ["torch" if kernel == "torch" else "megakernel"] if not batch or kernel == "torch" else list(MODES)
    found: dict[str, Any] = {**{mode: {} for mode in modes}, "seconds": {}, "errors": {}}
    budget, exact = budget or Budget(), scope.lane_exact if batch else scope.exact
    margin = source.startswith("random:") and exact > 0

    def part(name: str, measure: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        try:
            measure()
        except Exception as error:  # noqa: BLE001  the other parts still count
            traceback.print_exc(file=sys.stderr)
            found["errors"][name] = f"{type(error).__name__}: {error}"
        found["seconds"][name] = time.perf_counter() - begun_s
        gc.collect()  # what a part held goes before the next one asks for memory
        if device.startswith("cuda"):
            torch.cuda.empty_cache()

    def make(checkpoint: Checkpoint, mode: str, oracles: Oracles, streams: Sequence[RowStream]) -> UnderTest:
        if batch:
            return LanesUnderTest.of(checkpoint, mode, device, scope.lanes, streams, scope.watched)
        return KernelUnderTest(checkpoint, mode, device, oracles[0])

    def ordinary(within: Budget) -> None:
        checkpoint = open_checkpoint(source, revision)
        oracles = oracles_of(checkpoint, device)
        sizes = scope.lanes if batch else scope.contexts
        loads = {
            size: random_load(oracles[1], size, scope.watched, scope.contexts, scope.lane_frames)
            if batch
            else context_streams(oracles[1], size, scope.frames)
            for size in sizes
        }
        every = [stream for streams in loads.values() for stream in streams]

        def compare(mode: str, share: float) -> None:
            tested = make(checkpoint, mode, oracles, every)
            found[mode].update(forced_and_free(tested, oracles, loads, within.share(share)))
            if batch:
                found[mode]["forced"] |= {"prompts_cut": tested.cut, "prefixes_kept": tested.kept}
            else:
                at_once = {rows: max(0, rows - (tested.probe.rows_at_once or rows)) for rows in scope.contexts}
                found[mode]["forced"]["prompt_rows_one_by_one"] = {str(rows): n for rows, n in at_once.items()}

        for index, mode in enumerate(modes):
            part(f"{mode}: forced", lambda mode=mode, index=index: compare(mode, 1 / (len(modes) - index)))

    def wide_margins(within: Budget) -> None:
        checkpoint = open_checkpoint(source + MARGIN, revision)
        oracles = oracles_of(checkpoint, device)
        sizes = scope.lanes if batch else (1,)
        streams = spoken_streams(checkpoint, oracles[1], scope.watched if batch else 1, exact)
        room = [streams[i % len(streams)] for i in range(max(sizes))]

        def compare(mode: str) -> None:
            tested = make(checkpoint, mode, oracles, room)
            found[mode]["exact"] = exact_codes(tested, oracles[1], streams, sizes, within)

        for mode in modes:
            part(f"{mode}: exact", lambda mode=mode: compare(mode))

    def codec() -> None:
        found["codec"] = batched_errors(open_checkpoint(source, revision), kernel, device, scope.lanes, budget)

    part("ordinary weights", lambda: ordinary(budget.share(0.6 if margin else 0.8)))
    if margin:
        part("wide margins", lambda: wide_margins(budget.share(0.8)))
    if batch:
        part(
            "codec",
            lambda: found.update(codec=batched_errors(open_checkpoint(source), kernel, device, scope.lanes, budget)),
        )
    measured = [value for mode in modes for value in found[mode].values()]
    measured += [found.get("codec", {"passed": False})] if batch else []
    found["passed"] = not found["errors"] and all(value["passed"] for value in measured)
    return found if batch else {**_of_kernel(found.pop(modes[0])), **found}


def _of_kernel(found: dict[str, Any]) -> dict[str, Any]:
    """`free` as the `divergence`, and `exact`, of one stream at a time."""
    if "free" in found:
        free = found.pop("free")
        first = free["differences"][0] if free["differences"] else {}
        words = {"frames": free["frames"], "diverged": bool(first), **first, "passed": free["passed"]}
        found["divergence"] = {name: value for name, value in words.items() if name != "lanes"}
    if exact := found.get("exact"):
        codebook = {"codebook": exact["first_difference"]["codebook"]} if "first_difference" in exact else {}
        same = {"frames": exact["equal"], "asked": exact["asked"], "equal": exact["passed"], "passed": exact["passed"]}
        found["exact"] = {**same, **codebook}
    return found


def outcome(found: dict[str, Any], batch: bool) -> dict[str, Any]:
    """The section of what `parity_of` found; the comparisons themselves stand beside the sections."""
    by_mode = {f"{mode}, ": found[mode] for mode in (*MODES, "torch") if mode in found} if batch else {"": found}
    section: dict[str, Any] = {"batch" if batch else "kernel": "see the comparisons", "frames": 0, "ratio": {}}
    reasons = [f"{name}: {reason}" for name, reason in found["errors"].items()]
    for mode, compared in by_mode.items():
        if "forced" in compared:
            section["frames"] += sum(compared["forced"]["frames"].values())
            section["ratio"] |= {f"{mode}{n}": value["ratio"] for n, value in compared["forced"]["pooled"].items()}
        for name, reason in _WRONG.items():
            part = compared.get("divergence" if name == "free" and not batch else name)
            reasons += [mode + reason] if part and not part["passed"] else []
    if "codec" in found:
        section["codec_db"] = {name: v["snr_db"] for name, v in found["codec"].items() if isinstance(v, dict)}
        reasons += [] if found["codec"]["passed"] else ["the codec in a batch is farther from fp32 than it may be"]
    return section | ({"reason": reasons[0]} if reasons else {})
