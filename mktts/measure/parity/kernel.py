"""The megakernel, or the batched frame, against an fp32 run of the same weights, next to bf16 PyTorch.

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows, the model
  under test choosing the codes. `ratio` is its relative rms error to fp32 over the bf16 oracle's: at most LIMIT passes.
  `total_variation` is the distance to fp32's sampling distributions. Rows beyond what the megakernel's prefill takes go
  through it one by one.
* divergence: where a greedy stream first differs from fp32's choices on ordinary weights, one that is not explained
  before others: see `ratio.first_difference`.
* exact: greedy codes on wide-margin random weights, frame for frame equal to fp32's.

The batched frame plays many streams, once with sums of one order ("deterministic"), once by cuBLAS ("cublas"), and its
codec is compared too (`codec.batched_errors`). `kernel="torch"` puts PyTorch in bf16 in the megakernel's place: what
runs where there is no GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.measure.parity import ratio
from mktts.measure.parity.batch import MODES, LanesUnderTest, cuda_lanes, random_load
from mktts.measure.parity.codec import batched_errors
from mktts.measure.parity.ratio import GREEDY, UNLIMITED, Budget, RowStream
from mktts.measure.parity.upstream import first_mismatch, our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling

MARGIN = ":margin"  # of a random checkpoint's name: its wide-margin variant
_ROWS_A_LAUNCH = 32  # at 28 layers 4 480 exchanges; their tags start again at 65 536
_EACH = 4  # streams at a context of the megakernel
_WRONG = {
    "forced": f"its error is more than {ratio.LIMIT} times bf16 PyTorch's",
    "divergence": "a greedy choice first differs from fp32's where rounding does not explain it",
    "exact": "a greedy code of the wide-margin variant is not fp32's",
}
Oracles = tuple[TorchBackend, TorchBackend]  # in bf16 and in fp32


@dataclass(frozen=True)
class Scope:
    """How much of one checkpoint is compared.

    contexts: prompt rows before the compared frames. frames: of the megakernel at each context. exact: frames of the
    wide-margin variant, 0 for none. lanes: of the batched frame's ticks. lane_frames, lane_exact: as frames and exact,
    of each stream. watched: streams of each load on lanes that are compared."""

    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)
    frames: int = 40
    exact: int = 500
    lanes: tuple[int, ...] = (8, 64, 256)
    lane_frames: int = 6
    lane_exact: int = 24
    watched: int = 8


class KernelUnderTest:
    """One stream at a time: the megakernel, or PyTorch in its place, which is made to take its own codes.
    `LanesUnderTest` is its like."""

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

    def observed(self, streams: Sequence[RowStream], size: int) -> Iterator[tuple[int, Iterable[ratio.Observed]]]:
        """What every frame of the compared streams did, with their numbers."""
        return ((number, self._frames(stream)) for number, stream in enumerate(streams))

    def codes(self, streams: Sequence[RowStream], size: int) -> list[Tensor]:
        """Codes (T, 16) of each stream."""
        return [our_codes(self.backend, one, one.sampling, one.seed, len(one.text)) for one in streams]

    def _frames(self, stream: RowStream) -> Iterator[ratio.Observed]:
        state = self.start(stream, stream.sampling, stream.seed, len(stream.text))
        for index in range(len(stream.text)):
            frame = self.step(state, stream.row(index - 1) if index else None)
            if frame is None:
                return
            yield frame


UnderTest = KernelUnderTest | LanesUnderTest


def oracles_of(checkpoint: Checkpoint, device: str) -> Oracles:
    """PyTorch in bf16 and in fp32."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    return TorchBackend(config, tensors, device, torch.bfloat16), TorchBackend(config, tensors, device, torch.float32)


@torch.inference_mode()
def forced_frames(
    tested: UnderTest, oracles: Oracles, loads: Mapping[int, Sequence[RowStream]], budget: Budget = UNLIMITED
) -> dict[str, Any]:
    """The comparisons `forced` and `divergence`. loads: streams by context, or by number of lanes. A budget that is
    over makes fewer frames of each load, two at least: a stream's first has no talker step."""
    config = oracles[1].config
    errors, frames, differences, compared = ratio.FrameErrors(config), {}, [], 0
    for index, (size, streams) in enumerate(loads.items()):
        within, made, apart = budget.share(1 / (len(loads) - index)), 0, set()
        played = (
            (n, i, sides)
            for n, seen in tested.observed(streams, size)
            for i, sides in enumerate(ratio.replayed(streams[n], seen, *oracles))
        )
        for number, frame, sides in played:
            stream = streams[number]
            errors.add(sides, stream.sampling)
            made += 1
            if stream.sampling == GREEDY and number not in apart:
                compared += 1
                if difference := ratio.first_difference(sides, config):
                    apart.add(number)
                    differences.append({"load": size, "stream": number, "frame": frame, **difference})
            if made >= 2 and within.over:
                break
        frames[str(size)] = made
    asked = max(sum(len(stream.text) for stream in streams) for streams in loads.values())
    explained = all(difference["explained"] for difference in differences)
    worst = min(differences, key=lambda difference: difference["explained"], default={})
    return {
        "forced": {"frames": frames, "asked": asked, **errors.found()},
        "divergence": {"frames": compared, "diverged": bool(differences), **worst, "passed": explained},
    }


