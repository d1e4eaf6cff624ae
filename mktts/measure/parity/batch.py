"""The batched frame against an fp32 run of the same weights, next to bf16 PyTorch, as `parity.kernel` does it.

Crowds of streams with prompts of their own play in ticks of 8, 64 and 256 lanes: prompts are cut over ticks, some begin
behind a kept prefix, lanes are at different positions. Of each crowd the last few streams are compared, once with sums
of one order ("deterministic"), once by cuBLAS ("cublas"); where bf16 PyTorch stands in the kernels' place, "torch".

* forced: the kernels choose the codes, and both oracles take them. `ratio` is the relative rms error to fp32 over the
  bf16 oracle's, of logits and of the talker's residual stream: at most LIMIT passes.
* free: of those streams that are greedy, the frames before the first choice that is not fp32's are counted; that choice
  is explained as in `divergence` of `parity.kernel`.
* exact: greedy codes of all lanes on wide-margin random weights equal fp32's.
* codec: see `parity.batch_codec`.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mktts.batch.scheduler import TickSettings
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.measure.checkpoint_maker import CheckpointMaker
from mktts.measure.parity.batch_codec import codec_errors
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.crowd import CrowdStream, pages_for
from mktts.measure.parity.crowd_errors import (
    BatchScope,
    crowd_streams,
    exact_codes,
    exact_crowds,
    exact_streams,
    forced_crowds,
)
from mktts.measure.parity.kernel import MARGIN
from mktts.measure.parity.lanes_probe import CudaProbe, LanesProbe, PlainProbe
from mktts.measure.parity.probe import LIMIT
from mktts.model.oracle import TorchBackend

_WRONG = {
    "forced": f"its error is more than {LIMIT} times bf16 PyTorch's",
    "free": "a stream first differs from fp32 where rounding does not explain it",
    "exact": "a greedy code of the wide-margin variant is not fp32's",
}
MODES = {"deterministic": True, "cublas": False}  # of CudaLanes
_PROMPT_ROWS = (0, 64, 1_024)  # of the buckets of each size
_PLAIN_BYTES = 1 << 30  # for keys and values of PyTorch's lanes


def probe_for(
    checkpoint: Checkpoint, kernel: str, mode: str, device: str, sizes: Sequence[int], streams: Sequence[CrowdStream]
) -> LanesProbe:
    """Lanes in bf16 with room for `streams`, all open at once, that show what they do. kernel: "megakernel" for those
    of a CUDA device, "torch" for PyTorch's."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    positions = max(stream.rows for stream in streams)
    if kernel == "torch":
        from mktts.batch.plain.lanes import TorchLanes
        from mktts.codec.decoder import CodecDecoder

        decoder = CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors(), device)
        dtype, slots = torch.bfloat16, max(sizes)
        return PlainProbe(TorchLanes(config, tensors, decoder, slots, positions, _PLAIN_BYTES, dtype))
    from mktts.batch.cuda.lanes import CudaLanes

    return CudaProbe(
        CudaLanes(
            config,
            tensors,
            torch.device(device),
            torch.bfloat16,
            slots=max(sizes),
            positions=positions,
            pages=pages_for(streams),
            settings=crowd_settings(sizes),
            graphs=False,
            deterministic=MODES[mode],
        )
    )


def crowd_settings(sizes: Sequence[int], prompt_rows: Sequence[int] = _PROMPT_ROWS) -> TickSettings:
    """Ticks of exactly these numbers of lanes and prompt rows."""
    buckets = tuple((lanes, rows) for lanes in sizes for rows in prompt_rows)
    return TickSettings(buckets, max(sizes), max(prompt_rows), min_rows=1, few_lanes=1)


