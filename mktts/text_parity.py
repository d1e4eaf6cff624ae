"""The text decoder's kernel against an fp32 run of the same weights: the part `text` of mktts.kernel_parity."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch

from mktts.relative import LIMIT, Errors, compare
from mktts.sampling import Choice

CONTEXTS = (16, 200, 1_000, 1_900)
_TOKENS = 50  # at each context
_EXACT_TOKENS = 125  # at each context, on wide-margin weights
_IDS = 1_000  # the prompts' ids are below


def compare_text(source: str, kernel: str, device: str) -> dict[str, Any]:
    """`ordinary` weights, and for random ones their wide-`margin` variant; see `_compare`. A failure is named."""
    result: dict[str, Any] = {"source": source}
    try:
        result["ordinary"] = _compare(source, kernel, device, _TOKENS)
        if source.startswith("random:"):
            result["margin"] = _compare(source + ":margin", kernel, device, _EXACT_TOKENS)
            result["margin"]["passed"] &= result["margin"]["equal"] == result["margin"]["tokens"]
    except Exception as error:  # noqa: BLE001  no text model, no kernel for it, a bug: all leave the rest standing
        traceback.print_exc(file=sys.stderr)
        result["error"] = f"{type(error).__name__}: {error}"
    result["passed"] = "error" not in result and all(result[n]["passed"] for n in ("ordinary", "margin") if n in result)
    return result


@torch.inference_mode()
def _compare(source: str, kernel: str, device: str, tokens_each: int) -> dict[str, Any]:
    """The kernel's greedy tokens, which both oracles are made to take: how many are fp32's choice, and why the others
    are not.

    A differing choice is explained where fp32's own gap between the two tokens is within twice the bf16 oracle's
    largest logit error at that position. A backend with a method `logits(state)`, called before `step`, also has its
    logits' error measured.
    """
    from mktts.text_backend import TorchTextBackend
    from mktts.text_model import open_text_checkpoint

    checkpoint = open_text_checkpoint(source)
    config, tensors = checkpoint.config, checkpoint.tensors()
    bf16, fp32 = (TorchTextBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    tested: Any = bf16
    if kernel == "megakernel":
        from mktts.text_kernel import TextKernelBackend

        tested = TextKernelBackend(config, tensors, torch.device(device), torch.bfloat16)
    shown = getattr(tested, "logits", None)
    errors = Errors(), Errors()
    tokens = equal = explained = 0
    largest_gap = largest_error = 0.0
    for context in CONTEXTS:
        prompt = torch.randint(_IDS, (context,), generator=torch.Generator().manual_seed(context))
        states = [backend.start(prompt, Choice(do_sample=False), 0, tokens_each) for backend in (tested, bf16, fp32)]
        for _ in range(tokens_each):
            near, truth = bf16.logits(states[1]), fp32.logits(states[2])
            if shown is not None:
                for found, sums in zip((shown(states[0]), near), errors, strict=True):
                    sums.add(found.float(), truth, "logits", f"logits at {context}")
            (token,) = tested.step(states[0], 1)
            best = int(truth.argmax())
            gap, error = float(truth[best] - truth[token]), float((near - truth).abs().max())
            tokens += 1
            equal += token == best
            explained += token == best or gap <= 2 * error
            largest_gap, largest_error = max(largest_gap, gap), max(largest_error, error)
            states[1].last = states[2].last = token
    relative = compare(*errors)
    return {
        "contexts": list(CONTEXTS),
        "tokens": tokens,
        "equal": equal,
        "explained": explained,
        "largest_gap_of_a_difference": largest_gap,
        "bf16_largest_error": largest_error,
        "errors": relative,
        "passed": explained == tokens and all(v["ratio"] <= LIMIT for n, v in relative.items() if n == "logits"),
    }
