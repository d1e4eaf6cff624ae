"""The sections of `python -m mktts parity`: each proves one part of a checkpoint, and passes, fails or is skipped.

* prompt: prompt embeddings, bit for bit upstream's.
* codes: codes of PyTorch in bf16, and in fp32 where time allows, frame for frame upstream's: greedy and drawn.
* codec: codes decoded in the default schedule of chunks, as the synthesizer on this device does it, against our
  decode in one pass (fp32, on the CPU) and against upstream's own.
* kernel, batch: see mktts.measure.parity.kernel and .batch.

Upstream runs on the CPU, and so does what must equal it bit for bit: there the same operators round in the same way.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import codec_for
from mktts.errors import BackendUnavailable
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.codec import decode_streamed, frame_errors, random_codes, snr_db
from mktts.measure.parity.upstream import (
    DTYPES,
    Row,
    compare_expected,
    compare_prompts,
    standard_requests,
    upstream_codes,
)
from mktts.speech.options import SCHEDULE
from mktts.synth.upstream import decode_codes, load_upstream

CODES_FRAMES = 24  # of one request
CODES_REQUESTS = 3  # greedy, and as many drawn
CODEC_FRAMES = 100  # beyond the codec's attention window of 72; upstream decodes up to 300 without approximation
_CODEC_LEAST_FRAMES = 16
# Signal-to-noise ratio that a decode must have: fp32 operators in another order, and the fused kernels of CUDA, whose
# products of two fp16 halves gave 88 dB at full size (mktts.codec.graphs).
LEAST_SNR_DB = {"cpu": 100.0, "cuda": 80.0}
SEED = 7


class Upstream:
    """qwen-tts's model of one checkpoint, on the CPU, loaded when it is asked for and held in one dtype at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._held: tuple[torch.dtype, Any] | None = None

    def model(self, dtype: torch.dtype) -> Any:
        """A qwen_tts.Qwen3TTSModel. Raises BackendUnavailable without qwen-tts."""
        if self._held is None or self._held[0] != dtype:
            self._held = None  # freed before the next is loaded
            self._held = dtype, load_upstream(self._checkpoint, dtype)
        return self._held[1]

    def free(self) -> None:
        """Lets the weights go."""
        self._held = None