def batch_parity_of(
    source: str,
    scope: BatchScope,
    kernel: str,
    device: str,
    *,
    revision: str | None = None,
    maker: CheckpointMaker | None = None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """All comparisons of one checkpoint by mode, and the codec's; arguments as of `kernel.parity_of`.

    What fails is named under `errors`; `passed` says whether nothing did and all that ran passed.
    """
    modes = ["torch"] if kernel == "torch" else list(MODES)
    result: dict[str, Any] = {**{mode: {} for mode in modes}, "seconds": {}, "errors": {}}
    budget, margin = budget or Budget(), source.startswith("random:") and scope.exact > 0

    def part(name: str, measure: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        try:
            measure()
        except Exception as error:  # noqa: BLE001  the other parts still count
            traceback.print_exc(file=sys.stderr)
            result["errors"][name] = f"{type(error).__name__}: {error}"
        result["seconds"][name] = time.perf_counter() - begun_s
        _free(device)

    def opened(wanted: str) -> Checkpoint:
        if maker is not None:
            maker.wait(wanted)
        return open_checkpoint(wanted, revision)

    def forced_and_free(within: Budget) -> None:
        checkpoint = opened(source)
        config, tensors = checkpoint.config, checkpoint.tensors()
        bf16, fp32 = (TorchBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
        crowds = {size: crowd_streams(fp32, size, scope) for size in scope.lanes}
        every = [stream for streams in crowds.values() for stream in streams]
        for index, mode in enumerate(modes):

            def compare(mode: str = mode, share: float = 1 / (len(modes) - index)) -> None:
                probe = probe_for(checkpoint, kernel, mode, device, scope.lanes, every)
                result[mode].update(forced_crowds(probe, bf16, fp32, crowds, scope, within.share(share)))

            part(f"{mode}: forced, free", compare)

    def exact(within: Budget) -> None:
        checkpoint = opened(source + MARGIN)
        fp32 = TorchBackend(checkpoint.config, checkpoint.tensors(), device, torch.float32)
        streams = exact_streams(checkpoint, fp32, scope)
        truths = exact_codes(fp32, streams, within)
        del fp32
        for mode in modes:

            def compare(mode: str = mode) -> None:
                room = [streams[i % len(streams)] for i in range(max(scope.lanes))]
                probe = probe_for(checkpoint, kernel, mode, device, scope.lanes, room)
                result[mode]["exact"] = exact_crowds(probe, scope.lanes, streams, truths)

            part(f"{mode}: exact", compare)

    part("load and compare", lambda: forced_and_free(budget.share(0.5 if margin else 0.8)))
    if margin:
        part("load and compare, wide margins", lambda: exact(budget.share(0.5)))
    part("codec", lambda: result.update(codec=codec_errors(opened(source), kernel, device, scope.lanes, budget)))
    found = [value for mode in modes for value in result[mode].values()] + [result.get("codec", {"passed": False})]
    result["passed"] = not result["errors"] and all(value["passed"] for value in found)
    return result


def batch_outcome(found: dict[str, Any]) -> dict[str, Any]:
    """The section of what `batch_parity_of` found; the comparisons themselves stand beside the sections."""
    outcome: dict[str, Any] = {"batch": "see batch", "frames": 0, "ratio": {}}
    reasons = [f"{name}: {reason}" for name, reason in found["errors"].items()]
    for mode in (*MODES, "torch"):
        compared = found.get(mode, {})
        if "forced" in compared:
            outcome["frames"] += sum(compared["forced"]["frames"].values())
            outcome["ratio"] |= {f"{mode}, {n}": v["ratio"] for n, v in compared["forced"]["pooled"].items()}
        reasons += [f"{mode}: {_WRONG[name]}" for name, value in compared.items() if not value["passed"]]
    if "codec" in found:
        outcome["codec_db"] = {n: v["snr_db"] for n, v in found["codec"].items() if isinstance(v, dict)}
        reasons += [] if found["codec"]["passed"] else ["the codec in a batch is farther from fp32 than it may be"]
    return outcome | ({"reason": reasons[0]} if reasons else {})


def _free(device: str) -> None:
    """What a part held goes before the next one asks for memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
