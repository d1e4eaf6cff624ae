"""The text decoder's kernel against an fp32 run of the same weights, as mktts.measure.parity.kernel does for speech."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mktts.measure.parity.budget import Budget
from mktts.measure.parity.probe import LIMIT, Errors, compare
from mktts.model.sampling import Choice

if TYPE_CHECKING:
    from mktts.llm.backend import TorchTextBackend
    from mktts.llm.kernel import TextKernelBackend

CONTEXTS = (16, 200, 1_000, 1_900)
_TOKENS = 50  # at each context
_EXACT_TOKENS = 125  # at each context, on wide-margin weights
_IDS = 1_000  # the prompts' ids are below


def compare_text(source: str, kernel: str, device: str, budget: Budget | None = None) -> dict[str, Any]:
    """`ordinary` weights, and for random ones their wide-`margin` variant; see `_compare`. A failure is named."""
    result: dict[str, Any] = {"source": source}
    budget = budget or Budget()
    try:
        result["ordinary"] = _compare(source, kernel, device, _TOKENS, budget.share(0.5))
        if source.startswith("random:"):
            result["margin"] = _compare(source + ":margin", kernel, device, _EXACT_TOKENS, budget)
            result["margin"]["passed"] &= result["margin"]["equal"] == result["margin"]["tokens"]
    except Exception as error:  # noqa: BLE001  no text model, no kernel for it, a bug: all leave the rest standing
        traceback.print_exc(file=sys.stderr)
        result["error"] = f"{type(error).__name__}: {error}"
    result["passed"] = "error" not in result and all(result[n]["passed"] for n in ("ordinary", "margin") if n in result)
    return result


@torch.inference_mode()
def _compare(source: str, kernel: str, device: str, tokens_each: int, budget: Budget) -> dict[str, Any]:
    """The kernel's greedy tokens, which both oracles are made to take: how many are fp32's choice, and why the others
    are not.

    A differing choice is explained where fp32's own gap between the two tokens is within twice the bf16 oracle's
    largest logit error at that position.
    """
    from mktts.llm.backend import TorchTextBackend
    from mktts.llm.checkpoint import open_text_checkpoint

    checkpoint = open_text_checkpoint(source)
    config, tensors = checkpoint.config, checkpoint.tensors()
    bf16, fp32 = (TorchTextBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    tested: Any = bf16
    step: Callable[[Any], tuple[int, Tensor]] = partial(_torch_step, bf16)
    if kernel == "megakernel":
        from mktts.llm.kernel import TextKernelBackend

        tested = TextKernelBackend(config, tensors, torch.device(device), torch.bfloat16)
        step = partial(_kernel_step, tested)
    errors = Errors(), Errors()
    tokens = equal = explained = 0
    largest_gap = largest_error = 0.0
    for index, context in enumerate(CONTEXTS):
        within, begun = budget.share(1 / (len(CONTEXTS) - index)), tokens
        prompt = torch.randint(_IDS, (context,), generator=torch.Generator().manual_seed(context))
        states = [backend.start(prompt, Choice(do_sample=False), 0, tokens_each) for backend in (tested, bf16, fp32)]
        while tokens - begun < tokens_each and (tokens == begun or not within.over):
            near, truth = bf16.logits(states[1]), fp32.logits(states[2])
            token, ours = step(states[0])
            for found, sums in zip((ours, near), errors, strict=True):
                sums.add(found, truth, "logits", f"logits at {context}")
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
        "asked": tokens_each * len(CONTEXTS),
        "equal": equal,
        "explained": explained,
        "largest_gap_of_a_difference": largest_gap,
        "bf16_largest_error": largest_error,
        "errors": relative,
        "passed": explained == tokens and all(v["ratio"] <= LIMIT for n, v in relative.items() if n == "logits"),
    }


def _torch_step(backend: TorchTextBackend, state: Any) -> tuple[int, Tensor]:
    logits = backend.logits(state)
    return backend.step(state)[0], logits


def _kernel_step(backend: TextKernelBackend, state: Any) -> tuple[int, Tensor]:
    logits = torch.zeros(1, backend.config.stack.vocab_size, dtype=backend.dtype, device=backend.device)
    (token,) = backend.step(state, 1, logits)
    return token, logits[0].float()
