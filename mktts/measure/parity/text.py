"""The text decoder's kernel against an fp32 run of the same weights, as mktts.measure.parity.kernel does for speech."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mktts.measure.parity.ratio import LIMIT, Budget, ErrorRatio
from mktts.model.sampling import Choice

CONTEXTS = (16, 200, 1_000, 1_900)
_TOKENS = 50  # at each context
_EXACT_TOKENS = 125  # at each context, on wide-margin weights
_IDS = 1_000  # the prompts' ids are below


def compare_text(source: str, kernel: str, device: str, budget: Budget) -> dict[str, Any]:
    """`ordinary` weights, and for random ones their wide-`margin` variant, each as of `_compare`. reason: why not."""
    found = {"ordinary": _compare(source, kernel, device, _TOKENS, budget.share(0.5))}
    if source.startswith("random:"):
        margin = found["margin"] = _compare(source + ":margin", kernel, device, _EXACT_TOKENS, budget)
        margin["passed"] &= margin["equal"] == margin["tokens"]
    wrong = [name for name, compared in found.items() if not compared["passed"]]
    return found | ({"reason": f"{', '.join(wrong)} weights: the tokens are not fp32's"} if wrong else {})


@torch.inference_mode()
def _compare(source: str, kernel: str, device: str, tokens_each: int, budget: Budget) -> dict[str, Any]:
    """The kernel's greedy tokens, which both oracles are made to take: how many are fp32's choice, and why the others
    are not.

    A differing choice is explained where fp32's own gap between the two tokens is within twice the bf16 oracle's
    largest logit error at that position.
    """
    from mktts.llm.backend import TorchTextBackend
    from mktts.llm.checkpoint import open_text_checkpoint
    from mktts.llm.kernel import TextKernelBackend

    checkpoint = open_text_checkpoint(source)
    config, tensors = checkpoint.config, checkpoint.tensors()
    bf16, fp32 = (TorchTextBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    tested: Any = bf16
    if kernel == "megakernel":
        tested = TextKernelBackend(config, tensors, torch.device(device), torch.bfloat16)

    def step(state: Any) -> tuple[int, Tensor]:
        if tested is bf16:
            logits = bf16.logits(state)
            return bf16.step(state)[0], logits
        logits = torch.zeros(1, config.stack.vocab_size, dtype=tested.dtype, device=tested.device)
        (token,) = tested.step(state, 1, logits)
        return token, logits[0].float()

    errors, rows = ErrorRatio(), []  # of each token: whether it is fp32's choice, fp32's gap, bf16's largest error
    for index, context in enumerate(CONTEXTS):
        within, begun = budget.share(1 / (len(CONTEXTS) - index)), len(rows)
        prompt = torch.randint(_IDS, (context,), generator=torch.Generator().manual_seed(context))
        states = [backend.start(prompt, Choice(do_sample=False), 0, tokens_each) for backend in (tested, bf16, fp32)]
        while len(rows) - begun < tokens_each and (len(rows) == begun or not within.over):
            near, truth = bf16.logits(states[1]), fp32.logits(states[2])
            token, ours = step(states[0])
            errors.add(ours, near, truth, "logits")
            best = int(truth.argmax())
            rows.append((token == best, float(truth[best] - truth[token]), float((near - truth).abs().max())))
            states[1].last = states[2].last = token
    relative = errors.found()
    explained = sum(equal or gap <= 2 * error for equal, gap, error in rows)
    return {
        "contexts": list(CONTEXTS),
        "tokens": len(rows),
        "asked": tokens_each * len(CONTEXTS),
        "equal": sum(equal for equal, _, _ in rows),
        "explained": explained,
        "largest_gap_of_a_difference": max(gap for _, gap, _ in rows),
        "bf16_largest_error": max(error for _, _, error in rows),
        "errors": relative,
        "passed": explained == len(rows) and relative["logits"]["ratio"] <= LIMIT,
    }