def section(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The outcome of `work`: status ("passed", "failed", "skipped"), reason where it is not passed, seconds, figures.

    `work` returns its figures, with a `reason` where it failed. BackendUnavailable skips; any other error fails.
    """
    begun_s = time.perf_counter()
    try:
        found = work()
        outcome = {"status": "failed" if found.get("reason") else "passed", **found}
    except BackendUnavailable as error:
        outcome = {"status": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  the other sections still count
        traceback.print_exc(file=sys.stderr)
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": time.perf_counter() - begun_s}


def prompt_section(checkpoint: Checkpoint, upstream: Upstream, budget: Budget) -> dict[str, Any]:
    """Every mode that the checkpoint has, in bf16."""
    dtype, requests = torch.bfloat16, standard_requests(checkpoint)
    model, rows = upstream.model(dtype), []
    for request in requests:
        if rows and budget.over:
            break
        rows += compare_prompts(checkpoint, [request], dtype, model)
    for row in rows:
        if not math.isfinite(row["max_abs_error"]):
            row["max_abs_error"] = None  # prompts of two lengths
    wrong = [row for row in rows if not row["equal"]]
    found = {"prompts": len(rows), "asked": len(requests), "equal": len(rows) - len(wrong), "rows": rows}
    if wrong:
        found["reason"] = f"{len(wrong)} of {len(rows)} prompts are not upstream's: first {_named(wrong[0])}"
    return found


def codes_section(checkpoint: Checkpoint, upstream: Upstream, budget: Budget) -> dict[str, Any]:
    """Greedy codes and drawn ones; fp32 where it can be done in the time that bf16 leaves."""
    requests = standard_requests(checkpoint)[:CODES_REQUESTS]
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    took_s = 0.0
    for name, dtype in DTYPES.items():
        if rows and budget.left_s < took_s:
            left_out[name] = f"no time: it would take about {took_s:.0f} s, {max(0.0, budget.left_s):.0f} s were left"
            continue
        begun_s = time.perf_counter()
        model, within = upstream.model(dtype), budget.share(0.2)  # loading and ours take as much again, and so may fp32
        greedy, drawn = checkpoint.sampling().greedy(), replace(checkpoint.sampling(), rng="torch")
        expected = upstream_codes(model, requests, greedy, SEED, CODES_FRAMES, within.share(0.5))
        expected += upstream_codes(model, requests, drawn, SEED, CODES_FRAMES, within)
        del model
        upstream.free()
        rows += compare_expected(checkpoint, expected, dtype)
        took_s = time.perf_counter() - begun_s
    wrong = [row for row in rows if not row["equal"]]
    frames = {name: sum(row["frames"] for row in rows if row["dtype"] == name) for name in DTYPES}
    # The times of a run this short are no measurement: they stay out.
    kept = [{name: value for name, value in row.items() if not name.endswith("_ms_per_frame")} for row in rows]
    asked = 2 * len(requests) * CODES_FRAMES
    found = {"frames": frames, "asked": asked, "equal": not wrong, "left_out": left_out, "rows": kept}
    if wrong:
        frame, codebook = wrong[0]["first_mismatch"]
        found["reason"] = (
            f"{len(wrong)} of {len(rows)} utterances are not upstream's: first {_named(wrong[0])}, "
            f"frame {frame}, codebook {codebook}"
        )
    return found


def codec_section(checkpoint: Checkpoint, upstream: Upstream, device: str, budget: Budget) -> dict[str, Any]:
    """Seeded random codes: every entry of every codebook is as likely as any other."""
    config, tensors = checkpoint.codec_config, checkpoint.codec_tensors()
    ours, whole = codec_for(config, tensors, device), CodecDecoder(config, tensors)
    schedule = SCHEDULE
    codes = random_codes(CODEC_FRAMES, SEED, config.codebook_size)
    begun_s = time.perf_counter()
    whole.decode_all(codes[:_CODEC_LEAST_FRAMES])
    frame_s = (time.perf_counter() - begun_s) / _CODEC_LEAST_FRAMES
    decodes = 4  # streamed, whole and upstream's, and one to spare
    affordable = int(max(0.0, budget.left_s) / decodes / frame_s)
    codes = codes[: max(_CODEC_LEAST_FRAMES, min(CODEC_FRAMES, affordable))]
    streamed, offline = decode_streamed(ours, codes, schedule).cpu(), whole.decode_all(codes)
    least = LEAST_SNR_DB[torch.device(device).type]
    found: dict[str, Any] = {
        "frames": len(codes),
        "asked": CODEC_FRAMES,
        "schedule": list(schedule),
        "variant": ours.name,
        "least_db": least,
        "streamed_to_whole": _distance(streamed, offline),
    }
    try:
        theirs = torch.as_tensor(decode_codes(upstream.model(torch.bfloat16), codes))  # its codec is fp32 all the same
        found["streamed_to_upstream"] = _distance(streamed, theirs)
        found["whole_to_upstream"] = _distance(offline, theirs)
    except BackendUnavailable as error:
        found["upstream"] = f"skipped: {error}"
    limits = {"streamed_to_whole": least, "streamed_to_upstream": least, "whole_to_upstream": LEAST_SNR_DB["cpu"]}
    for name, limit in limits.items():
        if name in found and not found[name]["equal"] and not found[name]["snr_db"] >= limit:
            found["reason"] = f"{name}: {found[name]['snr_db']:.1f} dB, at least {limit:g} dB expected"
            break
    return found


def _distance(found: Tensor, reference: Tensor) -> dict[str, Any]:
    """Signal-to-noise ratio (None where equal, sample for sample) and largest absolute error of full scale 1.0."""
    equal = torch.equal(found, reference)
    return {
        "equal": equal,
        "snr_db": None if equal else snr_db(found, reference),
        "max_abs_error": float(frame_errors(found, reference).max()),
    }


def _named(row: Row) -> str:
    return f"{row['text']!r} ({row['mode']}, {row['language']}, {row['layout']} layout, {row['dtype']})"


def passed(sections: Sequence[dict[str, Any]]) -> bool:
    """Whether at least one passed and none failed."""
    states = [found["status"] for found in sections]
    return "passed" in states and "failed" not in states