@torch.inference_mode()
def exact_codes(
    tested: UnderTest,
    fp32: TorchBackend,
    streams: Sequence[RowStream],
    sizes: Sequence[int],
    budget: Budget = UNLIMITED,
) -> dict[str, Any]:
    """The comparison `exact`: a load of each size has these streams, each as often as there is room for it. frames:
    that are fp32's, from the beginning of each stream. A budget that is over makes fewer of fp32's frames, and of its
    streams."""
    truths: list[tuple[Tensor, bool]] = []  # and whether time cut it
    for stream in streams:
        if not (truths and budget.over):
            codes = our_codes(fp32, stream, GREEDY, 0, len(stream.text), budget)
            truths.append((codes, len(codes) < len(stream.text) and budget.over))
    frames, compared, places = 0, 0, []
    for size in sizes:
        played = [replace(streams[i % len(truths)], seed=i) for i in range(size)]
        for number, ours in enumerate(tested.codes(played, size)):
            truth, cut = truths[number % len(truths)]
            mismatch = first_mismatch(ours[: len(truth)] if cut else ours, truth)
            compared += len(truth)
            frames += mismatch[0] if mismatch else len(truth)
            if mismatch:
                places.append({"load": size, "stream": number, "frame": mismatch[0], "codebook": mismatch[1]})
    found = {"frames": frames, "asked": sum(sizes) * len(streams[0].text), "equal": not places}
    first = {"first_difference": places[0]} if places else {}
    return {**found, **first, "passed": not places and compared > 0}


def parity_of(
    source: str,
    scope: Scope,
    kernel: str,
    device: str,
    *,
    batch: bool = False,
    revision: str | None = None,
    budget: Budget = UNLIMITED,
) -> dict[str, Any]:
    """All comparisons of one checkpoint; `exact` uses its wide-margin variant, which random ones have.

    kernel: "megakernel" or "torch". batch: of the batched frame instead, by mode, and of the codec of many streams.
    budget: what does not fit into it makes fewer frames than `scope` asks for; every comparison says how many it made.
    `passed` says whether all passed."""
    exact_frames = scope.lane_exact if batch else scope.exact
    margin = source.startswith("random:") and exact_frames > 0
    found: dict[str, Any] = {}
    by_mode = {mode: found.setdefault(mode, {}) for mode in MODES} if batch else {kernel: found}

    def under_test(checkpoint: Checkpoint, mode: str, bf16: TorchBackend, streams: Sequence[RowStream]) -> UnderTest:
        if batch:
            return cuda_lanes(checkpoint, mode, device, scope.lanes, streams, scope.watched)
        if mode == "torch":
            return KernelUnderTest(bf16)
        from mktts.kernel.backend import MegakernelBackend

        return KernelUnderTest(MegakernelBackend(checkpoint.config, checkpoint.tensors(), device))

    checkpoint = open_checkpoint(source, revision)
    oracles, within = oracles_of(checkpoint, device), budget.share(0.6 if margin else 0.8)
    if batch:
        load = partial(random_load, oracles[1], watched=scope.watched, frames=scope.lane_frames)
        loads = {size: load(size, contexts=scope.contexts) for size in scope.lanes}
    else:
        load = partial(random_load, oracles[1], _EACH, watched=_EACH, frames=max(2, -(-scope.frames // _EACH)))
        loads = {rows: load(contexts=(rows,)) for rows in scope.contexts}
    for index, (mode, compared) in enumerate(by_mode.items()):
        tested = under_test(checkpoint, mode, oracles[0], list(chain(*loads.values())))
        compared |= forced_frames(tested, oracles, loads, within.share(1 / (len(by_mode) - index)))
        del tested
        release(device)
    if margin:
        del oracles, loads, load
        release(device)
        checkpoint, within = open_checkpoint(source + MARGIN, revision), budget.share(0.8)
        bf16, fp32 = oracles_of(checkpoint, device)
        sizes = scope.lanes if batch else (1,)
        streams = ratio.spoken_streams(checkpoint, fp32, scope.watched if batch else 1, exact_frames)
        room = [streams[i % len(streams)] for i in range(max(sizes))]
        for mode, compared in by_mode.items():
            compared["exact"] = exact_codes(under_test(checkpoint, mode, bf16, room), fp32, streams, sizes, within)
            release(device)
    if batch:
        found["codec"] = batched_errors(open_checkpoint(source, revision), device, scope.lanes, budget)
    measured = [compared[name] for compared in by_mode.values() for name in _WRONG if name in compared]
    measured += [found["codec"]] if batch else []
    return {**found, "passed": all(value["passed"] for value in measured)}


def release(device: str) -> None:
    """What a comparison held goes before the next one asks for memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """The section of what `parity_of` found; the comparisons themselves stand beside the sections."""
    by_mode = {f"{mode}, ": found[mode] for mode in MODES if mode in found} or {"": found}
    section: dict[str, Any] = {"frames": 0, "ratio": {}}
    reasons = []
    for mode, compared in by_mode.items():
        section["frames"] += sum(compared["forced"]["frames"].values())
        section["ratio"] |= {f"{mode}{n}": value["ratio"] for n, value in compared["forced"]["pooled"].items()}
        reasons += [mode + why for name, why in _WRONG.items() if name in compared and not compared[name]["passed"]]
    if "codec" in found:
        section["codec_db"] = {name: v["snr_db"] for name, v in found["codec"].items() if isinstance(v, dict)}
        reasons += [] if found["codec"]["passed"] else ["the codec in a batch is farther from fp32 than it may be"]
    return section | ({"reason": reasons[0]} if reasons else {})
